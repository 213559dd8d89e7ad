"""Loss and step time as they grow: incremental folds of events into bounded columns.

Events number steps from 0; whoever looks at a board counts them from 1, as the program's own lines do.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dplab.telemetry.events import Event
from dplab.telemetry.pace import number, ranks_left
from dplab.telemetry.steps import ANATOMY, Step
from dplab.views import theme
from dplab.views.records import Chart, Floats, Lanes, Line, StackedArea, Text
from dplab.views.series import Series
from dplab.views.words import short

SHOWN_RANKS = 16
"""Ranks that get columns and lanes of their own; more would not be told apart on a screen."""
PENDING_STEPS = 256
SMOOTHING = 0.9
MEDIAN_STEPS = 50
"""Steps over which medians are told: the last ones, or all where there are fewer."""


def last_steps(steps: int) -> str:
    """The steps whose medians are told, in words."""
    return f"the last {MEDIAN_STEPS} steps" if steps > MEDIAN_STEPS else "all steps"


def robust_top(values: Floats) -> float:
    """Top of a scale that a few slow first steps do not flatten."""
    high, usual = float(values.max()), float(np.quantile(values, 0.95))
    return 1.15 * (1.3 * usual if high > 2 * usual > 0 else high)


def beside(earlier: Series | None, last: float) -> list[Line]:
    """The smoothed line of another run to compare with, as far as step `last`; none where there is no such run."""
    if earlier is None or not len(earlier):
        return []
    seen = earlier["step"] <= last
    return [Line(role="earlier", x=earlier["step"][seen], y=earlier["smooth"][seen])]


class LossPanel:
    """Mean loss over ranks at each step, and its exponential mean (0.9 a step, without start-up bias)."""

    def __init__(self, world_size: int) -> None:
        self.series = Series("step", "loss", "smooth", peak="loss")
        self.first: float | None = None
        self.last: float | None = None
        self.last_step = -1
        self._world_size = world_size
        self._pending: dict[int, dict[int, list[float]]] = {}
        self._finished: dict[int, int] = {}
        self._smooth = 0.0
        self._weight = 0.0

    def feed(self, event: Event) -> None:
        """Takes loss gauges, restarts and step ends; a step counts once every rank has ended it and told its loss."""
        if event.kind == "gauge" and event.name == "loss" and event.step > self.last_step:
            if (value := number(event, "value")) is None:      # a program's own
                return
            self._pending.setdefault(event.step, {}).setdefault(event.rank, []).append(float(value))
        elif event.kind == "restart":      # maybe with fewer ranks
            self._world_size = ranks_left(event, self._world_size)
            self._finished.clear()
        elif event.kind == "step":
            self._finished[event.rank] = max(event.step, self._finished.get(event.rank, -1))
        else:
            return
        self._settle()

    def _settle(self) -> None:
        everywhere = min(self._finished.values()) if len(self._finished) >= self._world_size else -1
        for step in sorted(self._pending):
            told = len(self._pending[step]) >= self._world_size
            # one loss a rank is there, or will never be: the rank is a step further, or too many steps wait
            if (told and everywhere >= step) or everywhere > step or len(self._pending) > PENDING_STEPS:
                self._append(step, self._pending.pop(step))
            else:
                break

    def _append(self, step: int, by_rank: dict[int, list[float]]) -> None:
        loss = float(np.mean([np.mean(losses) for losses in by_rank.values()]))
        if np.isfinite(loss):
            self._smooth = SMOOTHING * self._smooth + (1 - SMOOTHING) * loss
            self._weight = SMOOTHING * self._weight + (1 - SMOOTHING)
        self.series.append(step + 1, loss, self._smooth / self._weight if self._weight else np.nan)
        self.first = loss if self.first is None else self.first
        self.last, self.last_step = loss, step

    def chart(self, earlier: LossPanel | None = None) -> Chart:
        """Loss over steps; `earlier`: of another run, to compare with."""
        if not len(self.series):
            return Chart(key="loss", title="Loss", x_label="step", y_label="",
                         marks=(Text(text="no loss yet: it appears after the first step"),))
        steps, losses = self.series["step"].copy(), self.series["loss"].copy()
        marks = [*beside(None if earlier is None else earlier.series, float(steps[-1])),
                 Line(role="loss", x=steps, y=losses, faint=True),
                 Line(role="loss_smooth", x=steps, y=self.series["smooth"].copy())]
        finite = np.concatenate([mark.y[np.isfinite(mark.y)] for mark in marks])
        low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
        room = 0.06 * ((high - low) or 1.0)
        return Chart(
            key="loss", title="Loss", x_label="step", y_label="", value=short(self.last, 4),
            legend=tuple((mark.role, theme.label(mark.role)) for mark in marks), marks=tuple(marks),
            x_range=(float(steps[0]), float(steps[-1])), y_range=(low - room, high + room),
            note=f"{self.first:.3f} at step {steps[0]:.0f}, {self.last:.3f} at step {self.last_step + 1}")


class StepPanel:
    """Time of each step on each rank (ms): forward, backward, optimizer, exposed synchronisation, data, other."""

    def __init__(self) -> None:
        self.series: dict[int, Series] = {}
        self._medians: dict[int | None, dict[str, float] | None] = {}

    def feed(self, step: Step) -> None:
        """Takes a finished step."""
        if step.rank >= SHOWN_RANKS:
            return
        self._medians.clear()
        if step.rank not in self.series:
            self.series[step.rank] = Series("step", *ANATOMY, "total", peak="total")
        parts = [ns / 1e6 for ns in step.anatomy_ns().values()]
        self.series[step.rank].append(step.index + 1, *parts, sum(parts))

    def medians(self, *, rank: int | None = None) -> dict[str, float] | None:
        """Median ms of each part over the last steps of all ranks, or of one; None before the first step."""
        if rank not in self._medians:
            self._medians[rank] = self._medians_of(rank)
        return self._medians[rank]

    def _medians_of(self, rank: int | None) -> dict[str, float] | None:
        chosen = self.series.values() if rank is None else [self.series[rank]] if rank in self.series else []
        if not chosen:
            return None
        recent = np.concatenate([series.rows(max(0, len(series) - MEDIAN_STEPS)) for series in chosen])
        columns = ("step", *ANATOMY, "total")
        return {name: float(value) for name, value in zip(columns, np.median(recent, axis=0), strict=True)
                if name != "step"}

    def chart(self, rank: int = 0) -> Chart:
        """One rank's step times, stacked; a step lasts until the next one's number."""
        title, median = f"Step time, rank {rank}", self.medians(rank=rank)
        if median is None:
            return Chart(key="steps", title=title, x_label="step", y_label="ms", rank=rank,
                         marks=(Text(text=f"no finished step on rank {rank} yet"),))
        series, over = self.series[rank], last_steps(len(self.series[rank]))
        legend = tuple((part, f"{theme.label(part).removesuffix(' sync')} {short(median[part], 2)}")
                       for part in ANATOMY)
        return Chart(
            key="steps", title=title, x_label="step", y_label="ms", rank=rank,
            value=f"{short(median['total'])} ms", legend=legend,
            marks=(StackedArea(roles=ANATOMY, x=series["step"].copy(),
                               ys=np.stack([series[part] for part in ANATOMY])),),
            x_range=(float(series["step"][0]), float(series["step"][-1]) + 1),
            y_range=(0.0, robust_top(series["total"])),
            note=f"median {short(median['total'])} ms: {', '.join(text for _, text in legend)} ({over})")

    def anatomy(self, earlier: StepPanel | None = None) -> Chart:
        """A bar a rank: the median step, part by part; below them that of an earlier run, if one is given."""
        bars = {f"rank {rank}": self.medians(rank=rank) for rank in sorted(self.series)}
        if earlier is not None:
            bars["earlier"] = earlier.medians()
        told = {name: parts for name, parts in bars.items() if parts is not None}
        if not self.series:
            return Chart(key="anatomy", title="Anatomy of a step", x_label="ms", y_label="",
                         marks=(Text(text="no finished step yet"),))
        totals = [parts["total"] for parts in told.values()]
        over = last_steps(max(map(len, self.series.values())))
        slowest = max(told, key=lambda name: told[name]["total"] * (name != "earlier"))
        said = f"{slowest} {', '.join(f'{theme.label(part)} {short(told[slowest][part])}' for part in ANATOMY)}"
        return Chart(key="anatomy", title="Anatomy of a step", x_label="ms", y_label="", marks=(stacked(told),),
                     value=f"slowest {slowest}" if len(told) > 1 else "", x_range=(0.0, 1.02 * (max(totals) or 1.0)),
                     legend=tuple((part, theme.label(part)) for part in ANATOMY),
                     caption=f"numbers: medians of {over}",
                     note=f"the slowest of {len(self.series)}{' shown' * (len(self.series) == SHOWN_RANKS)}, {said} ms "
                          f"(medians of {over})")


def stacked(bars: Mapping[str, Mapping[str, float]]) -> Lanes:
    """A lane a bar, its parts one behind the other; ms by part of ANATOMY."""
    columns: list[tuple[float, ...]] = []
    texts: list[str] = []
    for lane, (name, parts) in enumerate(bars.items()):
        edges = np.cumsum([0.0, *(parts[part] for part in ANATOMY)])
        for kind, part in enumerate(ANATOMY):
            if parts[part] > 0:
                columns.append((lane, 0, edges[kind], edges[kind + 1], kind))
                texts.append(f"{name}, {theme.label(part)}: {short(parts[part])} ms")
    lanes, row, start, end, kinds = np.array(columns, dtype=np.float64).reshape(-1, 5).T
    return Lanes(names=tuple(bars), rows=(1,) * len(bars), roles=ANATOMY, lane=lanes, row=row, start=start, end=end,
                 kind=kinds, texts=tuple(texts))
