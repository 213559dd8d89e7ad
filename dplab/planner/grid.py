"""The candidates of a search, and the laws that each must keep before anything is predicted.

All candidates are rows of integer arrays; a law is a mask over them. What breaks a law is counted under the first
law that it breaks, with an example, so that a search can say why there is nothing left.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from dplab.planner.hardware import Cluster
from dplab.planner.profile import Profile
from dplab.planner.recipes import Recipe
from dplab.planner.split import OFFLOAD, RECOMPUTE, Split

MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
MOST_CHUNKS = 8
Mask = Any


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """Candidates that broke one law: how many, and one of them."""

    reason: str
    count: int
    example: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"reason": self.reason, "count": self.count, "example": self.example}


@dataclass(frozen=True, kw_only=True)
class Space:
    """What a search may choose from. `chunks` None: every interleaving of up to MOST_CHUNKS that divides a stage's
    layers, and one layer a chunk. `hybrid`: also shard inside a node alone, with equal copies across nodes."""

    zero: Sequence[int] = (0, 1, 2, 3)
    recompute: Sequence[str] = RECOMPUTE[:3]
    micro_batches: Sequence[int] = MICRO_BATCHES
    chunks: Sequence[int] | None = None
    hybrid: bool = True
    offload: Sequence[str] = OFFLOAD[:1]
    largest_tensor: int | None = None
    largest_pipeline: int | None = None


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [value for value in range(1, int(number**0.5) + 1) if number % value == 0]
    return sorted({*small, *(number // value for value in small)})


def candidates(cluster: Cluster, samples: int, profile: Profile, recipe: Recipe, space: Space) -> Split:
    """Every combination for a cluster's GPUs and `samples` a step, as arrays. Interleaving belongs to pipelines,
    selective recomputation to stored attention matrices, ZeRO to more than one replica, hybrid sharding and offloading
    to ZeRO: other combinations name nothing new."""
    ranks = cluster.count
    modes = [RECOMPUTE.index(name) for name in space.recompute if name != "selective" or not recipe.flash]
    rows: list[tuple[int, ...]] = []
    for tp in divisors(ranks):
        for pp in divisors(ranks // tp):
            dp = ranks // tp // pp
            if tp > (space.largest_tensor or ranks) or pp > (space.largest_pipeline or ranks):
                continue
            chunks = _chunks(profile.layers, pp) if space.chunks is None else space.chunks if pp > 1 else (1,)
            beside = cluster.per_node // tp
            groups = [1, dp // beside] if space.hybrid and 1 < beside < dp and dp % beside == 0 else [1]
            away = [OFFLOAD.index(name) for name in space.offload if name == "none" or pp == 1]
            for zero, gone in itertools.product(space.zero, away):
                alone = dp == 1 and zero == (2 if gone else 0)      # ZeRO-2 lets gradients leave for the host
                if alone or (dp > 1 and (zero or not gone)):
                    rows += itertools.product([dp], [tp], [pp], [zero], space.micro_batches, [0], modes, chunks,
                                              groups if zero else [1], [gone])
    table = np.array(rows, dtype=np.int64).reshape(-1, len(fields(Split))).T
    split = Split(**dict(zip((field.name for field in fields(Split)), table, strict=True)))
    passes = np.maximum(samples // (split.dp * split.micro_batch), 1)
    return Split(**{**{field.name: getattr(split, field.name) for field in fields(Split)}, "accumulate": passes})


def _chunks(layers: int, pp: int) -> Sequence[int]:
    """Interleavings of a stage."""
    if pp == 1 or layers % pp:
        return (1,)
    return [count for count in divisors(layers // pp) if count <= MOST_CHUNKS or count == layers // pp]


def laws(split: Split, profile: Profile, cluster: Cluster, samples: int) -> list[tuple[str, Mask]]:
    """Reasons to reject, in order, each with the mask of what breaks it. Every one is a rule of the programs that run
    such splits: Megatron-LM, DeepSpeed (no ZeRO-2 and 3 in a pipeline), interleaved schedules (whole rounds)."""
    block = profile.blocks[-1] if profile.blocks else None
    cut, staged = split.tp > 1, split.pp > 1
    heads, kv, ffn, layers = (block.heads, block.kv_heads, block.ffn, block.layers) if block else (1, 1, 1, 1)
    return [
        ("tensor parallelism needs transformer blocks", cut & (block is None)),
        (f"tensor degree exceeds a node's {cluster.per_node} GPUs", split.tp > cluster.per_node),
        (f"{heads} heads are not divisible by the tensor degree", heads % split.tp != 0),
        (f"{kv} key-value heads are not divisible by the tensor degree", kv % split.tp != 0),
        (f"feed-forward width {ffn} is not divisible by the tensor degree", ffn % split.tp != 0),
        ("a pipeline needs equal blocks", staged & (not profile.pipelines)),
        (f"{layers} layers are not divisible by pipeline degree x chunks, with one less on first and last neither",
         (layers % (split.pp * split.chunks) != 0) & ((split.chunks > 1) | ((layers + 2) % split.pp != 0)
                                                      | (layers + 2 < 2 * split.pp))),
        (f"{samples} samples a step are not divisible by replicas x micro-batch",
         samples % (split.dp * split.micro_batch) != 0),
        ("fewer micro-batches than pipeline stages", staged & (split.accumulate < split.pp)),
        ("an interleaved pipeline needs micro-batches in whole rounds of its stages",
         (split.chunks > 1) & (split.accumulate % split.pp != 0)),
        ("ZeRO-2 and 3 would reduce or gather for every micro-batch of a pipeline", staged & (split.zero >= 2)),
    ]


def sift(split: Split, rules: Sequence[tuple[str, Mask]]) -> tuple[Mask, list[Rejected]]:
    """The candidates that keep every law, and the others counted under the first law that each breaks."""
    left = np.ones(len(split.dp), dtype=bool)
    rejected = []
    for reason, broken in rules:
        hit = left & np.broadcast_to(np.asarray(broken), left.shape)
        count = int(hit.sum())
        if count:
            rejected.append(Rejected(reason=reason, count=count, example=describe(split.take(int(np.argmax(hit))))))
            left &= ~hit
    return left, rejected


def describe(split: Split) -> str:
    """One candidate in a line: `dp4 x tp2 x pp1, zero1, micro-batch 2 x 8`."""
    text = f"dp{split.dp} x tp{split.tp} x pp{split.pp}, {name(split.zero)}, micro-batch {split.micro_batch} x "
    text += str(split.accumulate)
    if split.chunks > 1:
        text += f", {split.chunks} chunks a stage"
    if split.groups > 1:
        text += f", {split.groups} groups of {split.shard}"
    if split.offload:
        text += f", {OFFLOAD[split.offload]} on the host"
    return text + (f", recompute {RECOMPUTE[split.recompute]}" if split.recompute else "")


def name(zero: int) -> str:
    """`ddp`, `zero1`, `zero2` or `zero3`."""
    return "ddp" if zero == 0 else f"zero{zero}"
