"""Throughput as it goes: what all ranks together got through in each step, by the time that the step took."""

from __future__ import annotations

from collections import defaultdict

from dplab.telemetry.events import Event
from dplab.telemetry.pace import Pace, number, ranks_left
from dplab.views.panels import PENDING_STEPS, SMOOTHING, beside, robust_top
from dplab.views.records import Chart, Line, Text
from dplab.views.series import Series
from dplab.views.words import short


class ThroughputPanel:
    """Tokens a second of all ranks at each step, pauses left out (samples, or steps, where there are no tokens), and
    the rate of the last steps (0.9 a step)."""

    def __init__(self, world_size: int) -> None:
        self.series = Series("step", "rate", "smooth", peak="rate")
        self._world_size = world_size
        self._tokens: dict[int, int] = defaultdict(int)
        self._took: dict[int, list[int]] = defaultdict(list)
        self._counted = False
        """whether the program tells what a batch holds; steps are counted else"""
        self._recent_tokens = self._recent_ns = 0.0

    def feed(self, event: Event, took: int | None) -> None:
        """Takes batches, restarts, step ends; `took`: ns of the step that the event ends, None where it ends none."""
        if event.kind == "data":
            self._counted = True
            self._tokens[event.step] += int(number(event, "tokens") or number(event, "samples") or 0)
        if event.kind == "restart":
            self._world_size = ranks_left(event, self._world_size)
            self._took.clear()
        if took is None:
            return
        self._took[event.step].append(took)
        if len(self._took[event.step]) == self._world_size:
            self._append(event.step, sum(self._took.pop(event.step)) / self._world_size)
        if len(self._took) > PENDING_STEPS:      # of a step that a rank will never end
            self._took.pop(min(self._took))

    def _append(self, step: int, took: float) -> None:
        tokens = self._tokens.pop(step, 0) if self._counted else 1
        if len(self._tokens) > PENDING_STEPS:
            self._tokens.pop(min(self._tokens))
        self._recent_tokens = SMOOTHING * self._recent_tokens + tokens
        self._recent_ns = SMOOTHING * self._recent_ns + max(took, 1.0)
        self.series.append(step + 1, tokens * 1e9 / max(took, 1.0), self._recent_tokens * 1e9 / self._recent_ns)

    def chart(self, pace: Pace, earlier: ThroughputPanel | None = None) -> Chart:
        """Rate over steps; `pace` of the same events tells the whole run's; `earlier`: of another run, to compare."""
        if not len(self.series):
            return Chart(key="throughput", title="Throughput", x_label="step", y_label="1/s",
                         marks=(Text(text="no step has ended on every rank yet"),))
        steps, rates, smooth = (self.series[name].copy() for name in ("step", "rate", "smooth"))
        marks = [*beside(None if earlier is None else earlier.series, float(steps[-1])),
                 Line(role="rate", x=steps, y=rates, faint=True), Line(role="rate_smooth", x=steps, y=smooth)]
        unit = "steps" if pace.tokens_per_s is None else pace.unit
        value = f"{short(smooth[-1])} {unit}/s now"
        if pace.tokens_per_s is not None:
            value += f", {short(pace.tokens_per_s)} over the run"
        top = max(robust_top(mark.y) for mark in marks if len(mark.y))
        return Chart(key="throughput", title="Throughput", x_label="step", y_label="1/s", marks=tuple(marks),
                     value=value, note=value, x_range=(float(steps[0]), float(steps[-1])), y_range=(0.0, top))
