"""Ranks as threads of one process: for tests, and for breakpoints in a notebook.

The last rank to arrive at a collective carries it out for all, in rank order, so results are the same to
the bit whatever the timing. Two different calls meeting, or a rank that leaves, is an error on every rank.
torch's default random generator is shared by the threads: seeds and dropout belong in process worlds.
"""

from __future__ import annotations

import contextlib
import contextvars
import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from dplab.errors import WireError
from dplab.telemetry.recorder import now
from dplab.wire.calls import labelled, words
from dplab.wire.collectives import Op, Work, reduced

T = TypeVar("T")


@dataclass
class _Meeting:
    """One collective: who has come, with what, and whether it is over. It is its own `Work`."""

    size: int
    timeout: float
    calls: dict[int, str] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)
    over: threading.Event = field(default_factory=threading.Event)
    error: WireError | None = None
    done_at: int | None = None

    def wait(self) -> None:
        if not self.over.wait(self.timeout):
            missing = sorted(set(range(self.size)) - set(self.calls))
            self.error = WireError(f"ranks {missing} did not come to {next(iter(self.calls.values()))} "
                                   f"within {self.timeout} s")
            self.over.set()
        if self.error is not None:
            raise WireError(str(self.error))


class Hub:
    """Where the threads of one group meet. Meeting number k is every rank's k-th call."""

    def __init__(self, size: int, timeout: float = 30.0) -> None:
        self.size, self.timeout = size, timeout
        self._lock = threading.Lock()
        self._meetings: dict[int, _Meeting] = {}
        self._turns = [0] * size
        self._left: dict[int, WireError] = {}

    def join(self, rank: int, call: str, value: Any, work: Callable[[list[Any]], None]) -> _Meeting:
        """Rank `rank` comes to its next call; whoever is last does `work` on all values."""
        with self._lock:
            turn = self._turns[rank] = self._turns[rank] + 1
            meeting = self._meetings.setdefault(turn, _Meeting(self.size, self.timeout))
            meeting.calls[rank], meeting.values[rank] = call, value
            meeting.error = meeting.error or self._missed(meeting)
            other = next((r for r, theirs in meeting.calls.items() if theirs != call), None)
            if other is not None:
                meeting.error = WireError(f"rank {rank} calls {call} where rank {other} calls {meeting.calls[other]}: "
                                          f"every rank must issue the same collectives in the same order")
            last = len(meeting.calls) == self.size
            if last:
                del self._meetings[turn]
        if last and meeting.error is None:
            work([meeting.values[r] for r in range(self.size)])
            meeting.done_at = now()
        if last or meeting.error is not None:
            meeting.values.clear()
            meeting.over.set()
        return meeting

    def leave(self, rank: int, why: str) -> None:
        """Member `rank` will not come again: everybody who waits for it, now or later, gets an error."""
        with self._lock:
            self._left[rank] = WireError(why)
            for meeting in self._meetings.values():
                meeting.error = meeting.error or self._missed(meeting)
                if meeting.error is not None:
                    meeting.over.set()

    def _missed(self, meeting: _Meeting) -> WireError | None:
        """The error of a meeting that somebody left before coming to; what he came to before is still carried out."""
        return next((error for rank, error in self._left.items() if rank not in meeting.calls), None)


