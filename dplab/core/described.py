"""The layout as plain values, recorded once when a model is wrapped: who holds which slice of which tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from dplab.core.bucket import Bucket
from dplab.specs import Strategy
from dplab.telemetry.limits import host_memory
from dplab.wire.world import Mesh


def describe(buckets: Sequence[Bucket], mesh: Mesh, strategy: Strategy, device: torch.device) -> dict[str, Any]:
    """Values of the `layout` gauge: this rank's place on the two axes and its memory's limit in bytes; from rank 0,
    whose word holds for all, the placements and the buckets with (name, elements) of every tensor in launch order."""
    if device.type == "cuda":
        limit, whose = torch.cuda.get_device_properties(device).total_memory, f"GPU {device.index or 0}"
    else:
        limit, whose = host_memory()
    place = {"shard": (mesh.shard.rank, mesh.shard.size), "replicate": (mesh.replicate.rank, mesh.replicate.size),
             "limit": limit, "limit_of": whose}
    if mesh.world.rank:
        return place
    return {**place, "sharding": {name: str(kept.value) for name, kept in _placements(strategy)}, "buckets": [
        {"slots": [(slot.name, slot.numel) for slot in bucket.layout.slots], "trainable": bucket.trainable,
         "itemsize": bucket.parameters[0].element_size()} for bucket in buckets]}


def _placements(strategy: Strategy) -> list[tuple[str, Any]]:
    sharding = strategy.sharding
    return [(name, getattr(sharding, name)) for name in asdict(sharding)]
