"""On which host each rank is, as the ranks find it themselves."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING

from dplab.topology import Device, Hosts

if TYPE_CHECKING:
    from dplab.wire.collectives import Collectives
    from dplab.wire.world import World

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def boot() -> str:
    """What tells this running kernel from every other one: containers of one host have it in common."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return socket.gethostname()


def found(world: World, everyone: Collectives) -> Hosts:
    """Hosts in the order of their first ranks. Collective, but for threads."""
    told = [boot()] * world.size if world.threads is not None else everyone.gather_objects(boot())
    order = list(dict.fromkeys(told))
    return Hosts(devices=tuple(Device(rank=rank, host=order.index(host)) for rank, host in enumerate(told)))
