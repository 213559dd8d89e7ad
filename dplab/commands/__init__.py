"""The command line's verbs, one noun a file. Each has `add(verbs)`, which declares its arguments without importing
anything heavy, and functions from parsed arguments to an `Answer`."""
