"""Peak memory of one rank, category by category, for one split or for many at once.

Every figure is a closed form; `Memory.explain()` prints each with its numbers. Bytes are exact counts of what is
allocated; GB (1e9) and GiB (2^30) appear only in text, both named.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dplab.planner import activations, laid
from dplab.planner.profile import Profile
from dplab.planner.recipes import Recipe
from dplab.planner.split import Split

CATEGORIES = ("params", "grads", "optimizer", "master", "activations", "working", "logits", "gathered", "buckets",
              "slack", "context")
"""`working` is what is alive only inside one layer's backward; `slack` is fragmentation; `context` lies outside the
allocator (CUDA, kernels, communicators)."""

_BUCKET = 25 * 2**20
"""Bytes of a reduction, as torch's DDP and dplab cap it; two rotate."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes by category of the fullest pipeline stage's ranks; arrays where the split holds arrays."""

    profile: Profile
    split: Split
    recipe: Recipe
    parts: dict[str, Any]
    stage: Any
    layers: Any
    numel: Any
    held: Any
    host: Any
    """bytes of this rank in the host's memory"""

    @property
    def allocated(self) -> Any:
        """What the allocator hands out at the peak, bytes."""
        return sum(self.parts[name] for name in CATEGORIES if name not in ("slack", "context"))

    @property
    def total(self) -> Any:
        """What the device must have, bytes: allocated, slack and context."""
        return sum(self.parts[name] for name in CATEGORIES)

    def to_dict(self) -> dict[str, float]:
        """Whole bytes by category and their total, for one split."""
        return {**{name: round(float(self.parts[name])) for name in CATEGORIES}, "total": round(float(self.total))}

    def explain(self) -> str:
        """Each figure with the formula and the numbers in it, for one split."""
        texts = formulas(self)
        stage = f", stage {int(self.stage)} of {self.split.pp}" if self.split.pp > 1 else ""
        lines = [f"{self.profile.name} on {self.split.ranks} ranks{stage}: predicted, one rank",
                 f"{'':12}{'GB (1e9)':>10}{'GiB (2^30)':>12}"]
        for name in (*CATEGORIES, "total"):
            size = float(self.total if name == "total" else self.parts[name])
            if size or name == "total":
                lines.append(f"{name:12}{size / 1e9:10.3f}{size / 2**30:12.3f}   {texts[name]}")
        return "\n".join(lines)


def stage_layers(profile: Profile, split: Split, recipe: Recipe) -> tuple[Any, Any, Any]:
    """Layers of the first, a middle and the last pipeline stage. Those that do not divide are cut with one less on
    the first and last; `balanced` fills a stage until it exceeds its share of the compute, as nanotron does."""
    total, pp = profile.layers, np.asarray(split.pp)
    if recipe.partition == "balanced" and profile.blocks:
        head = profile.vocabulary * profile.hidden / profile.blocks[-1].matrices
        target = (total + head) / pp
        first = np.minimum(np.floor(target) + 1, total)
        last = np.maximum(total - np.floor(target * (pp - 1)) - 1, 0)
        return np.where(pp > 1, first, total), np.where(pp > 1, first, total), np.where(pp > 1, last, total)
    edges = (pp > 1) & ((recipe.partition == "edges") | (total % pp != 0))
    middle = np.where(edges, total + 2, total) / pp
    edge = np.where(edges, middle - 1, middle)
    return edge, middle, edge


def predict(profile: Profile, split: Split, recipe: Recipe) -> Memory:
    """Peak memory of the fullest rank."""
    pp = np.asarray(split.pp)
    first, middle, last = stage_layers(profile, split, recipe)
    layers = (first, np.where(pp > 2, middle, last), last)
    stages = (np.zeros_like(pp), np.minimum(1, pp - 1), pp - 1)
    rows = [_stage(profile, split, recipe, stage, count) for stage, count in zip(stages, layers, strict=True)]
    totals = np.stack([np.broadcast_to(sum(row["parts"].values()), np.shape(rows[0]["parts"]["params"]))
                       for row in rows])
    fullest = np.argmax(totals, axis=0)

    def pick(values: list[Any]) -> Any:
        return np.choose(fullest, [np.broadcast_to(value, np.shape(fullest)) for value in values])

    parts = {name: pick([row["parts"][name] for row in rows]) for name in CATEGORIES}
    return Memory(profile=profile, split=split, recipe=recipe, parts=parts, stage=pick(list(stages)),
                  layers=pick(list(layers)), numel=pick([row["numel"] for row in rows]),
                  held=pick([row["held"] for row in rows]), host=pick([row["host"] for row in rows]))


