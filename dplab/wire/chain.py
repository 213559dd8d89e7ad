"""Collectives that follow each other: each needs what the one before has brought."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from dplab.wire.collectives import Collectives, Op, Part, Pending, Purpose

if TYPE_CHECKING:
    from dplab.wire.codec import Codec

PATIENCE = 2
"""Nudges (launches of further buckets) after which the next collective is due: by then a link that keeps up with the
backward has carried this one; behind one that does not, more is queued already, and nothing is lost by waiting."""


class Chain(Pending):
    """One pending out of several. `steps` yields each as it issues it, and works between them on what has come.

    The first is issued here, each other when somebody nudges, pushes or waits: at the same points of the program on
    every rank, since no rank may issue collectives of one group in another order than its peers. `count`: how many
    there are, where that is known; `quick`: the first is over soon (it stays inside a host).
    """

    def __init__(self, steps: Iterator[Pending], *, count: int | None = None, quick: bool = False) -> None:
        super().__init__()
        self._steps, self._left, self._due = steps, count, 1 if quick else PATIENCE
        self._nudges = 0
        self.ended: Callable[[], None] = lambda: None
        self._under_way = next(steps, None)

    def look(self) -> None:
        if self._under_way is not None:
            self._under_way.look()

    def nudge(self) -> None:
        self._nudges += 1
        if self._nudges >= self._due and self._left != 1:
            self.push()

    def push(self) -> bool:
        if self._under_way is None:
            return False
        under_way, self._under_way = self._under_way, None      # if it fails, nothing follows
        under_way.wait()
        self._under_way = next(self._steps, None)
        self._nudges, self._due = 0, PATIENCE
        self._left = None if self._left is None else self._left - 1
        if self._under_way is None:
            self.ended()
        return self._under_way is not None

    def wait(self) -> None:
        while self.push():
            pass


class TwoLevel(Collectives):
    """All ranks, whose gradients are summed in two levels: inside each host, across hosts, and back inside.

    A rank sends 2 (H-1)/H of a G-th of the tensor to other hosts (H hosts of G ranks), where a flat ring sends
    2 (N-1)/N of all of it from one rank of every host. The sums are added in another order than a flat all-reduce's.
    """

    def __init__(self, whole: Collectives, inside: Collectives, across: Collectives) -> None:
        super().__init__(whole.transport, whole.counters, whole.recorder, link=whole.link)
        self.inside = self.before = inside
        self.across = across
        self.pieces = inside.size

    def all_reduce(self, flat: torch.Tensor, *, op: Op = "sum", purpose: Purpose = "grads",
                   bucket: int | None = None, filled: int | None = None) -> Pending:
        """Every rank ends with the sum over ranks."""
        if purpose != "grads" or op != "sum":
            return super().all_reduce(flat, op=op, purpose=purpose, bucket=bucket, filled=filled)
        return Chain(self._levels(flat, Part("grads", bucket, filled, row="all_reduce"), None), count=3, quick=True)

    def coded(self, codec: Codec, flat: torch.Tensor, part: Part) -> Iterator[Pending]:
        """Inside a host nothing is coded."""
        return self._levels(flat, part, codec)

    def _levels(self, flat: torch.Tensor, part: Part, codec: Codec | None) -> Iterator[Pending]:
        inside = self.inside.of(part)
        own = inside.segment(flat)
        yield inside.reduce_scatter(flat)
        if codec is None:
            yield self.across.of(part).all_reduce(own)
        else:
            yield from self.across.coded(codec, own, part)
        yield inside.all_gather(flat)