class ThreadTransport:
    """One rank's end of a `Hub`."""

    modelled: frozenset[str] = frozenset()
    label = ""

    def __init__(self, hub: Hub, rank: int) -> None:
        self.hub, self.rank, self.size = hub, rank, hub.size

    def _join(self, call: str, value: Any, work: Callable[[list[Any]], None]) -> _Meeting:
        return self.hub.join(self.rank, labelled(call, self.label), value, work)

    def all_reduce(self, flat: torch.Tensor, op: Op) -> Work:
        def reduce(flats: list[torch.Tensor]) -> None:
            total = reduced(flats, op)
            for each in flats:
                each.copy_(total)

        return self._join(words(f"all_reduce({op})", flat), flat.detach(), reduce)

    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor) -> Work:
        def reduce(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
            segments = [each.view(self.size, -1) for each, _ in pairs]
            for rank, (_, target) in enumerate(pairs):
                target.copy_(reduced([each[rank] for each in segments], "sum"))

        return self._join(words("reduce_scatter", flat), (flat.detach(), out.detach()), reduce)

    def all_gather(self, flat: torch.Tensor) -> Work:
        def gather(flats: list[torch.Tensor]) -> None:
            segments = [each.view(self.size, -1) for each in flats]
            for mine in segments:
                for rank, theirs in enumerate(segments):
                    if theirs is not mine:
                        mine[rank].copy_(theirs[rank])

        return self._join(words("all_gather", flat), flat.detach(), gather)

    def all_to_all(self, flat: torch.Tensor, out: torch.Tensor) -> Work:
        def exchange(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
            pieces = [each.view(self.size, -1) for each, _ in pairs]
            for rank, (_, target) in enumerate(pairs):
                target.view(self.size, -1).copy_(torch.stack([each[rank] for each in pieces]))

        return self._join(words("all_to_all", flat), (flat.detach(), out.detach()), exchange)

    def broadcast(self, flat: torch.Tensor, source: int) -> Work:
        def spread(flats: list[torch.Tensor]) -> None:
            for rank, each in enumerate(flats):
                if rank != source:
                    each.copy_(flats[source])

        return self._join(words(f"broadcast(source={source})", flat), flat.detach(), spread)

    def gather_objects(self, value: Any) -> list[Any]:
        values: list[Any] = []
        box = (values, value)

        def gather(boxes: list[tuple[list[Any], Any]]) -> None:
            for theirs, _ in boxes:
                theirs.extend(item for _, item in boxes)

        self._join("gather_objects", box, gather).wait()
        return values


class ThreadWorld:
    """Hubs of the groups of one world, made on demand: a sub-group is named by its ranks."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size, self.timeout = size, timeout
        self._lock = threading.Lock()
        self._hubs: dict[tuple[int, ...], Hub] = {}
        self._left: dict[int, str] = {}

    def transport(self, rank: int, ranks: tuple[int, ...]) -> ThreadTransport:
        """The end of `rank` in the group of `ranks`."""
        with self._lock:
            new = ranks not in self._hubs
            hub = self._hubs.setdefault(ranks, Hub(len(ranks), self.timeout))
            for gone in self._left.keys() & set(ranks) if new else ():
                hub.leave(ranks.index(gone), self._left[gone])
        return ThreadTransport(hub, ranks.index(rank))

    def leave(self, rank: int, why: str) -> None:
        """Rank `rank` will come to no collective any more."""
        with self._lock:
            self._left[rank] = f"rank {rank} left: {why}"
            for ranks, hub in self._hubs.items():
                if rank in ranks:
                    hub.leave(ranks.index(rank), self._left[rank])


def run(fn: Callable[[], T], size: int, *, timeout: float = 30.0) -> list[T]:
    """Calls `fn` on `size` ranks, each a thread in which `dplab.init()` returns that rank's world.

    Returns the results in rank order. If ranks raise, the first failure in time is raised here.
    """
    from dplab.wire.world import World, adopt

    threads_world = ThreadWorld(size, timeout)
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def body(rank: int) -> None:
        adopt(World(rank=rank, size=size, local_rank=rank, device=torch.device("cpu"), backend="threads",
                    threads=threads_world))
        try:
            results[rank] = fn()
            threads_world.leave(rank, "it has ended while others still wait for it; give every rank as many batches "
                                      "(dplab.loader does), or none a step that the others do not run")
        except BaseException as error:
            error.add_note(f"on rank {rank} of {size} (threads)")
            failures.append(error)
            threads_world.leave(rank, f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=contextvars.Context().run, args=(body, rank), name=f"rank {rank}", daemon=True)
               for rank in range(size)]
    with _no_collector():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    return [results[rank] for rank in range(size)]


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    """Leaves what refers to itself until the ranks have ended.

    torch reads the state of its generator (every recomputed unit does) under a lock, and makes a Python object there,
    at which the collector may run; what that frees lets go of the interpreter, another thread takes it and waits for
    the lock, and all stand for good (seen once in some ten thousand worlds).
    """
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
