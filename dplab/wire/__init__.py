"""Everything that leaves a rank: worlds, collectives and the transports below them."""
