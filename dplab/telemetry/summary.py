"""A run in a few figures, folded from its events as they come: what a handle prints and what two runs differ in."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from dplab.telemetry.events import Event


class Summary:
    """Figures of one run so far; feed it events in any batches, each once."""

    def __init__(self) -> None:
        self.steps = 0
        """optimizer steps that every rank has finished"""
        self.loss: float | None = None
        """the last one recorded by the lowest rank that records any"""
        self.memory: dict[int, dict[str, Any]] = {}
        """bytes by category as last recorded, by rank"""
        self.peak_private: dict[int, int] = {}
        """largest private bytes of the process, by rank"""
        self.wire: dict[str, dict[str, int]] = {}
        """count and bytes sent by rank 0 in training steps, by collective"""
        self._loss_rank: int | None = None
        self._steps_of: dict[int, int] = defaultdict(int)
        self._step_ns: list[int] = []
        self._exposed: dict[tuple[int, int], int] = defaultdict(int)
        self._tokens = 0
        self._training: tuple[int, int] | None = None

    def feed(self, events: Iterable[Event]) -> Summary:
        """Takes events and returns itself."""
        for event in events:
            if event.kind == "step":
                self._take_step(event)
            elif event.kind == "collective" and event.attrs.get("purpose") in ("grads", "params"):
                self._take_collective(event)
            elif event.kind == "data":
                self._tokens += int(event.attrs.get("tokens") or event.attrs.get("samples", 0))
            elif event.kind == "gauge":
                self._take_gauge(event)
        return self

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
        """Tokens (samples where there are none) of all ranks a second, first step's start to last step's end."""
        if not self._tokens or self._training is None:
            return None
        return self._tokens * 1e9 / max(self._training[1] - self._training[0], 1)

    def line(self) -> str:
        """`step 12, loss 2.314, 1,204 tokens/s`: what there is of it, or an empty string."""
        parts = [f"step {self.steps}"] if self.steps else []
        if self.loss is not None:
            parts.append(f"loss {self.loss:.3f}")
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:,.0f} tokens/s")
        return ", ".join(parts)

    def _take_step(self, event: Event) -> None:
        self._steps_of[event.rank] += 1
        self.steps = min(self._steps_of.values())
        self._step_ns.append(event.t1 - event.t0)
        first, last = self._training or (event.t0, event.t1)
        self._training = (min(first, event.t0), max(last, event.t1))

    def _take_collective(self, event: Event) -> None:
        self._exposed[event.rank, event.step] += int(event.attrs.get("exposed", 0))
        if event.rank == 0:
            row = self.wire.setdefault(event.name, {"count": 0, "bytes": 0})
            row["count"] += 1
            row["bytes"] += int(event.attrs.get("bytes", 0))

    def _take_gauge(self, event: Event) -> None:
        if event.name == "loss" and "value" in event.attrs and (
                self._loss_rank is None or event.rank <= self._loss_rank):
            self._loss_rank, self.loss = event.rank, float(event.attrs["value"])
        elif event.name == "memory":
            self.memory[event.rank] = dict(event.attrs)
        elif event.name == "process":
            self.peak_private[event.rank] = max(self.peak_private.get(event.rank, 0), int(event.attrs["private"]))