def _stage(profile: Profile, split: Split, recipe: Recipe, stage: Any, layers: Any) -> dict[str, Any]:
    """Bytes of one stage's rank."""
    pp, tp = np.asarray(split.pp), np.asarray(split.tp)
    numel = stage_parameters(profile, split, stage, layers) / tp
    held = activations.in_flight(stage, split, recipe)
    parts = states(numel, split, recipe)
    share = layers / max(profile.layers, 1)
    kept = sum(block.layers * share * held * activations.layer(block, split, recipe) for block in profile.blocks)
    live = max((activations.layer(block, split, recipe, recompute=0) for block in profile.blocks), key=np.max,
               default=np.zeros(1))
    stored = profile.stated_elements * recipe.element * np.asarray(split.micro_batch)
    mode = np.asarray(split.recompute)
    parts["activations"] = kept + stored * np.where(mode == 0, 1.0, 0.5)
    matrix = max((block.tokens * block.hidden * activations.scores(block, recipe) for block in profile.blocks),
                 default=0.0) * np.asarray(split.micro_batch) / tp
    parts["working"] = np.where(mode >= 2, live, np.where(mode == 1, matrix, 0.0)) if profile.blocks else 0.0 * tp
    tokens = profile.blocks[-1].tokens if profile.vocabulary else 0
    parts["logits"] = np.where(stage == pp - 1, recipe.logit * profile.vocabulary * tokens
                               * np.asarray(split.micro_batch) / tp, 0.0)
    parts |= _transients(profile, split, recipe)
    parts["slack"] = recipe.slack * sum(parts.values())
    parts["context"] = recipe.context + np.zeros_like(numel)
    return {"parts": parts, "numel": numel, "held": held, "host": offloaded(numel, split, recipe)}


def _transients(profile: Profile, split: Split, recipe: Recipe) -> dict[str, Any]:
    """Bytes of gathered units and of buckets on their way."""
    zero, several = np.asarray(split.zero), np.asarray(split.shard) > 1
    element = min(recipe.param, recipe.element)
    whole = laid.gathered(profile) if recipe.ours else 2.0 * profile.largest_unit
    rotating = 2.0 * _BUCKET * np.ones_like(zero)
    if recipe.ours:
        longest = [max(bucket.numel for bucket in laid.buckets(profile, stage, element,
                                                                             recipe.bucket_mb)) for stage in range(4)]
        rotating = 2.0 * element * np.asarray(longest)[zero]
    several = several | (np.asarray(split.offload) > 0)
    return {"gathered": np.where((zero == 3) & several, element * whole / np.asarray(split.tp), 0.0),
            "buckets": np.where((zero >= 2) & several, rotating, 0.0)}


def stage_parameters(profile: Profile, split: Split, stage: Any, layers: Any) -> Any:
    """Parameters of a stage before tensor parallelism; a tied embedding stands on the first and on the last."""
    pp = np.asarray(split.pp)
    inside = sum(block.layers * block.parameters for block in profile.blocks) / max(profile.layers, 1) * layers
    again = profile.vocabulary * profile.hidden if profile.tied else 0
    return (inside + np.where(stage == 0, profile.first, 0) + profile.stated_parameters
            + np.where(stage == pp - 1, profile.last + np.where(pp > 1, again, 0), 0))


def states(numel: Any, split: Split, recipe: Recipe) -> dict[str, Any]:
    """Bytes of the model states of `numel` parameters by category, sharded as the ZeRO stage says; with the optimizer
    offloaded sharded gradients leave as they come, and its states are elsewhere."""
    shard, zero, away = np.asarray(split.shard), np.asarray(split.zero), np.asarray(split.offload) > 0
    grad = recipe.grad_bytes(split) + recipe.grad_copy
    return {"params": numel * recipe.param / np.where(zero == 3, shard, 1),
            "grads": np.where(away & (zero >= 2), 0.0, numel * grad / np.where(zero >= 2, shard, 1)),
            "optimizer": np.where(away, 0.0, numel * recipe.moments / np.where(zero >= 1, shard, 1)),
            "master": np.where(away, 0.0, numel * recipe.master / np.where(zero >= 1, shard, 1))}


