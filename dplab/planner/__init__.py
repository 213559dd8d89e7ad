"""What a strategy costs, before it runs: closed forms that tests, ledger and command line share."""
