"""Meetings of all ranks that somebody may miss: who does not come within the limit is named, and nothing hangs.

A collective of the training group cannot tell a rank that is late from one that has gone on to another call.
These meetings go through the store at which the ranks first met (in a thread world: one of its own), so they
disturb no collective, may run in a thread beside training, and cost milliseconds. For checkpoints, not for steps.
"""

from __future__ import annotations

import itertools
import pickle
import threading
import time
import zlib
from collections import defaultdict
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store

from dplab.errors import WireError
from dplab.wire.threads import ThreadWorld
from dplab.wire.world import World

LONGEST = 4 * 1024 * 1024
"""Bytes of one entry of a store; torch's TCP store takes 8 MiB at most."""

_stores: WeakKeyDictionary[ThreadWorld, HashStore] = WeakKeyDictionary()
_series: WeakKeyDictionary[ThreadWorld, dict[int, itertools.count[int]]] = WeakKeyDictionary()
_series_of_process = itertools.count()
_lock = threading.Lock()


class RollCall:
    """One series of meetings, of `name`; made on all ranks in the same order. Rank 0 is told what all have to say."""

    def __init__(self, world: World, name: str) -> None:
        self.rank, self.size = world.rank, world.size
        self._world, self._name = world, f"{name} {_number(world)}"
        self._turn = 0
        self._told = 0

    @cached_property
    def _store(self) -> Store:
        """Looked for at the first meeting: most runs have none."""
        return PrefixStore(self._name, _store(self._world))

    def gather(self, value: Any, *, what: str, limit: float) -> list[Any]:
        """Rank 0 gets every rank's value, in rank order; the others get an empty list, at once.

        Raises WireError on rank 0, naming `what` and the ranks that were not there within `limit` seconds.
        """
        if self.size == 1:
            return [value]
        if self.rank:
            self._turn += 1
            self._put(f"{self._turn}/{self.rank}", value)
            return []
        missing = self._missing({rank: f"{self._turn + 1}/{rank}" for rank in range(1, self.size)}, limit)
        if missing:
            raise WireError(_absent(what, missing, limit))
        self._turn += 1
        self._drop(f"told/{self._told}")
        return [value, *(self._take(f"{self._turn}/{rank}") for rank in range(1, self.size))]

    def tell(self, value: Any = None, *, what: str, limit: float) -> Any:
        """Every rank gets rank 0's value. Raises WireError where rank 0 says nothing within `limit` seconds."""
        if self.size == 1:
            return value
        if self.rank == 0:
            self._told = self._turn
            self._put(f"told/{self._turn}", value)
            return value
        if self._missing({0: f"told/{self._turn}"}, limit):
            # whoever calls again comes to the same meeting
            self._drop(f"{self._turn}/{self.rank}")
            self._turn -= 1
            raise WireError(_absent(what, [0], limit))
        return self._take(f"told/{self._turn}", keep=True)

    def _missing(self, keys: dict[int, str], limit: float) -> list[int]:
        """Ranks whose entry is not there when the limit has passed."""
        deadline, pause = time.monotonic() + limit, 0.0005
        while True:
            keys = {rank: key for rank, key in keys.items() if not self._store.check([key])}
            if not keys or time.monotonic() > deadline:
                return sorted(keys)
            time.sleep(pause)
            pause = min(0.02, pause * 1.5)

    def _put(self, key: str, value: Any) -> None:
        data = zlib.compress(pickle.dumps(value), level=1)
        parts = [data[start:start + LONGEST] for start in range(0, len(data), LONGEST)]
        for number, part in enumerate(parts):
            self._store.set(f"{key}/{number}", part)  # type: ignore[arg-type]
        self._store.set(key, str(len(parts)))  # last: it says that the others are there

    def _take(self, key: str, *, keep: bool = False) -> Any:
        data = b"".join(self._store.get(f"{key}/{number}") for number in range(int(self._store.get(key))))
        if not keep:
            self._drop(key)
        return pickle.loads(zlib.decompress(data))

    def _drop(self, key: str) -> None:
        if self._store.check([key]):
            for number in range(int(self._store.get(key))):
                self._store.delete_key(f"{key}/{number}")
            self._store.delete_key(key)


def _store(world: World) -> Store:
    if world.threads is None:
        store: Store = _get_default_store()
        return store
    with _lock:
        return _stores.setdefault(world.threads, HashStore())


def _number(world: World) -> int:
    """A number that no earlier series of this world had, the same on every rank."""
    if world.threads is None:
        return next(_series_of_process)
    with _lock:
        return next(_series.setdefault(world.threads, defaultdict(itertools.count))[world.rank])


def _absent(what: str, missing: list[int], limit: float) -> str:
    who = f"rank {missing[0]} has" if len(missing) == 1 else f"ranks {missing} have"
    return (f"{what} is collective, and {who} not called it within {limit:g} s; call it on every rank at the same "
            f"step, outside any `if rank == 0`")