def offloaded(numel: Any, split: Split, recipe: Recipe) -> Any:
    """Bytes of a rank's share in the host's memory: gradients, master weights and moments in the dtypes they have on
    the device, and the weights that go back. Micro-batches add up there, with one that arrives beside the sum.
    """
    owned = numel / np.where(np.asarray(split.zero) >= 1, np.asarray(split.shard), 1)
    adds = (np.asarray(split.zero) >= 2) & (np.asarray(split.accumulate) > 1)
    kept = recipe.grad_bytes(split) * np.where(adds, 2, 1) + recipe.master + recipe.moments + recipe.param
    return np.where(np.asarray(split.offload) > 0, owned * kept, 0.0)


def formulas(memory: Memory) -> dict[str, str]:
    """The formula of each category with its numbers, for one split."""
    split, recipe, profile = memory.split, memory.recipe, memory.profile
    numel, shard = f"{float(memory.numel):.6g}", split.shard

    def state(bytes_: float, stage: int) -> str:
        return f"{numel} parameters x {bytes_:g} bytes" + (
            f" / {shard} ranks" if split.zero >= stage and shard > 1 else "")

    grad = float(recipe.grad_bytes(split)) + recipe.grad_copy
    small = min(recipe.param, recipe.element)
    held = f"the root and 2 blocks, {laid.gathered(profile):.6g}" if recipe.ours else (
        f"2 units x {profile.largest_unit / split.tp:.6g}")
    rotating = "the longest bucket" if recipe.ours else "25 MiB"
    texts = {"params": state(recipe.param, 3), "grads": state(grad, 2), "optimizer": state(recipe.moments, 1),
             "master": state(recipe.master, 1), "buckets": f"2 rotating x {rotating}",
             "gathered": f"{held} x {small} bytes",
             "slack": f"{recipe.slack:.0%} of what is allocated, lost to fragmentation",
             "context": "outside the allocator: CUDA context, kernels, communicators",
             "total": "the sum; what the device must have"}
    if not profile.blocks:
        return {**texts, "working": "", "logits": "", "activations": f"{split.micro_batch} samples x "
                f"{profile.stated_elements:.6g} elements x {recipe.element} bytes"}
    block = profile.blocks[-1]
    samples = f"{split.micro_batch} sample{'s' * int(split.micro_batch > 1)}"
    size = f"{block.tokens} tokens x {samples} x {block.hidden} features"
    each = float(activations.layer(block, split, recipe)) / (block.tokens * block.hidden * split.micro_batch)
    waiting = f"{float(memory.held):g} micro-batch{'es' * int(memory.held != 1)}"
    texts["activations"] = (f"{float(memory.layers):g} layers x {waiting} x {size} x "
                            f"{each:.4g} bytes ({_each(memory)})")
    texts["working"] = ("one layer, recomputed" if split.recompute >= 2 else "one layer's attention matrix")
    texts["logits"] = (f"{block.tokens} tokens x {samples} x {profile.vocabulary} logits "
                       f"{f'/ {split.tp} ' if split.tp > 1 else ''}x {recipe.logit} bytes")
    return texts


def _each(memory: Memory) -> str:
    """Where the bytes of an activation's element come from."""
    block, split, recipe = memory.profile.blocks[-1], memory.split, memory.recipe
    if split.recompute >= 2:
        return {2: "a layer's input", 3: "a layer's input, attention's result and every second product",
                4: "a layer's input, and all of every second layer"}[split.recompute]
    cut = f" / {split.tp}" if split.tp > 1 else ""
    text = f"{activations.whole(block, recipe):.4g}{cut if recipe.sequence_parallel else ''} + "
    text += f"{activations.divided(block, recipe):.4g}{cut}"
    if recipe.keeps_gathered and split.tp > 1:
        text += f" + {2 * recipe.element} x (1 - 1/{split.tp})"
    if not recipe.flash and split.recompute == 0:
        text += f" + {activations.scores(block, recipe):.4g}{cut} of the attention matrix"
    return text
