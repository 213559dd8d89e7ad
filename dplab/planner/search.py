"""Search for the fastest layout that fits: legal candidates, memory, closed-form time, then events for the best few."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dplab.errors import UsageError
from dplab.planner import configs, cost, grid, memory, unequal
from dplab.planner.grid import Rejected, Space
from dplab.planner.hardware import Cluster
from dplab.planner.hardware import cluster as parse_cluster
from dplab.planner.plans import Plan, Plans
from dplab.planner.profile import Profile
from dplab.planner.recipes import Recipe
from dplab.planner.recipes import recipe as named_recipe
from dplab.planner.simulate import simulate
from dplab.planner.split import OFFLOAD, Split
from dplab.planner.unequal import Mixed
from dplab.quantities import size
from dplab.specs import PRECISIONS

HEADROOM = 0.05
"""Share of a GPU's memory that a plan leaves free: what the prediction of a peak misses."""
_SIMULATED = 8
"""Candidates whose step is run event by event."""
_SIMULATED_OPS = 20_000
"""Operations of a step up to which it is."""


@dataclass(frozen=True, kw_only=True)
class _Task:
    """A checked request."""

    profile: Profile
    cluster: Cluster
    samples: int
    limit: float
    space: Space


def plan(model: str | Path | dict[str, Any] | Profile, cluster: str | Cluster | Mixed, tokens_per_step: int, *,
         sequence: int | None = None, precision: str | Sequence[str] | None = None,
         recipe: str | Recipe | None = None, network: str | None = None, memory_limit: str | float | None = None,
         space: Space | None = None, data_parallel_only: bool = False, top: int = 5) -> Plans:
    """The fastest layouts of a training step on a cluster, best first, and why the others were rejected. Predicted.

    `model`: a card's name, or a Hugging Face config (dict or path). `cluster`: `8xH100-SXM-80GB`, or `this-machine` as
    `dplab.calibrate` measured it (`2xthis-machine:gloo`: ranks and wire), where only data parallelism is searched;
    `2xRTX3090+1xRTX3060` joins unequal GPUs in one data-parallel job, each with its share of the samples.
    `tokens_per_step` counts all ranks (samples for an image model) and must hold whole samples. `precision`: of
    PRECISIONS, several to search over; None: bf16, fp16 where the GPU has no bf16, fp32 on this machine. `network`:
    `50GB/s` or `400Gb/s` between nodes. `memory_limit`: `75GiB`, or bytes; None: what the GPU has less HEADROOM.
    `data_parallel_only` keeps to what dplab runs. `space`: more or less to choose from; the optimizer stays on the GPU
    unless `Space(offload=("none", "optimizer"))` says that it may leave.
    Raises UsageError for bad input, and where nothing fits, telling the least memory and GPUs that would do.
    """
    started = time.perf_counter()
    if isinstance(cluster, Mixed) or (isinstance(cluster, str) and "+" in cluster):
        if memory_limit is not None or space is not None or not isinstance(precision, str | None):
            raise UsageError("memory_limit, space and several precisions are for equal GPUs; leave them out where a "
                             "cluster joins unequal ones with +")
        return unequal.plan(model, cluster, tokens_per_step, sequence=sequence, precision=precision, recipe=recipe,
                            network=network, top=top)
    task = _checked(configs.model(model, sequence=sequence), parse_cluster(cluster, network=network), tokens_per_step,
                    memory_limit, space or Space(), data_parallel_only)
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise UsageError(f"top={top!r} is not allowed; it is the number of plans to return, at least 1")
    found: list[Plan] = []
    rejected: list[Rejected] = []
    searched = 0
    misfits: list[memory.Memory] = []
    for name in _precisions(precision, task.cluster):
        program = named_recipe(recipe or task.cluster.recipe).with_precision(PRECISIONS[name])
        split = grid.candidates(task.cluster, task.samples, task.profile, program, task.space)
        searched += len(split.dp)
        legal, broken = grid.sift(split, grid.laws(split, task.profile, task.cluster, task.samples))
        rejected += broken
        fitting, misfit = _fitting(split.take(np.flatnonzero(legal)), program, task)
        if misfit is not None:
            rejected.append(misfit[0])
            misfits.append(misfit[1])
        found += _best(fitting, program, task, name, keep=max(top, _SIMULATED))
    if not found:
        raise UsageError(_nothing(task, misfits, rejected))
    found.sort(key=lambda plan: (plan.step, plan.memory.total))
    return Plans(profile=task.profile, cluster=task.cluster, limit=task.limit, plans=tuple(found[:top]),
                 rejected=tuple(merge(rejected)), searched=searched, seconds=time.perf_counter() - started)


