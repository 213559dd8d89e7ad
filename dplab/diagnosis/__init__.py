"""Rules that turn a run into findings: where its time and memory go, and what would help."""
