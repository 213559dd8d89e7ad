"""A run in a few figures, folded from its events as they come: what a handle prints and what two runs differ in."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from dplab.telemetry.events import ALLOCATOR_COUNTS, Event
from dplab.telemetry.pace import Pace, number, ranks_left

_WAITING_STEPS = 256


class Summary:
    """Figures of one run so far; feed it events in any batches, each once."""

    def __init__(self) -> None:
        self.loss: float | None = None
        """mean over ranks, of the latest step whose loss every rank that tells any has told"""
        self.memory: dict[int, dict[str, Any]] = {}
        """bytes by category as last recorded, by rank"""
        self.peak_private: dict[int, int] = {}
        """largest private bytes of the process, by rank"""
        self.wire: dict[str, dict[str, int]] = {}
        """count and bytes sent by rank 0 in training steps, by collective"""
        self._losses: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._loss_ranks: set[int] = set()
        self._pace = Pace()
        self._step_ns: list[int] = []
        self._exposed: dict[tuple[int, int], int] = defaultdict(int)

    def feed(self, events: Iterable[Event]) -> Summary:
        """Takes events and returns itself."""
        for event in events:
            step_ns = self._pace.feed(event)
            if step_ns is not None:
                self._step_ns.append(step_ns)
                self._take_left_out(event)
            elif event.kind == "collective" and event.attrs.get("purpose") in ("grads", "params"):
                self._take_collective(event)
            elif event.kind == "gauge":
                self._take_gauge(event)
            elif event.kind == "restart":
                self._take_restart(event)
        return self

    @property
    def steps(self) -> int:
        """Optimizer steps that every rank has finished."""
        return self._pace.steps

    @property
    def step_ms(self) -> float | None:
        """Median milliseconds of a step, over steps and ranks."""
        return statistics.median(self._step_ns) / 1e6 if self._step_ns else None

    @property
    def sync_ms(self) -> float | None:
        """Median milliseconds for which a step's rank was blocked by collectives of gradients and parameters."""
        return statistics.median(self._exposed.values()) / 1e6 if self._exposed else None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of all ranks a second, as `Pace` counts them."""
        return self._pace.tokens_per_s

    @property
    def unit(self) -> str:
        """What `tokens_per_s` counts: `tokens`, or `samples` of images."""
        return self._pace.unit

    def line(self) -> str:
        """`step 12, loss 2.314, 1,204 tokens/s`: what there is of it, or an empty string."""
        parts = [f"step {self.steps}"] if self.steps else []
        if self.loss is not None:
            parts.append(f"loss {self.loss:.3f}")
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:,.0f} {self.unit}/s")
        return ", ".join(parts)

    def _take_restart(self, event: Event) -> None:
        for step in [step for step in self._losses if step >= event.step]:
            del self._losses[step]
        size = ranks_left(event)
        self._loss_ranks = {rank for rank in self._loss_ranks if rank < size}
        self.memory = {rank: held for rank, held in self.memory.items() if rank < size}

    def _take_collective(self, event: Event) -> None:
        self._exposed[event.rank, event.step] += int(number(event, "exposed") or 0)
        if event.rank == 0:
            self._count(event.name, 1, int(number(event, "bytes") or 0))

    def _take_left_out(self, event: Event) -> None:
        """What a thin step sent (`thinning`)."""
        told = event.attrs.get("thin")
        if not told:
            return
        self._exposed[event.rank, event.step] += int(told["exposed"])
        for name, (count, sent) in (told["wire"].items() if event.rank == 0 else ()):
            self._count(name, count, sent)

    def _count(self, name: str, count: int, sent: int) -> None:
        row = self.wire.setdefault(name, {"count": 0, "bytes": 0})
        row["count"] += count
        row["bytes"] += sent

    def _take_gauge(self, event: Event) -> None:
        if event.name == "loss":
            self._take_loss(event)
        elif event.name == "memory":
            self.memory[event.rank] = {name: held for name, held in event.attrs.items() if name not in ALLOCATOR_COUNTS}
        elif event.name == "process":
            private = int(number(event, "private") or 0)
            self.peak_private[event.rank] = max(self.peak_private.get(event.rank, 0), private)

    def _take_loss(self, event: Event) -> None:
        value = number(event, "value")
        if value is None:
            return
        self._loss_ranks.add(event.rank)
        self._losses[event.step][event.rank].append(value)
        told = [step for step, by_rank in self._losses.items() if len(by_rank) == len(self._loss_ranks)]
        if len(self._losses) > _WAITING_STEPS:      # a rank tells no loss any more
            told.append(sorted(self._losses)[-_WAITING_STEPS])
        if told:
            self.loss = statistics.fmean(map(statistics.fmean, self._losses[max(told)].values()))
            for step in [step for step in self._losses if step < max(told)]:
                del self._losses[step]      # none of them can be the latest any more

