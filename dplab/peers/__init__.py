"""Other libraries behind the same few verbs: parity oracle and benchmark rival."""
