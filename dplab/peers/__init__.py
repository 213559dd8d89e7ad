"""Other people's engines behind the same verbs as ours: rivals in `dplab compare`, oracles in the parity tests."""
