"""Links that are not there: data moves at once, and nobody sees it before the emulated links have carried it."""
