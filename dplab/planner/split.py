"""How one step's work is split over ranks."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

RECOMPUTE = ("none", "selective", "full", "products", "alternate")
"""`selective` recomputes the attention matrix alone (arXiv:2205.05198), `full` keeps only each layer's input,
`products` keeps attention's result and every second matrix product's (torchtitan's selective checkpointing by
operation), `alternate` is full on every second layer."""

OFFLOAD = ("none", "optimizer")
"""`optimizer` keeps gradients' shards, master weights and moments in the host's memory, and steps there (ZeRO-Offload,
arXiv:2101.06840)."""

Count = Any
"""A whole number, or an integer array with one entry a candidate."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """Data x tensor x pipeline degrees and what a micro-batch does. Fields are numbers, or arrays of equal length.

    `micro_batch` samples pass at once, `accumulate` micro-batches make a step on each of `dp` replicas;
    `recompute` indexes RECOMPUTE, `offload` OFFLOAD; `chunks` is the pipeline's interleaving. What ZeRO shards lies on
    `shard` ranks, again in each of `groups` groups (hybrid sharding): dp = groups x shard.
    """

    dp: Count = 1
    tp: Count = 1
    pp: Count = 1
    zero: Count = 0
    micro_batch: Count = 1
    accumulate: Count = 1
    recompute: Count = 0
    chunks: Count = 1
    groups: Count = 1
    offload: Count = 0

    @property
    def shard(self) -> Count:
        """Ranks that states are cut over."""
        return self.dp // self.groups

    @property
    def ranks(self) -> Count:
        """GPUs."""
        return self.dp * self.tp * self.pp

    @property
    def samples(self) -> Count:
        """Samples of a step, all replicas together."""
        return self.dp * self.micro_batch * self.accumulate

    def take(self, index: Any) -> Split:
        """The candidates at an index: a mask, an array of places, or one place (which gives plain numbers)."""
        picked = {}
        for field in fields(self):
            value = getattr(self, field.name)
            value = value[index] if isinstance(value, np.ndarray) else value
            picked[field.name] = value if isinstance(value, np.ndarray) else int(value)
        return Split(**picked)
