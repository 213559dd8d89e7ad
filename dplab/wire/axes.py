"""Axes of a mesh: groups of ranks, the way between them, and what is known of the links on it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dplab.telemetry import recorder
from dplab.topology import Hosts, LinkClass, Topology
from dplab.wire import hosts
from dplab.wire.chain import TwoLevel
from dplab.wire.collectives import Collectives, Counters, Transport
from dplab.wire.emulate import clocks
from dplab.wire.emulate.transport import Emulated
from dplab.wire.groups import SoloTransport

if TYPE_CHECKING:
    from dplab.wire.world import World


class Axes:
    """The axes of one mesh, which share counters and links. `topology`: emulated, where it is given. Collective."""

    def __init__(self, world: World, topology: Topology | None) -> None:
        self.world, self.topology = world, topology
        self._counters, self._recorder = Counters(), recorder.current()
        self._ranks = list(range(world.size))
        plain = world.transport([self._ranks])
        if topology is not None:
            topology.require(world.size)
        self._clocks = None if topology is None or world.size == 1 else clocks.of_world(world, plain, topology)
        # checks that are no part of a step go past the links
        self._plain = Collectives(plain, self._counters, self._recorder)
        self.everyone = self._along(plain, self._ranks)

    @cached_property
    def hosts(self) -> Hosts:
        """Where the ranks are: on the emulated hosts, else on those that they find themselves on."""
        return self.topology or hosts.found(self.world, self._plain)

    @property
    def nobody(self) -> Collectives:
        """An axis of length 1."""
        return Collectives(SoloTransport(), self._counters, self._recorder)

    def along(self, ranks: list[list[int]], group: Any = None) -> Collectives:
        """This rank's axis in a partition of the world; made on all ranks together."""
        mine = next(members for members in ranks if self.world.rank in members)
        return self._along(self.world.transport(ranks, group), mine)

    def two_level(self) -> Collectives:
        """All ranks, which sum gradients inside their hosts first. UsageError where hosts are not alike."""
        across, inside = self.crossed(self.hosts.grid())
        return TwoLevel(self.everyone, inside, across)

    def crossed(self, rows: list[list[int]],
                groups: Mapping[str, Any] | None = None) -> tuple[Collectives, Collectives]:
        """The axes ("replicate", "shard") along the columns and along the rows of a grid of ranks; `groups`: those
        that there are already, by these names."""
        groups = groups or {}
        columns = [list(column) for column in zip(*rows, strict=True)]
        return self.along(columns, groups.get("replicate")), self.along(rows, groups.get("shard"))

    def _along(self, transport: Transport, mine: list[int]) -> Collectives:
        if self._clocks is not None and transport.size > 1:
            transport = Emulated(transport, self._clocks, mine)
        link: LinkClass | None = None
        if transport.size > 1 and (self.topology is not None or self.hosts.hosts > 1):
            link = self.hosts.link_class(self.world.rank, mine)
        ranks = mine if 1 < len(mine) < self.world.size else None
        return Collectives(transport, self._counters, self._recorder, link=link, ranks=ranks)
