"""What happened, written as events to files and read back: the only truth about a run."""