def _checked(profile: Profile, cluster: Cluster, tokens: int, limit: str | float | None, space: Space,
             data_parallel_only: bool) -> _Task:
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise UsageError(f"tokens_per_step={tokens!r} is not allowed; it is a whole number of tokens of all ranks")
    samples, rest = divmod(tokens, profile.sequence)
    if rest:
        near = [str(count * profile.sequence) for count in (samples, samples + 1) if count]
        raise UsageError(f"tokens_per_step={tokens} is not a multiple of the sequence {profile.sequence}; use "
                         f"{' or '.join(near)}, or another sequence")
    bytes_ = size(limit, what="memory limit") if isinstance(limit, str) else limit
    if bytes_ is None:
        bytes_ = (1 - HEADROOM) * cluster.gpu.memory
    if not 0 < bytes_ <= cluster.gpu.memory:
        raise UsageError(f"memory limit {bytes_ / 2**30:.4g} GiB is not allowed; {cluster.gpu.name} has "
                         f"{cluster.gpu.memory / 2**30:.4g} GiB = {cluster.gpu.memory / 1e9:.4g} GB")
    if cluster.gpu.measured is not None and "optimizer" in space.offload:
        raise UsageError(f"there is nothing to offload to on {cluster}: its ranks compute in the host's memory; leave "
                         f"offload out")
    if data_parallel_only or cluster.gpu.measured is not None:
        space = replace(space, largest_tensor=1, largest_pipeline=1)
    return _Task(profile=profile, cluster=cluster, samples=samples, limit=bytes_, space=space)


def _precisions(given: str | Sequence[str] | None, cluster: Cluster) -> list[str]:
    names = [given] if isinstance(given, str) else list(given or [cluster.precision])
    for name in names:
        if name not in PRECISIONS:
            raise UsageError(f"precision {name!r} is not known; use one of {', '.join(PRECISIONS)}")
        cluster.gpu.flops(PRECISIONS[name].autocast or PRECISIONS[name].param or "fp32")
    return names


def _fitting(split: Split, program: Recipe, task: _Task) -> tuple[Split, tuple[Rejected, memory.Memory] | None]:
    """Candidates within the memory limit; the others counted, with the leanest of them."""
    if not len(split.dp):
        return split, None
    told = memory.predict(task.profile, split, program)
    total = np.broadcast_to(told.total, split.dp.shape)
    over = total > task.limit
    if not over.any():
        return split, None
    worst = split.take(int(np.argmin(np.where(over, total, np.inf))))
    leanest = memory.predict(task.profile, worst, program)
    reason = f"needs more than the {task.limit / 2**30:.4g} GiB of a GPU"
    example = f"{grid.describe(worst)}: {float(leanest.total) / 2**30:.4g} GiB"
    rejected = Rejected(reason=reason, count=int(over.sum()), example=example)
    return split.take(np.flatnonzero(~over)), (rejected, leanest)


