"""The live board; the only place that touches a notebook front end."""
