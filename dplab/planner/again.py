"""A strategy's rule of recomputation in the memory of one rank: what stays, and how many layers a budget asks for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from dplab.errors import UsageError
from dplab.layout import MIB
from dplab.planner import activations, memory
from dplab.planner.memory import Memory
from dplab.planner.profile import Block, Profile
from dplab.planner.recipes import Recipe
from dplab.planner.split import RECOMPUTE, Split
from dplab.specs import Recompute

_FULL = RECOMPUTE.index("full")


def under(rule: Recompute, profile: Profile, split: Split, recipe: Recipe) -> tuple[Memory, str]:
    """Peak memory of one rank under `rule`, for one split, and what its activations' formula has to add.

    Raises UsageError for a budget that is not met with every layer computed again.
    """
    plain = memory.predict(profile, replace(split, recompute=0), recipe)
    if not rule.on:
        return plain, ""
    full = memory.predict(profile, replace(split, recompute=_FULL), recipe)
    if rule.budget is not None:
        return _within(rule, plain, full)
    kept = sum(float(block.layers * block.tokens * block.hidden * split.micro_batch
                     * activations.kinds(block, recipe, rule.keep)) for block in profile.blocks)
    text = f" + {kept:.6g} bytes of kept results ({', '.join(rule.keep)})" if rule.keep else ""
    return replace(full, parts={**full.parts, "activations": full.parts["activations"] + kept}), text


def flops(block: Block, keep: Sequence[str] = ()) -> float:
    """FLOPs of one sample that computing one layer again takes: its forward's without what is kept, and without the
    layer's last product, before which torch stops since backward has all that it asked for."""
    products = 0.0 if "matmul" in keep else block.matmul_flops() - 2.0 * block.tokens * block.ffn * block.hidden
    return products + (0.0 if "attention" in keep else block.attention_flops())


def _within(rule: Recompute, plain: Memory, full: Memory) -> tuple[Memory, str]:
    budget, layers = rule.budget or 0, int(plain.layers)
    whole, least = (float(told.parts["activations"]) for told in (plain, full))
    if _alive(plain) <= budget:
        return plain, ""
    if (needed := _alive(full)) > budget:
        raise UsageError(f"strategy recompute={rule.text}: with every layer computed again activations still take "
                         f"{needed / MIB:.1f} MiB; give at least {math.ceil(needed * 10 / MIB) / 10:g}mb, or a "
                         f"smaller micro-batch")
    each = (whole - least) / layers
    kept = min(layers - 1, math.floor((budget - needed) / each))
    parts = {**full.parts, "activations": full.parts["activations"] + kept * each}
    return replace(full, parts=parts), f" + {each:.6g} bytes more of each of {kept} layers that are not computed again"


def _alive(told: Memory) -> float:
    return sum(float(told.parts[name]) for name in ("activations", "working", "logits"))
