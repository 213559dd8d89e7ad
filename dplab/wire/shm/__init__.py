"""The wire between processes of one host: collectives over shared memory, in Python and torch alone."""
