"""`--topology`: the links that a run is to feel, and how many ranks lie on them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from dplab.errors import UsageError
from dplab.specs import Strategy
from dplab.topology import Topology

RANKS = 2
"""Where neither --world-size nor a topology says how many."""


def link_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the option."""
    parser.add_argument("--topology", metavar="LINKS", help="emulate links: 2x2@10gbe (hosts x ranks @ between hosts), "
                        "4@pcie3, 3x3090, 2x8xH100, 2x2@1Gb/s:50us,pcie4 (default: none, data travel as fast as here)")


def settle(args: argparse.Namespace, strategies: Sequence[str]) -> list[str]:
    """The strategies, each on the links that --topology names, if it does. Sets the number of ranks where nobody has
    given one. Raises UsageError where links and ranks do not fit each other."""
    wanted = args.topology
    if wanted is not None:
        Topology.parse(wanted)
    settled = [Strategy.parse(text) for text in strategies]
    for strategy in settled:
        if wanted is not None and strategy.topology not in (None, wanted):
            raise UsageError(f"--topology {wanted} and strategy {str(strategy)!r} name different links; leave one out")
    if wanted is not None:
        settled = [replace(strategy, topology=wanted) for strategy in settled]
    named = [wanted, *(strategy.topology for strategy in settled)]
    known = [Topology.parse(text) for text in dict.fromkeys(named) if text is not None]
    if args.world_size is None:
        args.world_size = known[0].size if known else RANKS
    for topology in known:
        if topology.size != args.world_size:
            raise UsageError(f"topology {topology.text!r} has {topology.size} ranks ({topology}), and --world-size is "
                             f"{args.world_size}; give --world-size {topology.size}, or another topology")
    return [text if wanted is None else str(strategy) for text, strategy in zip(strategies, settled, strict=True)]


def emulated(strategy: str) -> dict[str, str]:
    """What a report says of the links that a strategy emulates; nothing where it emulates none."""
    text = Strategy.parse(strategy).topology
    return {} if text is None else {"emulated": str(Topology.parse(text))}
