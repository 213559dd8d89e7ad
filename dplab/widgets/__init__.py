"""The live board and its controls; the only place that touches a notebook front end."""
