"""Time of one layer on one GPU: matrix products against a roofline, attention, and what lies between them.

Seconds for one micro-batch, forward and backward apart. Sizes follow from the block, the split and the recipe;
the only measured constants are the hardware card's and those named here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dplab.planner.hardware import Gpu
from dplab.planner.machine import Curve, Machine, on_curve
from dplab.planner.profile import PRODUCTS_AGAIN, Block, Profile
from dplab.planner.recipes import Recipe
from dplab.planner.split import Split

TILE = (128, 256)
"""Rows and columns of the output that one multiprocessor works on at a time (cuBLAS's and CUTLASS's usual ones)."""
PIPELINE_DEPTH = 128
"""Length of the summed dimension lost to filling and draining a tile."""
MEMORY_SHARE = 0.8
"""Share of the data sheet's memory bandwidth that streaming kernels reach."""


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Seconds of a forward, of a backward and of the recomputation before it."""

    forward: Any
    backward: Any
    again: Any

    def times(self, count: Any) -> Passes:
        """Of several layers."""
        return Passes(forward=self.forward * count, backward=self.backward * count, again=self.again * count)

    @property
    def total(self) -> Any:
        """All three."""
        return self.forward + self.backward + self.again


def product(rows: Any, columns: Any, depth: Any, gpu: Gpu, recipe: Recipe) -> Any:
    """Seconds of one matrix product (rows x depth times depth x columns)."""
    tiles = np.ceil(rows / TILE[0]) * np.ceil(columns / TILE[1])
    filled = tiles / (tiles + gpu.multiprocessors / 2) * depth / (depth + PIPELINE_DEPTH)
    math = 2.0 * rows * columns * depth / (gpu.flops(recipe.dtype) * gpu.sustained * filled)
    moved = recipe.element * (rows * columns + rows * depth + depth * columns) / (gpu.memory_bandwidth * MEMORY_SHARE)
    return np.maximum(math, moved)


def layer(block: Block, split: Split, gpu: Gpu, recipe: Recipe) -> Passes:
    """One layer of one micro-batch, without communication."""
    if gpu.measured is not None:
        return _paced("layer", block, split, gpu.measured, recipe)
    tp, micro = np.asarray(split.tp), np.asarray(split.micro_batch)
    rows = block.tokens * micro
    up = 2 if block.gated else 1
    parts = 2 if block.crosses else 1
    forward = parts * (product(rows, (block.inner + 2 * block.kv) / tp, block.hidden, gpu, recipe)
                       + product(rows, block.hidden, block.inner / tp, gpu, recipe))
    forward = forward + product(rows, up * block.ffn / tp, block.hidden, gpu, recipe)
    forward = forward + product(rows, block.hidden, block.ffn / tp, gpu, recipe)
    attend, attend_back = _attention(block, split, gpu, recipe)
    between = _between(block, split, recipe) / (gpu.memory_bandwidth * MEMORY_SHARE)
    mode = np.asarray(split.recompute)
    ahead = forward + attend + between
    back = 2 * forward + attend_back + 2 * between
    again = np.choose(mode, [0.0 * ahead, attend, ahead, PRODUCTS_AGAIN * forward + between, ahead / 2])
    scale, launches = 1 / recipe.efficiency, np.choose(mode, [0.0, 0.0, 1.0, 1.0, 0.5])
    return Passes(forward=np.maximum(ahead * scale, recipe.host), backward=np.maximum(back * scale, 1.5 * recipe.host),
                  again=np.maximum(again * scale, launches * recipe.host))


def _attention(block: Block, split: Split, gpu: Gpu, recipe: Recipe) -> tuple[Any, Any]:
    """Seconds of scores, softmax and context, forward and backward."""
    share = np.asarray(split.micro_batch) / np.asarray(split.tp)
    peak = gpu.flops("bf16" if recipe.dtype == "fp8" and "bf16" in gpu.peak else recipe.dtype)
    if recipe.flash:
        flops = block.attention_flops(causal=True) * share
        ahead, back = gpu.flash if recipe.flash_share is None else (recipe.flash_share, recipe.flash_share)
        return flops / (peak * ahead), 2.5 * flops / (peak * back)
    flops = block.attention_flops() * share
    filled = block.head_dim / (block.head_dim + PIPELINE_DEPTH)
    math = flops / (peak * gpu.sustained * filled)
    matrix = share * block.heads * block.tokens * (block.tokens + block.crosses)
    moved = recipe.passes * recipe.element * 6 * matrix / (gpu.memory_bandwidth * MEMORY_SHARE)
    return math + moved, 2 * (math + moved)


def _between(block: Block, split: Split, recipe: Recipe) -> Any:
    """Bytes that norms, residuals, dropout and the activation move in a forward."""
    tp = np.asarray(split.tp)
    e, h = recipe.element, block.hidden
    cut = tp if recipe.sequence_parallel else np.ones_like(tp)
    whole = 2 * (2 * e) + 2 * (3 * e + (1 if block.dropout else 0))
    upcast = 3 if block.gated and not recipe.fused_norm else 1
    whole += (upcast - 1) * 2 * (2 * e)
    divided = e * (3 * block.ffn / h if block.gated else 2 * block.ffn / h) + (
        2 * e * (block.inner + block.kv) / h if block.gated else 2 * e)
    return recipe.passes * block.tokens * np.asarray(split.micro_batch) * h * (whole / cut + divided / tp)


def head(profile: Profile, split: Split, gpu: Gpu, recipe: Recipe) -> Passes:
    """The logits and their loss for one micro-batch."""
    if not profile.vocabulary:
        zero = np.zeros_like(np.asarray(split.tp), dtype=float)
        return Passes(forward=zero, backward=zero, again=zero)
    block = profile.blocks[-1]
    if gpu.measured is not None:
        return _paced("ends", profile, split, gpu.measured, recipe)
    rows = block.tokens * np.asarray(split.micro_batch)
    columns = profile.vocabulary / np.asarray(split.tp)
    forward = product(rows, columns, profile.hidden, gpu, recipe) / recipe.efficiency
    loss = recipe.passes * recipe.logit * rows * columns / (gpu.memory_bandwidth * MEMORY_SHARE)
    return Passes(forward=forward + loss, backward=2 * forward + loss, again=0.0 * forward)


def alone(profile: Profile, split: Split, recipe: Recipe, *, gemm: dict[str, Curve], copy: float) -> dict[str, Any]:
    """Seconds of forward and backward of a layer and of the ends (embedding, head, loss) on a processor whose products
    and copies take what they take alone; a gradient is copied once, into the buffer that is reduced."""
    block = profile.blocks[-1]
    rows, h, e = block.tokens * np.asarray(split.micro_batch), block.hidden, recipe.element
    curve = gemm.get(recipe.dtype, gemm["fp32"])

    def product(depth: Any, columns: Any) -> Any:
        return on_curve(curve, 2.0 * rows * depth * columns)

    up = 2 if block.gated else 1
    products = (product(h, block.inner + 2 * block.kv) + product(block.inner, h) + product(h, up * block.ffn)
                + product(block.ffn, h))
    attend = on_curve(curve, block.attention_flops() * np.asarray(split.micro_batch))
    between = e * rows * (10 * h + 2 * (up + 1) * block.ffn) / copy
    head = product(h, profile.vocabulary)
    logits = 3.0 * 4 * rows * profile.vocabulary / copy
    return {"layer_forward": products + attend + between,
            "layer_backward": 2 * (products + attend + between) + _laid(block.parameters, copy),
            "ends_forward": head + logits + e * rows * 3 * h / copy,
            "ends_backward": 2 * head + logits + e * rows * 3 * h / copy + _laid(profile.first + profile.last, copy)}


def _laid(parameters: int, copy: float) -> float:
    """Seconds in which fp32 gradients are cleared, or written, and copied."""
    return 3 * 4 * parameters / copy


def _paced(unit: str, shape: Block | Profile, split: Split, machine: Machine, recipe: Recipe) -> Passes:
    """A layer or the ends at the pace at which this machine was seen to run the benchmark GPT's."""
    profile = shape if isinstance(shape, Profile) else Profile(
        name="", kind="", sequence=shape.tokens, blocks=(shape,), first=0, last=0, vocabulary=0)
    told = alone(profile, split, recipe, gemm=machine.gemm, copy=machine.copy)
    ahead, back = (machine.paces[f"{unit}_{way}"].at(told[f"{unit}_{way}"]) for way in ("forward", "backward"))
    again = np.array([0.0, 0.0, 1.0, PRODUCTS_AGAIN, 0.5])[np.asarray(split.recompute)] if unit == "layer" else 0.0
    return Passes(forward=ahead, backward=back, again=again * ahead)
