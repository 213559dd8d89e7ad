"""The other ranks of a group as processes: who they are, whether they live, and how to wait for them."""

from __future__ import annotations

import json
import os
import select
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from dplab.errors import WireError
from dplab.telemetry.process import Identity
from dplab.wire.shm.memory import Place, Window

# in turns of a loop that looks at a word of memory each time
_SPINS, _YIELDS = 60, 400
_SHORTEST, _LONGEST = 5e-5, 1e-3
"""Seconds of sleep, once neither helped."""


class Patience:
    """How to wait for another process: look again at once, then let others run, then sleep ever longer."""

    def __init__(self) -> None:
        self._turns = 0
        self._sleep = _SHORTEST
        self._began = 0.0

    @property
    def waited(self) -> float:
        """Seconds since waiting became long enough to be timed."""
        return time.monotonic() - self._began if self._began else 0.0

    def pause(self) -> bool:
        """True where enough time has passed to look whether the others still live."""
        self._turns += 1
        if self._turns <= _SPINS:
            return False
        if self._turns <= _YIELDS:
            os.sched_yield()
            return False
        if not self._began:
            self._began = time.monotonic()
        time.sleep(self._sleep)
        self._sleep = min(_LONGEST, self._sleep * 1.2)
        return True


@dataclass(frozen=True)
class Card:
    """What a rank tells the others about itself."""

    identity: list[Any]
    space: str
    """the pid namespace, in which the pid means something"""
    place: dict[str, int]

    @classmethod
    def of_this(cls, place: Place) -> Card:
        identity = Identity.of(os.getpid())
        assert identity is not None
        return cls(list(identity), os.readlink("/proc/self/ns/pid"), asdict(place))


class Peer:
    """Another rank's process, watched through a descriptor that no later process with its pid can take over."""

    def __init__(self, rank: int, card: Card, mine: Card) -> None:
        self.rank = rank
        identity = Identity.from_list(card.identity)
        self.pid = identity.pid
        if identity.boot != Identity.from_list(mine.identity).boot or card.space != mine.space:
            raise WireError(f"rank {rank} runs on another host or in another container: backend='shm' is for the "
                            f"processes of one host; use backend='gloo'")
        try:
            self._descriptor: int | None = os.pidfd_open(self.pid)
        except ProcessLookupError as error:
            raise WireError(f"rank {rank} (process {self.pid}) ended before the ranks had met") from error
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)
        self.control = Window(self.pid, Place(**card.place))
        self.bytes: memoryview[int] = self.control.array.data
        self.words: memoryview[int] = self.bytes.cast("Q")

    @property
    def gone(self) -> bool:
        """True once the process has ended, reaped or not."""
        return self._descriptor is None or bool(self._poll.poll(0))

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def meet(store: Any, rank: int, size: int, place: Place, timeout: timedelta) -> list[Peer]:
    """Every other rank, once all have come to `store` and have seen each other."""
    mine = Card.of_this(place)
    store.set(f"card-{rank}", json.dumps(asdict(mine)))
    others = [other for other in range(size) if other != rank]
    peers = []
    for other in others:
        _wait(store, f"card-{other}", other, timeout)
        peers.append(Peer(other, Card(**json.loads(store.get(f"card-{other}"))), mine))
    # nobody goes on, and perhaps ends, before all have opened its memory
    store.set(f"seen-{rank}", "1")
    for other in others:
        _wait(store, f"seen-{other}", other, timeout)
    return peers


def _wait(store: Any, key: str, other: int, timeout: timedelta) -> None:
    try:
        store.wait([key], timeout)
    except RuntimeError as error:
        raise WireError(f"rank {other} did not come to the meeting of the ranks within {timeout.total_seconds():g} s "
                        f"({error})") from error
