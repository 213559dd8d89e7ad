"""Unequal GPUs in one data-parallel job: each gets samples by its speed, as far as its memory goes.

All ranks step together, so a micro-batch takes as long as its slowest rank. Samples are given out one by one to
whoever would finish them first: for times that grow with the samples no other division ends earlier.
"""

from __future__ import annotations

import heapq
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dplab.errors import UsageError
from dplab.planner import configs, cost, grid, memory
from dplab.planner.grid import Rejected
from dplab.planner.hardware import Cluster, Gpu
from dplab.planner.hardware import cluster as parse_cluster
from dplab.planner.plans import Plan, Plans, Shares
from dplab.planner.profile import Profile
from dplab.planner.recipes import Recipe
from dplab.planner.recipes import recipe as named_recipe
from dplab.planner.split import RECOMPUTE, Split
from dplab.specs import PRECISIONS

HEADROOM = 0.05
"""Share of a GPU's memory that is left free, as in a search over equal ones."""
_MOST_SAMPLES = 4096
_MODES = (0, RECOMPUTE.index("full"))


@dataclass(frozen=True)
class Mixed:
    """Groups of equal GPUs on one slow wire: `parts` all count the whole job and have its slowest link, `counts` say
    how many ranks each kind has."""

    parts: tuple[Cluster, ...]
    counts: tuple[int, ...]

    @property
    def count(self) -> int:
        """GPUs."""
        return sum(self.counts)

    @property
    def error(self) -> float:
        """Share by which a predicted step may be off."""
        return max(part.error for part in self.parts)

    def __str__(self) -> str:
        return " + ".join(f"{count} x {part.gpu.name}" for count, part in zip(self.counts, self.parts, strict=True))


def mixed(text: str, *, network: str | None = None, slowed: Sequence[float] | None = None) -> Mixed:
    """From `2xRTX-3090-24GB+1xRTX-3060-12GB`, taken as one node. `slowed`: a factor for each group's speed, such as 0.7
    for one that throttles. Raises UsageError as `cluster` does."""
    pieces = [piece.strip() for piece in text.split("+")]
    for piece in pieces:
        if not re.fullmatch(r"\d+[xX][A-Za-z].*", piece):
            raise UsageError(f"cluster {text!r}: {piece!r} is not of the form COUNTxGPU; join such groups with +, as "
                             f"in 2xRTX-3090-24GB+1xRTX-3060-12GB")
    groups = [parse_cluster(piece, per_node=int(re.split("[xX]", piece)[0]) or None, network=network)
              for piece in pieces]
    factors = list(slowed or [1.0] * len(groups))
    if len(factors) != len(groups) or not all(0 < factor <= 1 for factor in factors):
        raise UsageError(f"slowed={slowed!r} is not allowed; it holds one factor above 0 and at most 1 for each of "
                         f"{len(groups)} groups")
    count, link = sum(group.count for group in groups), min(group.link for group in groups)
    parts = [replace(group, gpu=_slowed(group.gpu, factor), count=count, per_node=count, link=link)
             for group, factor in zip(groups, factors, strict=True)]
    return Mixed(tuple(parts), tuple(group.count for group in groups))


def one_slower(cluster: Cluster, speed: float = 0.7) -> Mixed:
    """A cluster one of whose GPUs reaches only `speed` of the others' speed. Raises UsageError for fewer than two GPUs
    or a speed that is not above 0 and at most 1."""
    if cluster.count < 2 or not 0 < speed <= 1:
        raise UsageError(f"one_slower({cluster}, speed={speed!r}) is not allowed; it takes two GPUs or more, and a "
                         f"speed above 0 and at most 1")
    return Mixed((cluster, replace(cluster, gpu=_slowed(cluster.gpu, speed))), (cluster.count - 1, 1))


def _slowed(gpu: Gpu, factor: float) -> Gpu:
    return replace(gpu, peak={name: peak * factor for name, peak in gpu.peak.items()},
                   memory_bandwidth=gpu.memory_bandwidth * factor)


def divide(seconds: Sequence[np.ndarray], most: Sequence[int], counts: Sequence[int], samples: int) -> list[int] | None:
    """Samples of each rank, group by group, so that the slowest ends earliest; None where memory holds fewer.

    `seconds[g][b - 1]`: of b samples on a rank of group g; `most[g]`: samples that it has memory for.
    """
    ranks = [group for group, count in enumerate(counts) for _ in range(count)]
    given = [1] * len(ranks)
    if not len(ranks) <= samples <= sum(most[group] for group in ranks) or min(most) < 1:
        return None
    waiting = [(float(seconds[group][1]), rank) for rank, group in enumerate(ranks) if most[group] > 1]
    heapq.heapify(waiting)
    for _ in range(samples - len(ranks)):
        _, rank = heapq.heappop(waiting)
        given[rank] += 1
        group = ranks[rank]
        if given[rank] < most[group]:
            heapq.heappush(waiting, (float(seconds[group][given[rank]]), rank))
    return given


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """One division: predicted `step` in seconds."""

    step: float
    shares: tuple[int, ...]
    zero: int
    recompute: int
    accumulate: int


