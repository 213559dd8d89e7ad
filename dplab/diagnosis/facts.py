"""What the rules look at: medians of a run's newest steps, rank by rank, folded from its events."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from dplab.diagnosis.losses import Losses
from dplab.errors import UsageError
from dplab.specs import Strategy
from dplab.telemetry.events import ALLOCATOR_COUNTS, Event
from dplab.telemetry.pace import ranks_left
from dplab.telemetry.steps import Step, StepAssembler

WARM_UP = 2
"""First steps of every rank that are left out, and samples of them, where there are at least ENOUGH steps."""
ENOUGH = 3 * WARM_UP
"""Steps of every rank from which on their times are judged: with fewer, a slow start would be taken for the run."""
SAMPLES = 4
"""Samples of a device from which on they are judged. One is taken every half second and tells of that half second,
so in a run of less than two seconds there are too few."""
NEWEST = 400
"""Steps and samples of every rank over which medians are taken: a long run is judged as it is now."""

_COLUMNS = ("step", "compute", "exposed", "other", "data", "tokens", "recompute", "dropped")


@dataclass
class RankFacts:
    """Medians over the newest steps of one rank; times in ms."""

    step: float = 0.0
    compute: float = 0.0
    exposed: float = 0.0
    other: float = 0.0
    """neither computing nor waiting in a collective; data are a part of it"""
    data: float = 0.0
    tokens: float = 0.0
    """tokens, or samples where there are none, a step"""
    recompute: float = 0.0
    """ms of a step in which a forward is computed again, for backward"""
    dropped: float = 0.0
    """bytes of activations that are not kept for that reason"""
    cpu: float | None = None
    """percent of one core; None where it has a GPU, or there are fewer than SAMPLES samples"""
    gpu: float | None = None
    """percent; None where it has none, or there are fewer than SAMPLES samples"""
    samples: int = 0
    """of which that is the median"""
    memory: dict[str, float] = field(default_factory=dict)
    """bytes by category, as last recorded"""
    limit: float | None = None
    """bytes that there are: of its GPU, or of the host for all ranks"""
    counts: dict[str, int] = field(default_factory=dict)
    """by how much each of ALLOCATOR_COUNTS grew over the newest steps; empty where it was not recorded"""
    counted: int = 0
    """steps over which they grew"""

    @property
    def own(self) -> float:
        """ms of a step in which it waits for nobody: it computes, loads, or does something else."""
        return self.compute + self.other


@dataclass
class Facts:
    """One run. `wire`: ms of a step for which even the rank that waits least waits in collectives, which is what the
    wire takes; the others wait for that rank as well. `reductions`: (bytes, ms) of the gradients' collectives of rank
    0, and how many a step has."""

    world_size: int
    strategy: str | None
    cores: int | None
    steps: int = 0
    wire: float = 0.0
    ranks: dict[int, RankFacts] = field(default_factory=dict)
    reductions: list[tuple[int, float]] = field(default_factory=list)
    reductions_a_step: float = 0.0
    losses: Losses = field(default_factory=lambda: Losses(NEWEST))

    @property
    def parsed(self) -> Strategy | None:
        """The strategy; None where the run has none, or one of a later version."""
        try:
            return None if self.strategy is None else Strategy.parse(self.strategy)
        except UsageError:
            return None

    def plus(self, word: str) -> str:
        """The strategy with a word more: `zero2+recompute`."""
        return str(Strategy.parse(f"{self.parsed}+{word}"))

    @property
    def enough(self) -> bool:
        """Whether there are steps enough to judge their times."""
        return self.steps >= ENOUGH

    @property
    def step(self) -> float:
        """Median ms of a step, over the ranks."""
        return statistics.median(rank.step for rank in self.ranks.values())

    @property
    def exposed(self) -> float:
        """Median ms of a step for which a rank waits in collectives, over the ranks."""
        return statistics.median(rank.exposed for rank in self.ranks.values())

    @property
    def compute(self) -> float:
        """Median ms of a step in which a rank computes, over the ranks."""
        return statistics.median(rank.compute for rank in self.ranks.values())


class Gathering:
    """Folds the events of a run, however long it is. A step in which the program paused does not count."""

    def __init__(self, world_size: int, strategy: str | None, cores: int | None = None) -> None:
        self._world_size, self._strategy, self._cores = world_size, strategy, cores
        self._count: dict[int, int] = defaultdict(int)
        self._steps: dict[int, deque[tuple[float, ...]]] = defaultdict(lambda: deque(maxlen=NEWEST))
        self._waits: dict[int, list[float]] = defaultdict(list)
        self._wire: deque[float] = deque(maxlen=NEWEST)
        self._reductions: deque[list[tuple[int, float]]] = deque(maxlen=NEWEST)
        self._samples: dict[tuple[int, str], deque[float]] = defaultdict(lambda: deque(maxlen=NEWEST))
        self._memory: dict[int, dict[str, float]] = {}
        self._counts: dict[int, deque[tuple[int, ...]]] = defaultdict(lambda: deque(maxlen=NEWEST))
        self._limit: dict[int, float] = {}
        self._losses = Losses(NEWEST)

    def feed(self, event: Event) -> None:
        """Takes gauges (of utilization, memory, losses, and the layout, which tells the memory's limit), logs, and
        restarts, behind which there may be fewer ranks."""
        self._losses.feed(event)
        if event.kind == "restart":
            self._world_size = ranks_left(event, self._world_size)
            self._waits.clear()
        if event.kind != "gauge" or event.name not in ("utilization", "memory", "layout"):
            return
        told = {name: value for name, value in event.attrs.items() if isinstance(value, int | float)}
        if event.name == "layout":
            if told.get("limit"):
                self._limit[event.rank] = told["limit"]
            return
        if event.name == "memory":
            self._memory[event.rank] = told
            if all(name in told for name in ALLOCATOR_COUNTS):
                self._counts[event.rank].append((event.step, *(int(told[name]) for name in ALLOCATOR_COUNTS)))
            return
        for device in ("cpu", "gpu"):
            if device in told and event.step >= WARM_UP:      # before, it mostly builds and imports
                self._samples[event.rank, device].append(float(told[device]))

    def feed_step(self, step: Step) -> None:
        """Takes a finished step whose spans stayed."""
        if any(span.kind == "pause" for span in step.spans):
            return
        self._count[step.rank] += 1
        data = [span for span in step.spans if span.kind == "data"]
        tokens = sum(float(span.attrs.get("tokens") or span.attrs.get("samples") or 0) for span in data)
        again = [span for span in step.spans if span.kind == "recompute"]
        split = (step.t1 - step.t0, *step.split_ns(), sum(_inside(span, step) for span in data))
        self._steps[step.rank].append((*(ns / 1e6 for ns in split), tokens,
                                       sum(_inside(span, step) for span in again) / 1e6,
                                       sum(float(span.attrs.get("bytes") or 0) for span in again)))
        self._wait(step.index, split[2] / 1e6)
        if step.rank == 0:
            self._reductions.append([(int(span.attrs.get("bytes", 0)), (span.t1 - span.t0) / 1e6)
                                     for span in step.sync() if span.attrs["purpose"] == "grads"])

    def _wait(self, index: int, exposed: float) -> None:
        """Every rank waits for the last one and then for the wire; the last one for the wire alone."""
        self._waits[index].append(exposed)
        if len(self._waits[index]) == self._world_size:
            self._wire.append(min(self._waits.pop(index)))
        elif len(self._waits) > NEWEST:      # steps that some rank never ended
            del self._waits[next(iter(self._waits))]

    def facts(self) -> Facts:
        """What is known by now."""
        facts = Facts(self._world_size, self._strategy, self._cores, losses=self._losses)
        facts.steps = min((self._count[rank] for rank in range(facts.world_size)), default=0)
        for rank, steps in sorted(self._steps.items()):
            if rank >= facts.world_size:      # of before a restart with fewer
                continue
            kept = list(steps)[self._warm_up(rank):]
            medians = np.median(np.array(kept, dtype=np.float64), axis=0).tolist()
            facts.ranks[rank] = RankFacts(
                **dict(zip(_COLUMNS, medians, strict=True)), memory=self._memory.get(rank, {}),
                limit=self._limit.get(rank), **self._device(rank), **self._grown(rank))
        if self._wire:
            wire = list(self._wire)      # of steps that every rank has ended, which may be fewer than rank 0 has
            facts.wire = statistics.median(wire[self._warm_up(0):] or wire)
        if self._reductions:
            kept_reductions = list(self._reductions)[self._warm_up(0):]
            facts.reductions = [one for step in kept_reductions for one in step]
            facts.reductions_a_step = len(facts.reductions) / len(kept_reductions)
        return facts

    def _warm_up(self, rank: int) -> int:
        """How many of the steps that are held are left out."""
        held, count = len(self._steps[rank]), self._count[rank]
        return max(0, WARM_UP - (count - held)) if count >= ENOUGH else 0

    def _grown(self, rank: int) -> dict[str, Any]:
        """`counts` and `counted` of a rank. The first gauge only tells where they began: what came before it is the
        building of the model, in which nobody waits for a step."""
        told = self._counts.get(rank)
        if told is None:
            return {}
        # a process that was started again counts from 0
        grown = [sum(now - before if now >= before else now for before, now in pairwise(column))
                 for column in list(zip(*told, strict=True))[1:]]
        return {"counts": dict(zip(ALLOCATOR_COUNTS, grown, strict=True)), "counted": told[-1][0] - told[0][0]}

    def _device(self, rank: int) -> dict[str, Any]:
        """`samples` of a rank's device, and its `gpu` or, where it has none, `cpu`."""
        device = "gpu" if self._samples[rank, "gpu"] else "cpu"
        samples = self._samples[rank, device]
        return {"samples": len(samples)} | ({device: statistics.median(samples)} if len(samples) >= SAMPLES else {})


def gather(events: Iterable[Event], *, world_size: int, strategy: str | None, cores: int | None) -> Facts:
    """The facts of a run's events."""
    gathering, assembler = Gathering(world_size, strategy, cores), StepAssembler()
    for event in events:
        gathering.feed(event)
        step = assembler.feed(event)
        if step is not None and step.whole:
            gathering.feed_step(step)
    return gathering.facts()


def _inside(span: Event, step: Step) -> int:
    return max(0, min(span.t1, step.t1) - max(span.t0, step.t0))
