"""When every emulated link is free, in memory that all ranks of a world share.

The page holds one clock a link, and a ring of slots for every group of ranks. A rank writes into the slot of the
group's k-th collective when it issued it. Whoever comes last knows when the collective is complete, and puts it on the
links: it starts at the latest issue, once every link on its path is free, and each link is taken for as long as it
works for it. So links serve first come, first served, whichever group asks, and two collectives on one take the sum.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from dplab.errors import UsageError, WireError
from dplab.telemetry.recorder import now
from dplab.topology import Topology
from dplab.wire.collectives import Transport
from dplab.wire.hosts import boot
from dplab.wire.threads import ThreadWorld

if TYPE_CHECKING:
    from dplab.wire.world import World

SLOTS = 512
"""Collectives of a group that may be under way at once."""
GROUPS = 512
_NUMBER, _CAME, _LATEST, _END, _READ = range(5)
_SLOT = 5
_GROUP = 1 + SLOTS * _SLOT
"""Words of a group: its name, then its slots."""
_PAUSE = 100e-6
TIMEOUT = 600.0
"""Seconds after which a process that does not come is an error; threads have their world's."""

Ticket = tuple[int, int]
"""First word of a collective's slot, and the collective's number in its group."""


class Page:
    """Words of 8 bytes that all ranks see, and a lock that only one of them holds."""

    def __init__(self, memory: mmap.mmap | bytearray, lock: threading.Lock, descriptor: int | None = None) -> None:
        self.words = memoryview(memory).cast("q")
        self._lock, self._descriptor = lock, descriptor

    @staticmethod
    def bytes_for(topology: Topology) -> int:
        return 8 * (topology.wires + GROUPS * _GROUP)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One rank at a time; a rank that is killed inside lets go of it."""
        with self._lock:  # of the threads of this process
            if self._descriptor is not None:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            try:
                yield
            finally:
                if self._descriptor is not None:
                    fcntl.flock(self._descriptor, fcntl.LOCK_UN)


class Clocks:
    """One rank's view of the page. `timeout`: seconds after which a rank that does not come is an error."""

    def __init__(self, page: Page, topology: Topology, timeout: float) -> None:
        self.page, self.topology, self.timeout = page, topology, timeout
        self._words = page.words
        self._issued: dict[int, int] = {}

    def group(self, ranks: Sequence[int]) -> int:
        """Where the group of these ranks has its slots; the same on all of them."""
        digest = hashlib.blake2b(repr(tuple(ranks)).encode(), digest_size=8).digest()
        name = int.from_bytes(digest, "little") >> 1 | 1
        with self.page.locked():
            for at in range(self.topology.wires, len(self._words), _GROUP):
                if self._words[at] in (0, name):
                    self._words[at] = name
                    return at
        raise WireError(f"more than {GROUPS} groups of ranks on emulated links; use fewer meshes in one program")

    def issue(self, group: int, members: int, work: Mapping[int, float], *, at: int) -> Ticket:
        """This rank has issued the group's next collective at `at` ns, which makes each link work that many seconds."""
        number = self._issued[group] = self._issued.get(group, 0) + 1
        slot = group + 1 + number % SLOTS * _SLOT
        self._await(lambda: self._take(slot, number, members), f"{members} ranks to end a collective that is {SLOTS} "
                                                               f"behind this one")
        words = self._words
        with self.page.locked():
            words[slot + _CAME] += 1
            words[slot + _LATEST] = max(words[slot + _LATEST], at)
            if words[slot + _CAME] == members:
                start = max(words[slot + _LATEST], *(words[wire] for wire in work))
                for wire, seconds in work.items():
                    words[wire] = start + round(seconds * 1e9)
                words[slot + _END] = max(words[wire] for wire in work)
        return slot, number

    def end(self, ticket: Ticket) -> int | None:
        """ns at which the links have carried it; None while a member is still to issue it."""
        slot, number = ticket
        assert self._words[slot + _NUMBER] == number
        return self._words[slot + _END] or None

    def finish(self, ticket: Ticket) -> int:
        """Waits, asleep, until the links have carried it; the ns at which they had. Once a rank and collective."""
        self._await(lambda: self.end(ticket) is not None, "a rank to issue the same collective")
        end = self.end(ticket)
        assert end is not None
        with self.page.locked():
            self._words[ticket[0] + _READ] += 1
        while (left := end - now()) > 0:
            time.sleep(left * 1e-9)
        return end

    def _take(self, slot: int, number: int, members: int) -> bool:
        """Makes the slot this collective's, unless it is already, or somebody has not read its last one's end."""
        words = self._words
        with self.page.locked():
            if words[slot + _NUMBER] == number:
                return True
            if words[slot + _NUMBER] and words[slot + _READ] < members:
                return False
            words[slot + _CAME] = words[slot + _LATEST] = words[slot + _END] = words[slot + _READ] = 0
            words[slot + _NUMBER] = number
            return True

    def _await(self, ready: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self.timeout
        while not ready():
            if time.monotonic() > deadline:
                raise WireError(f"emulated links waited {self.timeout:g} s for {what}; every rank must issue and wait "
                                f"for the same collectives")
            time.sleep(_PAUSE)


_of_threads: WeakKeyDictionary[ThreadWorld, dict[Topology, dict[int, Clocks]]] = WeakKeyDictionary()
_of_process: dict[tuple[World, Topology], Clocks] = {}
_guard = threading.Lock()


def of_world(world: World, everyone: Transport, topology: Topology) -> Clocks:
    """This rank's clocks of a topology: all meshes of a world share its links. Collective the first time."""
    if world.threads is not None:
        return _of_thread(world.threads, world.rank, topology)
    if (world, topology) not in _of_process:
        _of_process[world, topology] = Clocks(_page_of_processes(everyone, topology), topology, TIMEOUT)
    return _of_process[world, topology]


def _of_thread(world: ThreadWorld, rank: int, topology: Topology) -> Clocks:
    with _guard:
        ranks = _of_threads.setdefault(world, {}).setdefault(topology, {})
        if rank not in ranks:
            page = next((clocks.page for clocks in ranks.values()), None)
            if page is None:
                page = Page(bytearray(Page.bytes_for(topology)), threading.Lock())
            ranks[rank] = Clocks(page, topology, world.timeout)
        return ranks[rank]


def _page_of_processes(everyone: Transport, topology: Topology) -> Page:
    """Raises UsageError, on every rank, where the ranks are not processes of one Linux host."""
    descriptor = None
    if everyone.rank == 0 and hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("dplab-clocks", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, Page.bytes_for(topology))      # what nobody touches takes no memory
    told = everyone.gather_objects((boot(), os.getpid(), descriptor))
    if told[0][2] is None:
        raise UsageError(f"topology {topology.text!r} is emulated, which needs Linux: leave it out, or let the ranks "
                         f"be threads (dplab.wire.threads.run)")
    hosts = len({host for host, _, _ in told})
    if hosts > 1:
        raise UsageError(f"topology {topology.text!r} is emulated, and emulated links join processes of one host; "
                         f"these ranks are on {hosts}, with links of their own: leave it out")
    # an open file of its own: a lock is held by one of these
    own = os.open(f"/proc/{told[0][1]}/fd/{told[0][2]}", os.O_RDWR | os.O_CLOEXEC)
    everyone.gather_objects(None)      # all have opened it
    if descriptor is not None:
        os.close(descriptor)
    return Page(mmap.mmap(own, Page.bytes_for(topology)), threading.Lock(), own)
