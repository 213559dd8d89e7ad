"""The only place that touches a notebook front end: `board.Board`, which `run.dashboard()` makes, and `explorer`."""
