"""What a checkpoint is of: the parts of an engine, and which stretches of them lie on this rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from dplab.checkpoint.pieces import Path, Piece
from dplab.core.bucket import Bucket
from dplab.core.buffers import Buffers
from dplab.core.full import Full
from dplab.core.optim import OwnedOptimizer
from dplab.core.reduction import Reduction
from dplab.layout import ALIGN, round_up
from dplab.telemetry.recorder import Recorder
from dplab.wire.world import Mesh, World

Bounds = tuple[int, int]


@dataclass(frozen=True)
class Trained:
    """A model in training, as its engine holds it."""

    model: nn.Module
    buckets: Sequence[Bucket]
    optimizer: OwnedOptimizer
    full: Full
    reduction: Reduction
    buffers: Buffers
    mesh: Mesh
    world: World
    recorder: Recorder
    strategy: str

    @cached_property
    def slots(self) -> dict[nn.Parameter, tuple[Bucket, int]]:
        """Every parameter's place."""
        return {parameter: (bucket, slot) for bucket in self.buckets
                for slot, parameter in enumerate(bucket.parameters)}

    def name(self, parameter: nn.Parameter) -> str:
        """The plain model's name of a parameter; of a tied one, the first."""
        bucket, slot = self.slots[parameter]
        return self.full.plain(bucket.names[slot])

    def owned(self, bucket: Bucket) -> Bounds:
        """What of a bucket's flat buffer this rank owns."""
        return bucket.layout.shard(self.mesh.shard.rank)

    def written(self, bucket: Bucket) -> Bounds:
        """What this rank writes: its part of what it and its replicas own alike."""
        low, high = self.owned(bucket)
        axis = self.mesh.replicate
        step = round_up(-(-(high - low) // axis.size), ALIGN)
        start = min(high, low + axis.rank * step)
        return start, min(high, start + step)

    def pieces(self, bucket: Bucket, slot: int, path: Path, stretch: tuple[int, torch.Tensor],
               within: Bounds) -> Iterator[Piece]:
        """The part of a slot's tensor that lies in a flat stretch of the bucket (its start, its values) and in bounds.

        A tensor without elements is rank 0's.
        """
        at, (begin, run) = bucket.layout.slots[slot], stretch
        low = max(at.start, begin, within[0])
        high = min(at.stop, begin + run.numel(), within[1])
        if low < high:
            yield Piece(path, at.shape, low - at.start, run[low - begin:high - begin])
        elif not at.numel and self.world.rank == 0:
            yield Piece(path, at.shape, 0, run[:0])

    def holds_first(self, bucket: Bucket, slot: int, within: Bounds) -> bool:
        """Whether the slot's first element lies within bounds: of all ranks that write, on one."""
        at = bucket.layout.slots[slot]
        return bool(at.numel) and within[0] <= at.start < within[1]
