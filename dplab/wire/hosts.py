"""On which host each rank is, as the ranks find it themselves.

Where a host's GPUs form islands, joined by NVLink inside and by PCIe only between them (pairs with a bridge), an island
counts as a host: it is what a fast link joins that matters.
"""

from __future__ import annotations

import socket
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dplab.telemetry import process
from dplab.topology import Device, Hosts
from dplab.wire import accelerators

if TYPE_CHECKING:
    from dplab.wire.collectives import Collectives
    from dplab.wire.world import World

def boot() -> str:
    """What tells this running kernel from every other one: containers of one host have it in common."""
    try:
        return process.boot() or socket.gethostname()
    except OSError:
        return socket.gethostname()


def found(world: World, everyone: Collectives) -> Hosts:
    """Hosts, or islands, in the order of their first ranks. Collective, but for threads."""
    if world.threads is not None:
        return _of([boot()] * world.size)
    kernel = boot()
    told = everyone.gather_objects((kernel, accelerators.identity(world.device)))
    kernels = [each for each, _ in told]
    if all(gpu is None for _, gpu in told):
        return _of(kernels)
    beside = [gpu for each, gpu in told if each == kernel and gpu is not None]
    near = set(accelerators.joined(told[world.rank][1], beside))
    mine = [rank for rank, (each, gpu) in enumerate(told) if each == kernel and gpu in near]
    return _of(islands(kernels, everyone.gather_objects(mine)))


def islands(kernels: Sequence[str], joined: Sequence[Sequence[int]]) -> list[str]:
    """A name for what each rank is in: its island, where all of its host's ranks are in islands of one size, of several
    ranks each; else its host. `joined`: ranks that a rank is joined to."""
    root = list(range(len(kernels)))

    def top(rank: int) -> int:
        while root[rank] != rank:
            rank = root[rank]
        return rank

    for rank, others in enumerate(joined):
        for other in others:
            root[max(top(rank), top(other))] = min(top(rank), top(other))
    tops = [top(rank) for rank in range(len(kernels))]
    sizes: dict[str, set[int]] = defaultdict(set)
    for kernel, of in zip(kernels, tops, strict=True):
        sizes[kernel].add(Counter(tops)[of])
    return [f"{kernel} {of}" if len(sizes[kernel]) == 1 and min(sizes[kernel]) > 1 else kernel
            for kernel, of in zip(kernels, tops, strict=True)]


def _of(names: Sequence[str]) -> Hosts:
    order = list(dict.fromkeys(names))
    return Hosts(devices=tuple(Device(rank=rank, host=order.index(name)) for rank, name in enumerate(names)))
