"""The one control message of a window: what every rank must know before any of them moves a weight.

A uint8 vector reduced with MAX over the world, so that one "yes" is enough: flags, one byte a slot for
"a gradient came here", one a buffer for "it has changed", and checksums of all collectives issued so far, of
which parameters are trained and of the optimizer's options, each as itself and as its complement (both maxima
fit together only if all ranks have the same one).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dplab.core.bucket import Bucket
from dplab.core.buffers import Buffers
from dplab.core.census import Census
from dplab.core.optim import OwnedOptimizer
from dplab.errors import StateError, WireError
from dplab.wire.collectives import Collectives, Pending


@dataclass(frozen=True)
class Told:
    """What all ranks together said. `backwards` is 0 where no rank had one."""

    stop: bool
    pause: bool
    overflow: bool
    weighted: bool
    backwards: int
    buffers: tuple[int, ...]


@dataclass(frozen=True)
class Model:
    """What of the model itself is looked at when a window closes."""

    census: Census
    buffers: Buffers
    optimizer: OwnedOptimizer


@dataclass
class Control:
    """A message on its way. Sent after the last reduction is issued, read after all are waited for."""

    message: torch.Tensor
    pending: Pending
    buckets: Sequence[Bucket]
    world: Collectives
    backwards: int
    model: Model

    FLAGS = ("changed", "wrote", "stop", "pause", "overflow", "weighted", "unweighted")

    @classmethod
    def send(cls, world: Collectives, buckets: Sequence[Bucket], flags: dict[str, bool], backwards: int,
             model: Model) -> Control:
        # a rank without a backward has no say in how many there were
        count = _twice(backwards.to_bytes(4, "little")) if backwards else [0] * 8
        touched = [touched for bucket in buckets for touched in bucket.touched]
        flags = {**flags, "changed": bool(model.census.changes()), "wrote": model.census.wrote()}
        values = [*(flags[name] for name in cls.FLAGS), *_twice(world.counters.digest.to_bytes(4, "little")),
                  *_twice(zlib.crc32(model.census.trained()).to_bytes(4, "little")),
                  *_twice(zlib.crc32(repr(model.optimizer.options()).encode()).to_bytes(4, "little")), *count, *touched,
                  *model.buffers.said()]
        message = torch.tensor(values, dtype=torch.uint8).to(buckets[0].device)
        return cls(message, world.all_reduce(message, op="max", purpose="control"), buckets, world, backwards, model)

    def read(self) -> Told:
        """What all ranks said; marks in every bucket the slots that moved somewhere."""
        self.pending.wait()
        values = iter(self.message.tolist())
        changed, wrote, stop, pause, overflow, weighted, unweighted = (bool(next(values)) for _ in self.FLAGS)
        digest, trained, options, count = ([next(values) for _ in range(8)] for _ in range(4))
        # what all ranks have read is the same, so all of them go on to the same refusal
        if changed:
            self.model.census.refuse(self.world)
        if wrote:
            self.model.census.refuse_uneven_writes(self.world)
        if not _agreed(trained):
            self.model.census.refuse_disagreement(self.world)
        if not _agreed(options):
            _refuse_options(self.world, self.model.optimizer)
        if not _agreed(digest):
            _refuse_difference(self.world)
        self.world.counters.issued.clear()
        if weighted and unweighted:
            raise StateError("engine.backward() was called with a weight and without one in the same window; "
                             "give every micro-batch on every rank a weight, or none")
        if any(count) and not weighted and not _agreed(count):
            raise StateError(f"rank {self.world.rank} ran {self.backwards} backwards in this window and another rank "
                             f"a different number; run as many on every rank, or give each its weight with "
                             f"engine.backward(loss_sum, weight=...)")
        for bucket in self.buckets:
            bucket.moved = [bool(next(values)) for _ in bucket.parameters]
        return Told(stop, pause, overflow, weighted, int.from_bytes(bytes(count[:4]), "little"), tuple(values))


def _refuse_difference(world: Collectives) -> None:
    """Names the first collective of this window that was not the same on two ranks; collective."""
    every = world.gather_objects(list(world.counters.issued))
    for calls in zip(*every, strict=False):
        other = next((rank for rank, call in enumerate(calls) if call != calls[0]), None)
        if other is not None:
            raise WireError(f"rank 0 issued {calls[0]} where rank {other} issued {calls[other]}; every rank must run "
                            f"the same units in the same order (under zero3 a branch belongs inside a unit)")
    raise WireError(f"the ranks issued {[len(calls) for calls in every]} collectives in this window; every rank must "
                    f"run the same units in the same order (under zero3 a branch belongs inside a unit)")


def _refuse_options(world: Collectives, optimizer: OwnedOptimizer) -> None:
    """Names the first option of the optimizer that the ranks do not share; collective."""
    every = world.gather_objects(optimizer.options())
    for place, groups in enumerate(zip(*every, strict=False)):
        for name in groups[0]:
            said = [group.get(name, "nothing") for group in groups]
            if len(set(said)) > 1:
                raise StateError(f"option {name!r} of the optimizer's group {place} is {', '.join(said)} on ranks 0 to "
                                 f"{world.size - 1}; give a scheduler the same on every rank (a loss that all of them "
                                 f"share, not a rank's own)")
    raise StateError(f"the optimizer has {[len(groups) for groups in every]} groups on ranks 0 to "
                     f"{world.size - 1}; add them on every rank")


def _twice(data: bytes) -> list[int]:
    return [*data, *(255 - byte for byte in data)]


def _agreed(maxima: list[int]) -> bool:
    half = len(maxima) // 2
    return all(byte + other == 255 for byte, other in zip(maxima[:half], maxima[half:], strict=True))
