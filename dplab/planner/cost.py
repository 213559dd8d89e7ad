"""Time of one optimizer step in closed form, for one split or for many at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dplab.planner import compute
from dplab.planner.collectives import Group, Groups
from dplab.planner.compute import MEMORY_SHARE, Passes
from dplab.planner.hardware import Cluster
from dplab.planner.memory import stage_layers, stage_parameters
from dplab.planner.profile import Profile
from dplab.planner.recipes import Recipe
from dplab.planner.split import RECOMPUTE, Split

STATED_SHARE = 0.25
"""Share of a matrix product's speed at which a net without a described shape runs: that of a ResNet-50 that trains
on about 2,500 images a second on an A100."""


AGAIN_SHARE = np.array([0.0, 0.0, 1.0, 0.0, 0.5])
"""Share of a forward's collectives that each way of recomputation runs again."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds of a step, by what the slowest rank does: `compute` (all micro-batches of one stage), `tensor`
    (collectives of tensor parallelism), `bubble` (waiting for other stages, hops between them), `data` (exposed
    collectives of gradients and weights, and what hidden ones slow down), `optimizer`. `hidden` is the seconds of
    collectives behind compute."""

    profile: Profile
    split: Split
    cluster: Cluster
    recipe: Recipe
    parts: dict[str, Any]
    hidden: Any

    @property
    def step(self) -> Any:
        """Seconds of a step."""
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> Any:
        """Tokens (samples for images) a second of all GPUs."""
        return self.split.samples * self.profile.sequence / self.step

    @property
    def mfu(self) -> Any:
        """Model FLOPs utilization: recomputation not counted, attention counted whole."""
        return utilization(self, self.profile.model_flops())

    @property
    def hfu(self) -> Any:
        """Hardware FLOPs utilization: recomputation counted."""
        flops = [self.profile.hardware_flops(name) for name in RECOMPUTE]
        return utilization(self, np.choose(np.asarray(self.split.recompute), flops))

    def explain(self) -> str:
        """Each part of the step in ms and as a share, for one split."""
        step = float(self.step)
        lines = [f"{self.profile.name} on {self.cluster}: predicted step {step * 1e3:,.1f} ms, "
                 f"MFU {float(self.mfu):.1%}, HFU {float(self.hfu):.1%}"]
        lines += [f"{name:10}{float(value) * 1e3:12,.1f} ms{float(value) / step:8.1%}"
                  for name, value in self.parts.items() if float(value)]
        return "\n".join([*lines, f"{'hidden':10}{float(self.hidden) * 1e3:12,.1f} ms of collectives behind compute"])


def utilization(cost: Cost, flops: Any) -> Any:
    """Share of the dense peak that `flops` a sample make of a step."""
    split, gpu = cost.split, cost.cluster.gpu
    return flops * split.samples / (cost.step * split.ranks * gpu.flops(cost.recipe.dtype))


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """What a step is put together from, in seconds of one micro-batch on one rank: `layers` and their tensor-parallel
    collectives (`tensor`) for the whole depth, the `head`, one `hop` to the next stage; `numel` are the parameters
    of the first stage's rank."""

    groups: Groups
    layers: Passes
    tensor: Passes
    head: Passes
    hop: Any
    numel: Any


def pieces(profile: Profile, split: Split, cluster: Cluster, recipe: Recipe) -> Pieces:
    """The pieces of a split."""
    groups = Groups.of(split, cluster, recipe)
    pp, tp = np.asarray(split.pp), np.asarray(split.tp)
    first = stage_layers(profile, split, recipe)[0]
    tokens = profile.blocks[-1].tokens if profile.blocks else 0
    boundary = profile.hidden * tokens * np.asarray(split.micro_batch) * recipe.element / tp
    return Pieces(groups=groups, layers=_layers(profile, split, cluster, recipe),
                  tensor=_tensor(profile, split, groups, recipe),
                  head=compute.head(profile, split, cluster.gpu, recipe),
                  hop=groups.hop_latency + boundary / groups.hop,
                  numel=stage_parameters(profile, split, np.zeros_like(pp), first) / tp)


def predict(profile: Profile, split: Split, cluster: Cluster, recipe: Recipe) -> Cost:
    """Closed form of a step: 1F1B (interleaved where `chunks` > 1) of the stages, then gradients, then optimizer.

    The slowest stage runs all micro-batches; the others' work is waited for once; a hop is exposed twice a
    micro-batch (Qi et al. 2024, arXiv:2401.10241, whose bubble rates the simulation reproduces).
    """
    made = pieces(profile, split, cluster, recipe)
    pp, m, chunks = np.asarray(split.pp), np.asarray(split.accumulate), np.asarray(split.chunks)
    depth = max(profile.layers, 1)
    first, middle, last = (count / depth if profile.blocks else np.ones_like(pp, dtype=float)
                           for count in stage_layers(profile, split, recipe))
    middle = np.where(pp > 2, middle, first)
    whole, tail = made.layers.total + made.tensor.total, made.head.total
    front = np.maximum(first, middle)
    ends = last * whole + tail
    slowest = np.maximum(front * whole, ends)
    share = np.where(ends >= slowest, last, front)
    fill = np.maximum(whole + tail - slowest, 0.0) / chunks
    hops = 2 * made.hop * (m * chunks + pp - 1)
    tensor = share * made.tensor.total
    exposed, hidden = data_parallel(made, split, recipe, share=share, units=np.maximum(profile.layers / pp, 1))
    return Cost(profile=profile, split=split, cluster=cluster, recipe=recipe, hidden=hidden, parts={
        "compute": m * (slowest - tensor), "tensor": m * tensor,
        "bubble": np.where(pp > 1, fill + hops, 0.0), "data": exposed + cluster.contention * hidden,
        "optimizer": optimizer(made, split, cluster, recipe)})


