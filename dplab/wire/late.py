"""Transports that disturb the timing and nothing else: what a race would show itself under.

`Prompt` ends every collective where it is issued, so nothing overlaps. `Late` delays issue and end by random
moments. A step that is free of races gives the same bits under both.
"""

from __future__ import annotations

import random
import time
from typing import Any

import torch

from dplab.wire.collectives import Op, Transport, Work


class Prompt:
    """Every collective is over when its call returns."""

    def __init__(self, inner: Transport) -> None:
        self.inner, self.rank, self.size, self.modelled = inner, inner.rank, inner.size, inner.modelled

    def all_reduce(self, flat: torch.Tensor, op: Op) -> Work:
        return self._ending(self.inner.all_reduce(flat, op))

    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor) -> Work:
        return self._ending(self.inner.reduce_scatter(flat, out))

    def all_gather(self, flat: torch.Tensor) -> Work:
        return self._ending(self.inner.all_gather(flat))

    def all_to_all(self, flat: torch.Tensor, out: torch.Tensor) -> Work:
        return self._ending(self.inner.all_to_all(flat, out))

    def broadcast(self, flat: torch.Tensor, source: int) -> Work:
        return self._ending(self.inner.broadcast(flat, source))

    def gather_objects(self, value: Any) -> list[Any]:
        return self.inner.gather_objects(value)

    def _ending(self, work: Work) -> Work:
        work.wait()
        return _Ended(work.done_at)


class Late(Prompt):
    """Every collective is issued and ends up to `longest` seconds late."""

    def __init__(self, inner: Transport, seed: int, longest: float = 0.002) -> None:
        super().__init__(inner)
        self.random, self.longest = random.Random(seed), longest

    def pause(self) -> None:
        """A random moment; also for whoever wants to be late elsewhere (a gradient hook)."""
        time.sleep(self.random.random() * self.longest)

    def _ending(self, work: Work) -> Work:
        self.pause()
        return _LateWork(work, self)


class _Ended:
    """A collective that is over; waiting for it again is free."""

    def __init__(self, done_at: int | None) -> None:
        self.done_at = done_at

    def wait(self) -> None:
        pass


class _LateWork:
    def __init__(self, work: Work, late: Late) -> None:
        self._work, self._late = work, late

    @property
    def done_at(self) -> int | None:
        return self._work.done_at

    def wait(self) -> None:
        self._late.pause()
        self._work.wait()
