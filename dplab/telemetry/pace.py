"""How far a run has come and how fast: one count of steps and one rate, whoever shows them."""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Any

from dplab.telemetry.events import Event


class Pace:
    """Steps and tokens of a run so far, in a few numbers a rank; feed it events in any batches, each once."""

    def __init__(self, world_size: int = 0) -> None:
        """`world_size`: ranks that there are, if known; else those count that have ended a step."""
        self.steps = 0
        """optimizer steps that every rank has finished"""
        self._paused: dict[int, int] = defaultdict(int)
        self._left_out: dict[int, int] = defaultdict(int)
        self._steps_of: dict[int, int] = defaultdict(int, dict.fromkeys(range(world_size), 0))
        self._samples = self._tokens = 0
        self._training: tuple[int, int] | None = None

    def feed(self, event: Event) -> int | None:
        """Takes an event; ns of the step that it ends, pauses left out, None for any other event."""
        if event.kind == "step":
            return self._take_step(event)
        if event.kind == "restart":
            self._steps_of.clear()
            self._steps_of.update(dict.fromkeys(range(ranks_left(event)), event.step))
            self.steps = event.step
        if event.kind == "data":
            samples = int(number(event, "samples") or 0)
            self._samples += samples
            self._tokens += int(number(event, "tokens") or samples)
        elif event.kind == "pause":
            self._paused[event.rank] += event.t1 - event.t0
        return None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens (samples where there are none) of all ranks a second, first step's start to last step's end, pauses
        left out; None before the first step."""
        if not self._tokens or self._training is None:
            return None
        paused = statistics.fmean(self._left_out.values()) if self._left_out else 0.0
        return self._tokens * 1e9 / max(self._training[1] - self._training[0] - paused, 1)

    @property
    def unit(self) -> str:
        """What `tokens_per_s` counts: `tokens`, or `samples` where none has more than one token (images)."""
        return "samples" if self._tokens == self._samples else "tokens"

    def _take_step(self, event: Event) -> int:
        self._steps_of[event.rank] += 1
        self.steps = min(self._steps_of.values())
        paused = self._paused.pop(event.rank, 0)      # a step begins where the last one ended, before the pause
        self._left_out[event.rank] += paused
        first, last = self._training or (event.t0, event.t1)
        self._training = (min(first, event.t0), max(last, event.t1))
        return event.t1 - event.t0 - paused


def ranks_left(restart: Event, before: int = 1) -> int:
    """Ranks that go on behind a restart; as many as `before` where its event does not tell."""
    return int(number(restart, "world_size") or before)


def number(event: Event, name: str) -> float | None:
    """An attribute that is a number; None for any other, as a program may record whatever it likes."""
    value: Any = event.attrs.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