def plan(model: str | Path | dict[str, Any] | Profile, cluster: str | Mixed, tokens_per_step: int, *,
         sequence: int | None = None, precision: str | None = None, recipe: str | Recipe | None = None,
         network: str | None = None, top: int = 5) -> Plans:
    """The fastest data-parallel layouts of a job on unequal GPUs, each beside the best with equal shares. Predicted.

    Parameters as in `plan`. The shares are samples of each rank in one micro-batch, which `Plan.shares` and the
    strategy record. Raises UsageError for bad input, and where nothing fits.
    """
    started = time.perf_counter()
    place = mixed(cluster, network=network) if isinstance(cluster, str) else cluster
    profile = configs.model(model, sequence=sequence)
    name = precision or ("bf16" if all("bf16" in part.gpu.peak for part in place.parts) else "fp16")
    if name not in PRECISIONS:
        raise UsageError(f"precision {name!r} is not known; use one of {', '.join(PRECISIONS)}")
    samples, rest = divmod(tokens_per_step, profile.sequence)
    if rest or samples < place.count:
        raise UsageError(f"tokens_per_step={tokens_per_step} is not a multiple of the sequence {profile.sequence} "
                         f"with at least one sample for each of {place.count} GPUs; use "
                         f"{place.count * profile.sequence}, or a multiple of {profile.sequence} above it")
    program = named_recipe(recipe or "modern").with_precision(PRECISIONS[name])
    found, equal, rejected, searched = _search(profile, place, program, samples)
    if not found:
        raise UsageError(f"{profile.name} fits nowhere on {place}: no division of {samples} samples a step leaves "
                         f"every GPU within its memory; use more GPUs, or a smaller model")
    found.sort(key=lambda layout: layout.step)
    plans = tuple(_plan(layout, equal, profile, place, program, name) for layout in found[:top])
    limit = min(part.gpu.memory for part in place.parts) * (1 - HEADROOM)
    return Plans(profile=profile, cluster=place, limit=limit, plans=plans, rejected=tuple(rejected), searched=searched,
                 seconds=time.perf_counter() - started)


def _search(profile: Profile, place: Mixed, program: Recipe,
            samples: int) -> tuple[list[_Layout], _Layout | None, list[Rejected], int]:
    """The best division of each ZeRO stage and recomputation, the best with equal shares, and what did not fit."""
    found: list[_Layout] = []
    equal: list[_Layout] = []
    lost, searched = 0, 0
    for zero in range(4):
        for mode in _MODES:
            best: list[_Layout] = []
            for accumulate in grid.divisors(samples):
                each = samples // accumulate
                if each < place.count or each > _MOST_SAMPLES:
                    continue
                searched += 1
                seconds, most = _tables(profile, place, program, (zero, mode, accumulate), each - place.count + 1)
                shares = divide(seconds, most, place.counts, each)
                if shares is None:
                    lost += 1
                    continue
                best.append(_layout(seconds, shares, place, (zero, mode, accumulate)))
                same, left = divmod(each, place.count)
                if not left and all(same <= limit for limit in most):
                    equal.append(_layout(seconds, [same] * place.count, place, (zero, mode, accumulate)))
            found += sorted(best, key=lambda layout: layout.step)[:1]
    rejected = [Rejected(reason="no division leaves every GPU within its memory", count=lost,
                         example=f"{samples} samples on {place}")] if lost else []
    return found, min(equal, key=lambda layout: layout.step, default=None), rejected, searched


def _tables(profile: Profile, place: Mixed, program: Recipe, choice: tuple[int, int, int],
            largest: int) -> tuple[list[np.ndarray], list[int]]:
    """Seconds of a step by samples in a micro-batch (1 to `largest`), and the most samples that fit, for each group."""
    zero, mode, accumulate = choice
    batches = np.arange(1, largest + 1)
    ones = np.ones_like(batches)
    split = Split(dp=place.count * ones, tp=ones, pp=ones, zero=zero * ones, micro_batch=batches,
                  accumulate=accumulate * ones, recompute=mode * ones, chunks=ones)
    held = np.broadcast_to(memory.predict(profile, split, program).total, batches.shape)
    seconds = [np.broadcast_to(cost.predict(profile, split, part, program).step, batches.shape)
               for part in place.parts]
    return seconds, [int(np.sum(held <= part.gpu.memory * (1 - HEADROOM))) for part in place.parts]


def _layout(seconds: Sequence[np.ndarray], shares: list[int], place: Mixed, choice: tuple[int, int, int]) -> _Layout:
    groups = [group for group, count in enumerate(place.counts) for _ in range(count)]
    step = max(float(seconds[group][share - 1]) for group, share in zip(groups, shares, strict=True))
    return _Layout(step=step, shares=tuple(shares), zero=choice[0], recompute=choice[1], accumulate=choice[2])


def _plan(layout: _Layout, equal: _Layout | None, profile: Profile, place: Mixed, program: Recipe,
          precision: str) -> Plan:
    """With the memory and the cost of the rank that is nearest to its limit."""
    groups = [group for group, count in enumerate(place.counts) for _ in range(count)]
    held = {}
    for group, share in set(zip(groups, layout.shares, strict=True)):
        split = Split(dp=place.count, zero=layout.zero, micro_batch=share, accumulate=layout.accumulate,
                      recompute=layout.recompute)
        told = memory.predict(profile, split, program)
        held[group, share] = float(told.total) / place.parts[group].gpu.memory, told
    group, share = max(held, key=lambda key: held[key][0])
    filled, fullest = held[group, share]
    peak = sum(count * part.gpu.flops(program.dtype) for count, part in zip(place.counts, place.parts, strict=True))
    return Plan(split=fullest.split, precision=precision, step=layout.step, memory=fullest,
                cost=cost.predict(profile, fullest.split, place.parts[group], program),
                shares=Shares(samples=layout.shares, equal_step=None if equal is None else equal.step, filled=filled,
                              gpu=place.parts[group].gpu.name, peak=peak))
