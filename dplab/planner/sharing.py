"""Over how many ranks a strategy shards, and in how many bytes its gradients travel: hybrid, and codecs."""

from __future__ import annotations

from collections.abc import Mapping

from dplab.errors import UsageError
from dplab.specs import Placement, Strategy
from dplab.topology import Topology

TRAVELS = {"bf16": 2.0, "fp16": 2 + 2 / 128, "int8": 1 + 4 / 128, "int8-ef": 1 + 4 / 128}
"""Bytes of a gradient's element on the wire, the scale of its block of 128 included."""


def per_host(strategy: Strategy, world_size: int) -> int:
    """Ranks that shard, or sum, among themselves before hosts meet: all, where the strategy is not hybrid. Raises
    UsageError where it is and nobody says how many ranks a host has."""
    if not strategy.hybrid:
        return world_size
    if strategy.topology is None:
        raise UsageError(f"strategy {str(strategy)!r} shards inside a host, and nothing says how many ranks a host "
                         f"has; name hosts and links too, such as topology=2x8@100gbe")
    topology = Topology.parse(strategy.topology)
    topology.require(world_size)
    return len(topology.grid()[0])


def travels(strategy: Strategy, sent: dict[str, float], plain: Mapping[str, float], hosts: int) -> dict[str, float]:
    """Bytes of `sent` elements by collective, `plain` the bytes of one that no codec takes. A codec takes the last
    collective that gradients go through: the one between hosts, if hybrid. UsageError for PowerSGD, whose bytes depend
    on every matrix's shape."""
    told = {name: count * plain[name] for name, count in sent.items()}
    if strategy.wire is None:
        return told
    if strategy.wire not in TRAVELS:
        raise UsageError(f"what wire={strategy.wire} sends depends on every matrix's shape and is not predicted; "
                         f"predict {', '.join(TRAVELS)}, or leave wire out")
    replicated = strategy.sharding.optim is Placement.REPLICATED
    name = "all_reduce" if replicated or strategy.hybrid else "reduce_scatter"
    coded = sent[name]
    if replicated and strategy.hybrid:
        # of 2 (N-1)/N, the part that is not 2 (G-1)/G inside a host: 2 (H-1)/H of a G-th, where G is N/H
        ranks = Topology.parse(strategy.topology or "").size
        coded = sent[name] * (hosts - 1) / (ranks - 1)
    return told | {name: told[name] + coded * (TRAVELS[strategy.wire] - plain[name])}
