"""What the rules look at: medians of a run's steps, rank by rank, folded from its events."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from dplab.telemetry.events import Event
from dplab.views.steps import Step, StepAssembler

WARM_UP = 2
"""First steps of every rank that are left out, where there are at least three times as many."""


@dataclass
class RankFacts:
    """Medians over the steps of one rank; times in ms."""

    step: float = 0.0
    compute: float = 0.0
    exposed: float = 0.0
    other: float = 0.0
    data: float = 0.0
    tokens: float = 0.0
    """tokens, or samples where there are none, a step"""
    cpu: float | None = None
    """percent of one core"""
    gpu: float | None = None
    memory: dict[str, float] = field(default_factory=dict)
    """bytes by category, as last recorded"""


@dataclass
class Facts:
    """One run. `reductions`: (bytes, ms) of the gradients' collectives of rank 0, and how many a step has."""

    world_size: int
    strategy: str | None
    cores: int | None
    steps: int = 0
    ranks: dict[int, RankFacts] = field(default_factory=dict)
    reductions: list[tuple[int, float]] = field(default_factory=list)
    reductions_a_step: float = 0.0

    @property
    def step(self) -> float:
        """Median ms of a step, over the ranks."""
        return statistics.median(rank.step for rank in self.ranks.values())

    @property
    def exposed(self) -> float:
        """Median ms of a step for which a rank waits for the wire, over the ranks."""
        return statistics.median(rank.exposed for rank in self.ranks.values())

    @property
    def compute(self) -> float:
        """Median ms of a step in which a rank computes, over the ranks."""
        return statistics.median(rank.compute for rank in self.ranks.values())


def gather(events: Iterable[Event], *, world_size: int, strategy: str | None, cores: int | None) -> Facts:
    """Folds the events of a run. A step in which the program paused does not count."""
    facts = Facts(world_size, strategy, cores)
    assembler = StepAssembler()
    steps: dict[int, list[Step]] = defaultdict(list)
    cpu: dict[int, list[float]] = defaultdict(list)
    gpu: dict[int, list[float]] = defaultdict(list)
    memory: dict[int, dict[str, float]] = {}
    for event in events:
        step = assembler.feed(event)
        if step is not None and step.whole and not any(span.kind == "pause" for span in step.spans):
            steps[step.rank].append(step)
        if event.kind == "gauge" and event.name == "utilization":
            for kind, into in (("cpu", cpu), ("gpu", gpu)):
                if isinstance(value := event.attrs.get(kind), int | float):
                    into[event.rank].append(float(value))
        if event.kind == "gauge" and event.name == "memory":
            memory[event.rank] = {name: value for name, value in event.attrs.items() if isinstance(value, int | float)}
    for rank, all_of_it in sorted(steps.items()):
        kept = all_of_it[WARM_UP:] if len(all_of_it) >= 3 * WARM_UP else all_of_it
        facts.ranks[rank] = _medians(kept)
        facts.ranks[rank].cpu = statistics.median(cpu[rank]) if cpu[rank] else None
        facts.ranks[rank].gpu = statistics.median(gpu[rank]) if gpu[rank] else None
        facts.ranks[rank].memory = memory.get(rank, {})
        if rank == min(steps):
            _add_reductions(facts, kept)
    facts.steps = min(map(len, steps.values()), default=0)
    return facts


def _medians(steps: list[Step]) -> RankFacts:
    splits = [step.split_ns() for step in steps]
    data = [sum(_inside(span, step) for span in step.spans if span.kind == "data") for step in steps]
    tokens = [sum(float(span.attrs.get("tokens") or span.attrs.get("samples") or 0) for span in step.spans
                  if span.kind == "data") for step in steps]
    return RankFacts(
        step=statistics.median(step.t1 - step.t0 for step in steps) / 1e6,
        compute=statistics.median(split[0] for split in splits) / 1e6,
        exposed=statistics.median(split[1] for split in splits) / 1e6,
        other=statistics.median(split[2] for split in splits) / 1e6,
        data=statistics.median(data) / 1e6, tokens=statistics.median(tokens))


def _add_reductions(facts: Facts, steps: list[Step]) -> None:
    for step in steps:
        facts.reductions += [(int(span.attrs.get("bytes", 0)), (span.t1 - span.t0) / 1e6) for span in step.sync()
                             if span.attrs["purpose"] == "grads"]
    facts.reductions_a_step = len(facts.reductions) / len(steps)


def _inside(span: Event, step: Step) -> int:
    return max(0, min(span.t1, step.t1) - max(span.t0, step.t0))