def _best(split: Split, program: Recipe, task: _Task, precision: str, *, keep: int) -> list[Plan]:
    """The fastest of each dp x tp x pp x ZeRO x groups x offload, the first few of them run event by event."""
    if not len(split.dp):
        return []
    steps = np.broadcast_to(cost.predict(task.profile, split, task.cluster, program).step, split.dp.shape)
    chosen: dict[tuple[int, ...], int] = {}
    for place in np.argsort(steps, kind="stable"):
        key = tuple(int(field[place]) for field in (split.dp, split.tp, split.pp, split.zero, split.groups,
                                                    split.offload))
        chosen.setdefault(key, int(place))
        if len(chosen) >= keep:
            break
    return [_plan(split.take(place), program, task, precision, simulated=rank < _SIMULATED)
            for rank, place in enumerate(chosen.values())]


def _plan(split: Split, program: Recipe, task: _Task, precision: str, *, simulated: bool) -> Plan:
    told = cost.predict(task.profile, split, task.cluster, program)
    operations = 2 * split.accumulate * max(split.pp * split.chunks, task.profile.layers if split.zero == 3 else 1)
    step = float(told.step)
    if simulated and operations <= _SIMULATED_OPS:
        step = simulate(task.profile, split, task.cluster, program).step
    return Plan(split=split, precision=precision, step=step, cost=told,
                memory=memory.predict(task.profile, split, program))


def merge(rejected: Sequence[Rejected]) -> list[Rejected]:
    """Equal reasons of several precisions as one, the most frequent first."""
    merged: dict[str, Rejected] = {}
    for item in rejected:
        known = merged.get(item.reason)
        merged[item.reason] = replace(known, count=known.count + item.count) if known else item
    return sorted(merged.values(), key=lambda item: -item.count)


def _nothing(task: _Task, misfits: Sequence[memory.Memory], rejected: Sequence[Rejected]) -> str:
    """Why there is no plan: the least memory that would do, or the laws that leave nothing."""
    if not misfits:
        most = "; ".join(f"{item.reason} ({item.count})" for item in merge(rejected)[:3])
        return (f"no layout of {task.profile.name} on {task.cluster} with {task.samples} samples a step is legal: "
                f"{most}; change the cluster or the tokens a step")
    leanest = min(misfits, key=lambda told: float(told.total))
    text = (f"{task.profile.name} fits nowhere on {task.cluster}: the leanest layout ({grid.describe(leanest.split)}) "
            f"needs {float(leanest.total) / 2**30:.4g} GiB = {float(leanest.total) / 1e9:.4g} GB a GPU, and "
            f"{task.limit / 2**30:.4g} GiB are allowed; ")
    enough = _enough(task, leanest.recipe)
    text += f"{enough} of these GPUs would do" if enough else "no number of these GPUs would do"
    return text + ("; so would these with the optimizer on the host (--offload)" if _offloaded(task, leanest.recipe)
                   else "")


def _offloaded(task: _Task, program: Recipe) -> bool:
    """True where some layout fits once the optimizer may leave the GPU."""
    if task.cluster.gpu.measured is not None or "optimizer" in task.space.offload:
        return False
    return _fits(replace(task, space=replace(task.space, offload=OFFLOAD[1:])), program)


def _enough(task: _Task, program: Recipe) -> int | None:
    """The least number of GPUs, in doublings of whole nodes, on which some layout fits."""
    count = task.cluster.count
    while count < 2**16:
        count *= 2
        node = task.cluster.per_node if task.cluster.nodes > 1 else max(task.cluster.per_node, min(count, 8))
        larger = replace(task.cluster, count=count, per_node=node)
        samples = max(task.samples, count)
        samples += -samples % count
        if _fits(replace(task, cluster=larger, samples=samples, space=replace(task.space, micro_batches=(1,),
                                                                              chunks=(1,))), program):
            return count
    return None


def _fits(task: _Task, program: Recipe) -> bool:
    """True where some legal layout keeps within the memory limit."""
    split = grid.candidates(task.cluster, task.samples, task.profile, program, task.space)
    legal, _ = grid.sift(split, grid.laws(split, task.profile, task.cluster, task.samples))
    split = split.take(np.flatnonzero(legal))
    return bool(len(split.dp) and np.any(memory.predict(task.profile, split, program).total <= task.limit))
