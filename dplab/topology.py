"""Hosts, ranks and the links between them, and what each collective puts on every link. Numbers only.

A collective is a ring over its members, host by host, as NCCL builds it: each pair of neighbours carries the same
bytes, so a host with several members sends through its NIC once, whatever their number. A link works
`steps x latency + bytes / bandwidth`; both directions work at the same time.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

from dplab import cards, quantities
from dplab.errors import UsageError
from dplab.specs.checks import check, is_int, is_positive

LinkClass = Literal["inside", "across"]
"""Where what a rank sends goes: to another rank of its host, or to another host."""
PASSES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
"""How often (N-1)/N of the tensor travels over each edge of the ring."""
MOST = 65536
"""Ranks of the largest topology."""
INSIDE = "PCIe4"
"""The link inside a host where nobody names one."""
_FORM = "write 2x2@10gbe (hosts x ranks @ the link between hosts), 4@pcie4 (one host), 3x3090 or 2x8xH100 (GPUs)"


@dataclass(frozen=True, kw_only=True)
class Link:
    """One direction of a link: bytes a second and seconds that a step takes before its first byte."""

    name: str
    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        check("bandwidth", self.bandwidth, is_positive(self.bandwidth), "bytes a second above 0", what="Link")
        check("latency", self.latency, self.latency == 0 or is_positive(self.latency), "seconds, 0 or more",
              what="Link")


@dataclass(frozen=True, kw_only=True)
class Device:
    """Where a rank is: its host, counted from 0; `name` is its GPU's where that is known."""

    rank: int
    host: int
    name: str | None = None


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one collective puts on one link: bytes in either direction, in `steps` messages one after the other."""

    link: Link
    steps: int = 0
    sent: float = 0.0
    received: float = 0.0

    @property
    def seconds(self) -> float:
        """How long the link works for it."""
        return self.steps * self.link.latency + max(self.sent, self.received) / self.link.bandwidth

    def plus(self, *, steps: int, sent: float = 0.0, received: float = 0.0) -> Load:
        """With another edge of the same collective, whose messages go out together with these."""
        return Load(link=self.link, steps=max(self.steps, steps), sent=self.sent + sent,
                    received=self.received + received)


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """On which host each rank is: `devices` in rank order."""

    devices: tuple[Device, ...]

    def __post_init__(self) -> None:
        known = sorted({device.host for device in self.devices})
        if not known or known != list(range(len(known))) or [d.rank for d in self.devices] != list(range(self.size)):
            raise UsageError(f"{type(self).__name__}(devices=...) needs ranks 0, 1, ... in order on hosts 0, 1, ...; "
                             f"got {[(device.rank, device.host) for device in self.devices]}")

    @property
    def size(self) -> int:
        """Ranks."""
        return len(self.devices)

    @cached_property
    def hosts(self) -> int:
        """Hosts."""
        return len(self._per_host)

    @cached_property
    def _per_host(self) -> Counter[int]:
        return Counter(device.host for device in self.devices)

    def grid(self) -> list[list[int]]:
        """Ranks of every host, host by host. UsageError where there are not several hosts of several ranks each,
        as many on every one."""
        rows = [[device.rank for device in self.devices if device.host == host] for host in range(self.hosts)]
        if len(rows) < 2 or len(rows[0]) < 2 or len({len(row) for row in rows}) > 1:
            told = ", ".join(map(str, map(len, rows)))
            raise UsageError(f"hybrid needs several hosts with the same number of ranks, more than one, on each; here "
                             f"are {told} rank{'s' * (len(rows) > 1 or len(rows[0]) > 1)} on {len(rows)} "
                             f"host{'s' * (len(rows) > 1)}: give such a topology (2x2@10gbe), or leave hybrid out")
        return rows

    def link_class(self, rank: int, ranks: Sequence[int]) -> LinkClass:
        """`inside` or `across`: where what `rank` sends in a ring over `ranks` goes."""
        ring = self._ring(ranks)
        follower = ring[(ring.index(rank) + 1) % len(ring)]
        return "inside" if self.devices[rank].host == self.devices[follower].host else "across"

    def _ring(self, ranks: Sequence[int]) -> list[int]:
        return sorted(ranks, key=lambda rank: (self.devices[rank].host, rank))


@dataclass(frozen=True, kw_only=True)
class Topology(Hosts):
    """Every rank has a port to the others of its host (`inside`); every host has `nics`
    network cards, all of kind `across`, which its ranks share: the k-th of G ranks sends through card k x nics / G."""

    inside: Link
    across: Link | None = None
    nics: int = 1
    text: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        check("nics", self.nics, is_int(self.nics) and self.nics >= 1, "an integer >= 1", what="Topology")
        if self.hosts > 1 and self.across is None:
            raise UsageError(f"Topology(across=None) with {self.hosts} hosts: name the link between hosts")

    @classmethod
    def of(cls, hosts: int, ranks: int, *, inside: Link, across: Link | None = None, **more: Any) -> Topology:
        """`hosts` hosts of `ranks` ranks each, numbered host by host."""
        devices = tuple(Device(rank=rank, host=rank // ranks, name=more.get("device"))
                        for rank in range(hosts * ranks))
        more.pop("device", None)
        return cls(devices=devices, inside=inside, across=across, **more)

    @classmethod
    def parse(cls, text: str | Topology) -> Topology:
        """From one line: `[HOSTSx]RANKS[xGPU][@LINK[,LINK]]`.

        The first link lies between hosts (inside, where there is one host), the second inside. A link is a preset's
        name or a rate and perhaps a latency (`1Gb/s:50us`), with `Nx` before it where a host has N cards. GPUs bring
        the links of their cards: 8 in a host on InfiniBand, a card for each, are `2x8xH100`. Raises UsageError.
        """
        if isinstance(text, Topology):
            return text
        shape, at, named = text.strip().partition("@")
        form = re.fullmatch(r"(?:([0-9]{1,6})[xX])?([0-9]{1,6})(?:[xX]([0-9A-Za-z][\w-]*))?", shape)
        links = named.split(",") if at else []
        if form is None or len(links) > 2:
            raise UsageError(f"topology {text!r} has not the form of one; {_FORM}")
        hosts, ranks, gpu = _shape(form)
        if not hosts or not ranks:
            raise UsageError(f"topology {text!r} has no ranks; {_FORM}")
        if hosts * ranks > MOST:
            raise UsageError(f"topology {text!r} has {hosts * ranks} ranks; {MOST} are the most")
        card = None if gpu is None else cards.find("hardware", gpu, what=f"topology {text!r}: GPU")
        if card is None and not links:
            raise UsageError(f"topology {text!r} names no link; {_FORM}")
        across, nics, inside = None, 1, link(INSIDE if card is None else card["link"])
        if hosts > 1:
            if links:
                nics, across = _named(links.pop(0), text)
            elif card is not None:
                rate = card["network_gb_s"] * 1e9
                across, nics = Link(name=f"{rate * 8e-9:g} Gb/s a GPU", bandwidth=rate,
                                    latency=link("InfiniBand-NDR").latency), ranks
        if links:
            inside = _named(links.pop(0), text)[1]
        if links:
            raise UsageError(f"topology {text!r} names a link between hosts and has one host; leave one out")
        return cls.of(hosts, ranks, inside=inside, across=across, nics=nics, text=text.strip(),
                      device=None if card is None else card["name"])

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` is its inverse."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Topology:
        """From `to_dict`'s values."""
        try:
            across = None if values["across"] is None else Link(**values["across"])
            return cls(devices=tuple(Device(**device) for device in values["devices"]), across=across,
                       inside=Link(**values["inside"]), nics=values["nics"], text=values["text"])
        except (KeyError, TypeError) as error:
            raise UsageError(f"these values are no topology's ({error}); give what Topology.to_dict() gave") from error

    def __str__(self) -> str:
        counts = sorted(set(self._per_host.values()))
        ranks = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        told = f"{self.hosts} host{'s' * (self.hosts > 1)} x {ranks} rank{'s' * (counts[-1] > 1)}"
        if self.across is not None:
            cards_ = f", {self.nics} a host" if self.nics > 1 else ""
            told += f", {self.across.name} between hosts{cards_}"
        return told + (f", {self.inside.name} inside" if counts[-1] > 1 else "")

    @property
    def wires(self) -> int:
        """Links, by number: a port for every rank, then the cards of every host."""
        return self.size + self.hosts * self.nics

    def require(self, size: int) -> None:
        """Raises UsageError unless it has `size` ranks."""
        if size != self.size:
            raise UsageError(f"topology {self.text or str(self)!r} has {self.size} ranks ({self}), and the world has "
                             f"{size}; start {self.size} ranks, or give another topology")

    def loads(self, collective: str, nbytes: float, ranks: Sequence[int] | None = None, *,
              source: int = 0) -> dict[int, Load]:
        """What a collective of `nbytes` over `ranks` (None: all) puts on each link, by the link's number.

        `all_reduce`, `reduce_scatter`, `all_gather` of a tensor of `nbytes`; `broadcast` from member `source`, down
        the ring; `all_to_all`, in which every member sends `nbytes / N` to each, all at once.
        """
        ring = self._ring(range(self.size) if ranks is None else ranks)
        count = len(ring)
        edges = list(zip(ring, [*ring[1:], ring[0]], strict=True))
        if collective == "all_to_all":
            edges, each, steps = [(a, b) for a in ring for b in ring if a != b], nbytes / count, 1
        elif collective == "broadcast":
            first = sorted(ring)[source]
            edges, each, steps = [edge for edge in edges if edge[1] != first], nbytes, count - 1
        else:
            passes = PASSES[collective]
            each, steps = passes * (count - 1) / count * nbytes, passes * (count - 1)
        found: dict[int, Load] = {}
        if count > 1:
            for giver, taker in edges:
                self._carry(found, giver, taker, ring, (each, steps))
        return found

    def seconds(self, collective: str, nbytes: float, ranks: Sequence[int] | None = None) -> float:
        """How long it takes on links that nobody else uses. `hierarchical_all_reduce`: reduce-scatter inside each
        host, all-reduce across hosts of every piece, all-gather inside."""
        if collective != "hierarchical_all_reduce":
            return self.together(collective, nbytes, [range(self.size) if ranks is None else ranks])
        grid = self.grid()
        columns = list(zip(*grid, strict=True))
        across = self.together("all_reduce", nbytes / len(grid[0]), columns)
        return self.seconds("reduce_scatter", nbytes, grid[0]) + across + self.seconds("all_gather", nbytes, grid[0])

    def together(self, collective: str, nbytes: float, groups: Iterable[Sequence[int]]) -> float:
        """How long it takes where several groups do it at once, each with `nbytes`: a link that they share works for
        one after the other."""
        work: dict[int, float] = {}
        for ranks in groups:
            for wire, load in self.loads(collective, nbytes, ranks).items():
                work[wire] = work.get(wire, 0.0) + load.seconds
        return max(work.values(), default=0.0)

    def _carry(self, found: dict[int, Load], giver: int, taker: int, ring: list[int],
               message: tuple[float, int]) -> None:
        """Adds one edge: bytes and steps on the ports, or on all cards that the members of a host have."""
        nbytes, steps = message
        if self.devices[giver].host == self.devices[taker].host:
            found[giver] = found.get(giver, Load(link=self.inside)).plus(steps=steps, sent=nbytes)
            found[taker] = found.get(taker, Load(link=self.inside)).plus(steps=steps, received=nbytes)
            return
        assert self.across is not None
        for rank, way in ((giver, "sent"), (taker, "received")):
            cards_ = self._cards(self.devices[rank].host, ring)
            for card in cards_:
                found[card] = found.get(card, Load(link=self.across)).plus(steps=steps, **{way: nbytes / len(cards_)})

    def _cards(self, host: int, members: Sequence[int]) -> list[int]:
        """Numbers of the network cards that the members on a host send through."""
        beside = [device.rank for device in self.devices if device.host == host]
        used = {beside.index(rank) * self.nics // len(beside) for rank in members if rank in beside}
        return [self.size + host * self.nics + card for card in sorted(used)]


def link(name: str, *, what: str = "link") -> Link:
    """The preset of that name (data/hardware/links). Raises UsageError that suggests the nearest names."""
    card = cards.find("hardware/links", name, what=what,
                      otherwise="; or write a rate and perhaps a latency, such as 1Gb/s:50us")
    return Link(name=card["name"], bandwidth=card["gb_s"] * 1e9, latency=card["latency_us"] * 1e-6)


def _shape(form: re.Match[str]) -> tuple[int, int, str | None]:
    """Hosts, ranks a host, GPU. `3x3090` is a GPU's name after a number, not 3 hosts of 3090 ranks."""
    first, second, gpu = form[1], form[2], form[3]
    if gpu is None and first is not None and second.lower() in cards.cards("hardware"):
        return 1, int(first), second
    return int(first or 1), int(second), gpu


def _named(text: str, whole: str) -> tuple[int, Link]:
    """How many cards a host has, and of which link."""
    form = re.fullmatch(r"(?:([0-9]{1,4})x)?(.*)", text.strip())
    assert form is not None
    count, name = int(form[1] or 1), form[2]
    what = f"topology {whole!r}: link"
    if re.match(r"[-+.0-9]+\s*[kMGT]?i?[bB](/s|ps)", name):
        rate, colon, latency = name.partition(":")
        return count, Link(name=name, bandwidth=quantities.rate(rate, what=what),
                           latency=quantities.seconds(latency, what=f"{what} latency") if colon else 0.0)
    return count, link(name, what=what)
