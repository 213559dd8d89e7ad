"""Facts of the programs that train: what memory and time depend on besides the model and the split."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dplab.errors import UsageError
from dplab.planner.footprint import ElementBytes
from dplab.planner.split import Split
from dplab.specs import Precision

SCHEDULES = ("1f1b", "zb-1p", "zb-2p")
PARTITIONS = ("uniform", "edges", "balanced")
"""Layers of a stage: equal; equal but one less on the first and last; equal compute with the head counted."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Facts of a training program that memory and time depend on. Bytes are of one element.

    States: `param`, `grad` (as accumulated; None: 2 bytes in a window of one micro-batch, 4 in a longer one),
    `grad_copy` (a second gradient alive beside it), `master`, `moments` (all optimizer slots together).
    Activations: `element` bytes; `flash` never stores the attention matrix; `sequence_parallel` cuts what tensor
    parallelism leaves whole; `keeps_gathered` stores its gathered inputs; `fused_norm` keeps no fp32 copy in an
    RMSNorm; `packed_qkv` keeps the projection beside its rotated copies; `logit` bytes a logit alive at the loss.
    Time: `dtype` of matrix products; `overlap` hides gradient collectives behind the backward;
    `passes` multiplies the memory traffic between matrix products where
    kernels are less fused than assumed; `host` is the seconds in which a process launches one layer's forward;
    `efficiency` multiplies the speed of compute (1: nothing fitted). Collectives reach `link_share` of the nominal
    speed inside a node and `network_share` between nodes, hops between stages `hop_share` of the latter; flash
    attention `flash_share` of the peak (None: as the GPU's card says). `tensor_hidden` is the share of tensor-parallel
    collectives that runs behind their products, `gather_ahead` gathers ZeRO-1's weights behind the next forward.
    `ours`: buckets, units and a root that stays gathered as dplab's engine lays them; `bucket_mb` MiB a bucket (None:
    its default). `wire`: share of a gradient's bytes that travels.
    Fixed: `context` bytes outside the allocator, `slack` of what is allocated lost to fragmentation.
    """

    name: str = "modern"
    param: int = 2
    grad: int | None = None
    grad_copy: int = 0
    master: int = 4
    moments: int = 8
    element: int = 2
    flash: bool = True
    sequence_parallel: bool = True
    keeps_gathered: bool = False
    fused_norm: bool = False
    packed_qkv: bool = False
    logit: int = 12
    partition: str = "uniform"
    schedule: str = "1f1b"
    dtype: str = "bf16"
    overlap: bool = True
    passes: float = 1.5
    efficiency: float = 1.0
    link_share: float = 0.75
    network_share: float = 0.5
    hop_share: float = 0.5
    flash_share: float | None = None
    tensor_hidden: float = 0.0
    gather_ahead: bool = False
    ours: bool = False
    bucket_mb: float | None = None
    wire: float = 1.0
    host: float = 4e-4
    context: float = 1.2e9
    slack: float = 0.05
    source: str = ""

    def __post_init__(self) -> None:
        if self.partition not in PARTITIONS:
            raise UsageError(f"partition {self.partition!r} is not known; use one of {', '.join(PARTITIONS)}")
        if self.schedule not in SCHEDULES:
            raise UsageError(f"schedule {self.schedule!r} is not known; use one of {', '.join(SCHEDULES)}")

    def grad_bytes(self, split: Split) -> Any:
        """Bytes of an accumulated gradient."""
        return np.where(np.asarray(split.accumulate) > 1, max(4, self.param), self.param) if self.grad is None else (
            np.asarray(self.grad))

    @property
    def state_bytes(self) -> int:
        """Bytes a parameter where nothing is sharded: 16, 18 or 20 (with `grad` 2, 4, or 4 and a 2-byte copy)."""
        return self.param + (self.param if self.grad is None else self.grad) + self.grad_copy + (
            self.master + self.moments)

    def with_precision(self, precision: Precision) -> Recipe:
        """The recipe with the state and compute dtypes of a dplab precision."""
        one, many = (ElementBytes.of(precision, accumulate=count) for count in (1, 2))
        dtype = precision.autocast or precision.param or "fp32"
        return replace(self, param=one.params, grad=None if one.grads != many.grads else one.grads, master=one.master,
                       moments=one.optimizer, dtype=dtype, element=2 if dtype in ("bf16", "fp16") else 4)


RECIPES = {recipe.name: recipe for recipe in (
    Recipe(source="PyTorch with flash attention, sequence-parallel tensor parallelism, overlapped collectives"),
    Recipe(name="states-16", grad=2, source="16 bytes: 2-byte weights and gradients, fp32 master and Adam; "
           "Rajbhandari et al. 2020, arXiv:1910.02054"),
    Recipe(name="states-18", grad=4, source="18 bytes: gradients accumulated in fp32; Megatron-LM "
           "docs/source/api-guide/dist_optimizer.md"),
    Recipe(name="states-20", grad=4, grad_copy=2, source="20 bytes: fp16 and fp32 gradients both alive; Megatron-LM "
           "docs/source/api-guide/dist_optimizer.md"),
    Recipe(name="megatron-2021", passes=1.0, dtype="fp16", grad=2, flash=False, sequence_parallel=False,
           overlap=False, logit=8, context=0.0, slack=0.0, host=1e-3,
           source="Narayanan et al. 2021, arXiv:2104.04473: fp16, no flash attention, gradients reduced at the end"),
    Recipe(name="megatron-2022", passes=1.0, dtype="fp16", grad=4, flash=False, overlap=False, logit=8, context=0.0,
           slack=0.0, source="Korthikanti et al. 2022, arXiv:2205.05198: as before, sequence parallel; 18 bytes"),
    Recipe(name="megatron-core", passes=1.0, grad=4, fused_norm=True, packed_qkv=True, logit=8, tensor_hidden=0.5,
           gather_ahead=True, source="Megatron-Core on H100: bf16, fp32 gradients, flash attention, collectives "
           "overlapped"),
    Recipe(name="zero-bubble", passes=1.0, dtype="fp16", grad=2, flash=False, partition="edges", overlap=False, logit=8,
           context=0.0, slack=0.0, source="Qi et al. 2024, arXiv:2401.10241: Megatron-LM in fp16, first and last "
           "stage a layer less"),
    Recipe(name="nanotron", passes=1.0, grad=4, fused_norm=True, packed_qkv=True, keeps_gathered=True, logit=10,
           partition="balanced", context=0.0, slack=0.0, source="nanotron: bf16 with fp32 gradient accumulation, "
           "stages balanced by compute; peaks are of the allocator"),
    Recipe(name="fsdp", param=4, grad=4, master=0, slack=0.15, source="PyTorch FSDP: fp32 shards gathered in bf16; "
           "slack within that of pytorch/torchtitan#191, where one job reserved 71 or 87 GB"),
    Recipe(name="llm-foundry", param=4, grad=4, master=0, logit=4, flash_share=0.33,
           source="llm-foundry: FSDP, fused cross-entropy in place, and the first FlashAttention, which reaches 25 to "
           "40 % of the peak (arXiv:2307.08691)"),
    Recipe(name="llm-foundry-pure", param=2, grad=2, master=0, moments=4, logit=4, flash_share=0.33,
           source="llm-foundry's PURE mode: weights, gradients and moments in bf16"),
    Recipe(name="deepspeed-2021", passes=1.0, dtype="fp16", grad=2, flash=False, sequence_parallel=False, logit=8,
           network_share=0.082,
           source="ZeRO-3 as run in Narayanan et al. 2021, arXiv:2104.04473, table 2"),
    Recipe(name="dplab", param=4, grad=4, master=0, element=4, dtype="fp32", logit=4, passes=1.0, host=0.0, slack=0.0,
           context=0.2e9, ours=True, source="dplab's own engine and its ledger: logits count as their stored softmax; "
           "a rank's Python and torch take about 0.2 GB"),
)}
"""Programs by name. Fields are what a program's authors say that it does, except those that were read off published
results: `host` of megatron-2021 (vTrain's single-node rows with one sample a micro-batch), `network_share` of
deepspeed-2021 (its own six rows), `keeps_gathered` of nanotron (its peaks grow with the tensor degree so), and the
defaults `network_share`, `link_share` and `passes` (see data/published/REPORT.md)."""


def recipe(name: str | Recipe) -> Recipe:
    """A recipe by name."""
    if isinstance(name, Recipe):
        return name
    if name not in RECIPES:
        raise UsageError(f"recipe {name!r} is not known; use one of {', '.join(RECIPES)}")
    return RECIPES[name]
