"""What a collective costs: latency and bandwidth by the links that its group crosses.

Times are seconds, sizes bytes of the full buffer. A ring moves 2(N-1)/N of it for an all-reduce and (N-1)/N for a
reduce-scatter or an all-gather; latency is a double binary tree's for an all-reduce and a ring's for the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dplab.planner.hardware import Cluster
from dplab.planner.recipes import Recipe
from dplab.planner.split import Split
from dplab.topology import Topology

LINK_STEP = 5.2e-6
"""Seconds a ring step inside a node: the all-reduce table of 8 A100 in vTrain's traces, 1 to 50 MB."""
NETWORK_STEP = 15e-6
"""Seconds a tree step between nodes: NCCL src/graph/tuning.cc, Simple protocol."""
NETWORK_RING_STEP = 4e-6
"""Seconds a ring step between nodes: the same table, LL128."""


@dataclass(frozen=True, kw_only=True)
class Emulated:
    """Groups of ranks that talk at once over the links of a topology, which they share; `levels`: an all-reduce sums
    inside hosts first."""

    topology: Topology
    groups: tuple[tuple[int, ...], ...]
    levels: bool = False

    def seconds(self, name: str, size: Any) -> Any:
        """Of a collective of `size` bytes in each group: a latency, and bytes at a rate."""
        start = self._of(name, 0.0)
        return start + np.asarray(size) * ((self._of(name, 1e9) - start) / 1e9)

    def _of(self, name: str, size: float) -> float:
        if self.levels and name == "all_reduce":
            return self.topology.seconds("hierarchical_all_reduce", size)
        return self.topology.together(name, size, self.groups)


@dataclass(frozen=True, kw_only=True)
class Group:
    """`ranks` that communicate, `in_node` of them in each node; `bandwidth` is bytes a second of each rank's ring."""

    ranks: Any
    in_node: Any
    bandwidth: Any
    measured: Cluster | None = None
    """this machine, whose curves stand for the formulas"""
    emulated: Emulated | None = None
    """links that a run of this machine waits for"""

    @classmethod
    def of(cls, ranks: Any, in_node: Any, cluster: Cluster, recipe: Recipe) -> Group:
        """A group with `in_node` members beside each other; its ring leaves a node through as many NICs."""
        ranks, in_node = np.asarray(ranks), np.minimum(ranks, np.maximum(in_node, 1))
        inside = cluster.link * recipe.link_share
        across = np.minimum(inside, in_node * cluster.network * recipe.network_share)
        return cls(ranks=ranks, in_node=in_node, bandwidth=np.where(ranks > in_node, across, inside),
                   measured=cluster if cluster.gpu.measured is not None else None)

    @property
    def nodes(self) -> Any:
        """Nodes that the group spans."""
        return np.ceil(self.ranks / self.in_node)

    def all_reduce(self, size: Any) -> Any:
        """Seconds to sum `size` bytes over the group."""
        if self.measured is not None:
            return self._on_curve("all_reduce", size)
        latency = 2 * ((self.in_node - 1) * LINK_STEP + np.ceil(np.log2(self.nodes)) * NETWORK_STEP)
        return np.where(self.ranks > 1, latency + 2 * (self.ranks - 1) / self.ranks * size / self.bandwidth, 0.0)

    def all_gather(self, size: Any) -> Any:
        """Seconds to gather `size` bytes in all."""
        if self.measured is not None:
            return self._on_curve("all_gather", size)
        latency = (self.ranks - self.nodes) / self.nodes * LINK_STEP + (self.nodes - 1) * NETWORK_RING_STEP
        return np.where(self.ranks > 1, latency + (self.ranks - 1) / self.ranks * size / self.bandwidth, 0.0)

    def reduce_scatter(self, size: Any) -> Any:
        """Seconds to sum `size` bytes in all, a slice a rank."""
        return self.all_gather(size) if self.measured is None else self._on_curve("reduce_scatter", size)

    def _on_curve(self, name: str, size: Any) -> Any:
        assert self.measured is not None
        machine, wire = self.measured.gpu.measured, self.measured.backend
        assert machine is not None
        assert wire is not None
        moved = machine.collective(wire, name, size, self.ranks)
        if self.emulated is not None:
            moved = np.maximum(moved, self.emulated.seconds(name, size))
        return np.where(self.ranks > 1, moved, 0.0)


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The groups of a split: tensor ranks lie beside each other, then data, then pipeline stages. Of the data-parallel
    ranks those that shard among themselves lie beside each other, and `copies` join equal shards."""

    tensor: Group
    data: Group
    shard: Group
    copies: Group
    hop: Any
    hop_latency: Any

    @classmethod
    def of(cls, split: Split, cluster: Cluster, recipe: Recipe) -> Groups:
        """Of a cluster. `hop` is the bandwidth from one stage to the next."""
        node = cluster.per_node
        tensor = Group.of(split.tp, np.minimum(split.tp, node), cluster, recipe)
        beside = np.maximum(node // np.asarray(split.tp), 1)
        data = Group.of(split.dp, beside, cluster, recipe)
        shard = Group.of(split.shard, beside, cluster, recipe)
        copies = Group.of(split.groups, beside // np.asarray(split.shard), cluster, recipe)
        if cluster.topology is not None:
            place, everyone = cluster.topology, (tuple(range(cluster.topology.size)),)
            rows = tuple(map(tuple, place.grid())) if cluster.hybrid else everyone
            data = replace(data, emulated=Emulated(topology=place, groups=everyone, levels=cluster.hybrid))
            shard = replace(shard, emulated=Emulated(topology=place, groups=rows))
            copies = replace(copies, emulated=Emulated(topology=place, groups=tuple(zip(*rows, strict=True))))
        apart = np.asarray(split.dp) * np.asarray(split.tp) >= node
        return cls(tensor=tensor, data=data, shard=shard, copies=copies,
                   hop=np.where(apart, cluster.network * recipe.hop_share, cluster.link * recipe.link_share),
                   hop_latency=np.where(apart, NETWORK_STEP, LINK_STEP))

    def reduce_scatter(self, size: Any) -> Any:
        """Seconds to sum `size` bytes, a slice a rank of a shard group: among them, then each slice over its copies."""
        return self.shard.reduce_scatter(size) + self.copies.all_reduce(size / self.shard.ranks)

    def moving(self, size: float) -> float:
        """Share of a collective in which a rank moves bytes: to wait for an emulated link takes nothing from others."""
        if self.data.emulated is None:
            return 1.0
        return min(1.0, float(replace(self.data, emulated=None).all_reduce(size) / self.data.all_reduce(size)))
