"""Integers only: where each parameter lies in a flat buffer, where shards are cut, what is reduced together.

Every slot starts at a multiple of `ALIGN` elements and every shard cut falls on one, whatever the strategy.
Vectorised kernels therefore meet the same lanes with and without sharding, which is what makes DDP and
ZeRO-1/2/3 agree to the bit; it also keeps every view on the 16-byte boundary that fast matmuls want.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

ALIGN = 128
"""Elements; a multiple of every vector width in use."""

CACHED = 1 << 17
"""Elements that a CPU works on at a time where it goes over them more than once. torch's plain Adam does a dozen times
and makes two temporary tensors as long: half a MiB each stays in a core's cache, where a million elements take twice
the time."""

MIB = 1024 * 1024


@dataclass(frozen=True)
class Slot:
    """A parameter's place in a flat buffer: elements [start, stop)."""

    name: str
    shape: tuple[int, ...]
    start: int

    @cached_property
    def numel(self) -> int:
        """Elements of the parameter, without padding."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class FlatLayout:
    """Slots one after the other, padded so that `shards` equal slices of a multiple of ALIGN cover them, each of which
    divides into `pieces` such slices again."""

    slots: tuple[Slot, ...]
    shards: int
    pieces: int = 1

    @classmethod
    def of(cls, shapes: Sequence[tuple[str, tuple[int, ...]]], shards: int, pieces: int = 1) -> FlatLayout:
        """Lays out (name, shape) pairs in the order given."""
        slots, start = [], 0
        for name, shape in shapes:
            slot = Slot(name, tuple(shape), start)
            slots.append(slot)
            start = round_up(slot.stop, ALIGN)
        return cls(tuple(slots), shards, pieces)

    @cached_property
    def numel(self) -> int:
        """Elements of the whole buffer, padding included."""
        used = self.slots[-1].stop if self.slots else 0
        return round_up(used, ALIGN * self.shards * self.pieces)

    @property
    def shard_numel(self) -> int:
        """Elements of one shard, the same on every rank."""
        return self.numel // self.shards

    def shard(self, index: int) -> tuple[int, int]:
        """Bounds [start, stop) of shard `index` in the whole buffer."""
        return index * self.shard_numel, (index + 1) * self.shard_numel

    def owned(self, slot: Slot, index: int) -> tuple[int, int]:
        """The part of `slot` in shard `index`, as bounds in that shard; empty (start == stop) if it has none."""
        low, high = self.shard(index)
        start, stop = max(slot.start, low), min(slot.stop, high)
        return (start - low, stop - low) if start < stop else (0, 0)

    def within(self, index: int, pieces: int) -> tuple[Slot, ...]:
        """The slots of one of so many equal pieces, placed in it; one that its bounds cut is a stretch, of (n,)."""
        low, high = self.numel // pieces * index, self.numel // pieces * (index + 1)
        parts = [(slot, max(slot.start, low), min(slot.stop, high)) for slot in self.slots]
        return tuple(Slot(slot.name, slot.shape if stop - start == slot.numel else (stop - start,), start - low)
                     for slot, start, stop in parts if start < stop)


def bucket_cap(grad_bytes: int, bucket_mb: float | None) -> int:
    """Bytes at which a bucket is closed: the user's, or min(25 MiB, max(1 MiB, gradient bytes / 16))."""
    if bucket_mb is not None:
        return max(1, int(bucket_mb * MIB))
    return min(25 * MIB, max(MIB, grad_bytes // 16))


def bucket_plan(nbytes: Sequence[int], cap: int) -> list[list[int]]:
    """Which parameters are reduced together: lists of indices, in the order in which buckets are launched.

    `nbytes` holds each parameter's bytes in order of registration; backward meets them in reverse. A
    parameter larger than the cap is a bucket of its own. The bucket launched last is kept small (at most
    1 MiB): whatever it costs is exposed, since no backward is left to hide it behind.
    """
    last: list[int] = []
    for index, size in enumerate(nbytes):
        if last and sum(nbytes[i] for i in last) + size > min(cap, MIB):
            break
        last.append(index)
    plan: list[list[int]] = []
    room = 0
    for index in range(len(nbytes) - 1, len(last) - 1, -1):
        if nbytes[index] > room or not plan:
            plan.append([])
            room = cap
        plan[-1].append(index)
        room -= nbytes[index]
    return [*plan, last[::-1]] if last else plan


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is >= value."""
    return -(-value // multiple) * multiple
