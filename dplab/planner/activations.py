"""What a layer's forward leaves for its backward, in bytes: closed forms over splits.

Korthikanti et al. 2022, arXiv:2205.05198, table 2, for a GPT block with its attention matrix stored; the same
count, tensor by tensor, for gated blocks, grouped keys, flash attention and cross-attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dplab.planner.profile import Block
from dplab.planner.recipes import Recipe
from dplab.planner.split import Split


def whole(block: Block, recipe: Recipe) -> float:
    """Bytes an element of tokens x hidden that tensor parallelism leaves whole: inputs of both norms and of both
    first products, dropout masks, fp32 copies of an unfused RMSNorm."""
    parts = 3 if block.crosses else 2
    upcast = 4 * parts if block.gated and not recipe.fused_norm else 0
    return parts * (2 * recipe.element + (1 if block.dropout else 0)) + upcast


def divided(block: Block, recipe: Recipe) -> float:
    """Bytes an element of tokens x hidden that tensor parallelism divides: queries, keys, values, context, what the
    MLP's activation takes and gives, flash attention's row sums."""
    e, h = recipe.element, block.hidden
    attention: float = e * (2 * block.inner + 2 * block.kv)
    if block.gated and recipe.packed_qkv:
        attention += e * (block.inner + block.kv)
    if block.crosses:
        attention += e * (2 * block.inner + 2 * block.kv * block.crosses / block.tokens)
    if recipe.flash:
        attention += 4 * block.heads
    return (attention + e * block.ffn * (4 if block.gated else 2)) / h


def products(block: Block, recipe: Recipe) -> float:
    """Bytes an element of tokens x hidden of what `products` keeps beside a layer's input: attention's result, and of
    the products in order (queries, keys, values, output, gate, up, down) every second one."""
    e, h = recipe.element, block.hidden
    kept = block.inner + (block.inner + block.kv + block.ffn + h if block.gated else block.inner + block.kv + block.ffn)
    return (e * kept + (4 * block.heads if recipe.flash else 0)) / h


def kinds(block: Block, recipe: Recipe, keep: Sequence[str]) -> float:
    """Bytes an element of tokens x hidden of the results that dplab's `recompute=keep:...` keeps beside a layer's
    input: attention's with its row sums, those of every matrix product."""
    e, h = recipe.element, block.hidden
    each = {"attention": e * block.inner + (4 * block.heads if recipe.flash else 0),
            "matmul": e * (block.inner + 2 * block.kv + h + (2 if block.gated else 1) * block.ffn + h),
            "convolution": 0}
    return sum(each[kind] for kind in keep) / h


def scores(block: Block, recipe: Recipe) -> float:
    """Bytes an element of tokens x hidden of stored attention matrices: 5 a s / h with dropout."""
    if recipe.flash:
        return 0.0
    each = 2 * recipe.element + 1 if block.dropout else recipe.element
    return each * block.heads * (block.tokens + block.crosses) / block.hidden


def layer(block: Block, split: Split, recipe: Recipe, *, recompute: Any = None,
          keep: Sequence[str] | None = None) -> Any:
    """Bytes that one layer keeps for one micro-batch on one rank. `recompute` replaces the split's; so does `keep`:
    the layer is computed again but for the results of these kinds of operators (none: but for its input)."""
    mode = np.asarray(split.recompute if recompute is None else recompute)
    tp = np.asarray(split.tp)
    cut = tp if recipe.sequence_parallel else np.ones_like(tp)
    kept = whole(block, recipe) / cut + divided(block, recipe) / tp
    if recipe.keeps_gathered and recipe.sequence_parallel:
        kept = kept + 2 * recipe.element * (1 - 1 / tp)
    matrix = scores(block, recipe) / tp
    full = recipe.element / cut
    if keep is not None:
        return block.tokens * block.hidden * np.asarray(split.micro_batch) * (full + kinds(block, recipe, keep) / tp)
    each = np.choose(mode, [kept + matrix, kept, full, full + products(block, recipe) / tp,
                            (kept + matrix + full) / 2])
    return block.tokens * block.hidden * np.asarray(split.micro_batch) * each


def in_flight(stage: Any, split: Split, recipe: Recipe) -> Any:
    """Micro-batches (in whole stages) whose activations a stage holds at once: 1F1B min(p - stage, m); interleaved
    1 + (p-1)/(pv) times p on the first; ZB-1p p and ZB-2p 2p-1 on every stage (arXiv:2401.10241)."""
    pp, chunks = np.asarray(split.pp), np.asarray(split.chunks)
    if recipe.schedule == "zb-1p":
        held = pp.astype(float)
    elif recipe.schedule == "zb-2p":
        held = 2.0 * pp - 1
    else:
        held = np.where(chunks > 1, ((pp - stage - 1) * 2 + (chunks - 1) * pp + 1) / chunks, pp - stage)
    return np.minimum(held, split.accumulate)
