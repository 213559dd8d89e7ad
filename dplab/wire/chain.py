"""Collectives that follow each other: each needs what the one before has brought."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dplab.wire.collectives import Collectives, Op, Part, Pending, Purpose


class Chain(Pending):
    """One pending out of several. `steps` yields each as it issues it, and works between them on what has come.

    The first is issued here, each other when somebody pushes or waits: at the same points of the program on every
    rank, since no rank may issue collectives of one group in another order than its peers.
    """

    def __init__(self, steps: Iterator[Pending]) -> None:
        super().__init__()
        self._steps = steps
        self._under_way = next(steps, None)

    def look(self) -> None:
        if self._under_way is not None:
            self._under_way.look()

    def push(self) -> bool:
        if self._under_way is None:
            return False
        under_way, self._under_way = self._under_way, None      # if it fails, nothing follows
        under_way.wait()
        self._under_way = next(self._steps, None)
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
        self.inside, self.across = inside, across
        self.pieces = inside.size

    def all_reduce(self, flat: torch.Tensor, *, op: Op = "sum", purpose: Purpose = "grads",
                   bucket: int | None = None, filled: int | None = None) -> Pending:
        """Every rank ends with the sum over ranks."""
        if purpose != "grads" or op != "sum":
            return super().all_reduce(flat, op=op, purpose=purpose, bucket=bucket, filled=filled)
        part = Part("grads", bucket, filled, row="all_reduce")
        inside, across = self.inside.of(part), self.across.of(part)

        def levels() -> Iterator[Pending]:
            yield inside.reduce_scatter(flat)
            yield across.all_reduce(inside.segment(flat))
            yield inside.all_gather(flat)

        return Chain(levels())