def _layers(profile: Profile, split: Split, cluster: Cluster, recipe: Recipe) -> Passes:
    """All layers of one micro-batch; a net without blocks runs its stated FLOPs at a set share of the speed."""
    rows = [compute.layer(block, split, cluster.gpu, recipe).times(block.layers) for block in profile.blocks]
    if not rows:
        rate = cluster.gpu.flops(recipe.dtype) * cluster.gpu.sustained * STATED_SHARE * recipe.efficiency
        forward = profile.stated_flops * np.asarray(split.micro_batch) / rate
        return Passes(forward=forward, backward=2 * forward, again=forward * AGAIN_SHARE[np.asarray(split.recompute)])
    return Passes(forward=sum(row.forward for row in rows), backward=sum(row.backward for row in rows),
                  again=sum(row.again for row in rows))


def _tensor(profile: Profile, split: Split, groups: Groups, recipe: Recipe) -> Passes:
    """Collectives of tensor parallelism for one micro-batch: two all-reduces (or their halves) a layer forward, two
    backward, two more where the forward runs again."""
    total: Any = np.zeros_like(np.asarray(split.tp), dtype=float)
    for block in profile.blocks:
        size = block.tokens * np.asarray(split.micro_batch) * block.hidden * recipe.element
        total = total + block.layers * 2 * groups.tensor.all_reduce(size) * (1 - recipe.tensor_hidden)
    return Passes(forward=total, backward=total, again=total * AGAIN_SHARE[np.asarray(split.recompute)])


def data_parallel(made: Pieces, split: Split, recipe: Recipe, *, share: Any, units: Any) -> tuple[Any, Any]:
    """Exposed and hidden seconds of gradient and weight collectives.

    Gradients travel behind the last backward (ZeRO-2: behind every one; between copies of a shard only the last), the
    last bucket in the open; gathered weights of ZeRO-1 and 2 come after the optimizer, in the open; ZeRO-3 gathers a
    unit ahead of each pass.
    """
    zero, m, dp = np.asarray(split.zero), np.asarray(split.accumulate), np.asarray(split.dp)
    group: Group = made.groups.shard
    forward = share * (made.layers.forward + made.tensor.forward) + made.head.forward
    backward = share * (made.layers.backward + made.layers.again + made.tensor.backward + made.tensor.again)
    backward = backward + made.head.backward
    hides = 1.0 if recipe.overlap else 0.0
    whole = made.numel * wire_bytes(split, recipe)
    weights = made.numel * gather_bytes(recipe)
    reduce = np.where(zero == 0, made.groups.data.all_reduce(whole), made.groups.reduce_scatter(whole))
    inside = group.reduce_scatter(whole)
    gather = group.all_gather(weights)
    rounds = np.where(zero == 2, m, 1)
    after = np.maximum(gather - forward, gather / units) if recipe.gather_ahead else gather
    tail = hides / units
    replicated = (np.maximum(reduce - hides * backward, tail * reduce)
                  + (rounds - 1) * np.maximum(inside - hides * backward, tail * inside)
                  + np.where(zero == 0, 0.0, after))
    lag = group.all_gather(0.0) * (units - 1)
    ahead = np.maximum(gather + lag - hides * forward, gather / units)
    last, before = (np.maximum(gather + each + 2 * lag - hides * backward, (gather + each) / units)
                    for each in (reduce, inside))
    exposed = np.where(zero == 3, m * ahead + last + (m - 1) * before, replicated)
    total = np.where(zero == 3, m * (2 * gather + 3 * lag) + reduce + (m - 1) * inside,
                     reduce + (rounds - 1) * inside + np.where(zero == 0, 0.0, gather))
    exposed = np.where(dp > 1, np.minimum(exposed, total), 0.0)
    return exposed, np.where(dp > 1, total - exposed, 0.0)


def wire_bytes(split: Split, recipe: Recipe) -> Any:
    """Bytes of a gradient element as ranks exchange it: one backward's under ZeRO-2 and 3, which reduce each; else as
    it was accumulated."""
    once = recipe.grad_bytes(split)
    return recipe.wire * np.where(np.asarray(split.zero) >= 2, np.minimum(recipe.param, once), once)


def gather_bytes(recipe: Recipe) -> int:
    """Bytes of a weight element as it is gathered."""
    return min(recipe.param, recipe.element)


def optimizer(made: Pieces, split: Split, cluster: Cluster, recipe: Recipe) -> Any:
    """Adam streams its states once: gradient read (again for the norm), master and moments read and written, weights
    written. On the host the gradients' shards come behind backward and the weights leave behind Adam, so that of each
    pair the longer counts."""
    owned = made.numel / np.where(np.asarray(split.zero) >= 1, np.asarray(split.shard), 1)
    if cluster.gpu.measured is not None:
        return cluster.gpu.measured.optimizer.at(owned)
    grad, weight = recipe.grad_bytes(split), gather_bytes(recipe)
    moved = owned * (2 * grad + 2 * (recipe.master + recipe.moments) + recipe.param)
    here = moved / (cluster.gpu.memory_bandwidth * MEMORY_SHARE)
    backward = np.asarray(split.accumulate) * (made.layers.backward + made.layers.again + made.head.backward)
    down = np.maximum(0.0, owned * grad / cluster.gpu.host_link - backward)
    there = down + np.maximum(moved / cluster.host_memory, owned * weight / cluster.gpu.host_link)
    return np.where(np.asarray(split.offload) > 0, there, here)
