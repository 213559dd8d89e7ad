"""Loss, step time and memory as they grow: incremental folds of events into bounded columns."""

from __future__ import annotations

import numpy as np

from dplab.telemetry.events import CATEGORIES, Event
from dplab.views import theme
from dplab.views.records import Chart, Floats, Line, StackedArea, Text
from dplab.views.series import Series
from dplab.views.steps import Step
from dplab.views.words import short

SHOWN_RANKS = 16
"""Ranks that get columns and lanes of their own; more would not be told apart on a screen."""
_PENDING_STEPS = 256
_SMOOTHING = 0.9
MEDIAN_STEPS = 50
"""Steps over which medians are told: the last ones, or all where there are fewer."""
TIME_PARTS = ("compute", "exposed", "other_time")
GAUGES = ("cpu", "gpu")


def last_steps(steps: int) -> str:
    """The steps whose medians are told, in words."""
    return f"the last {MEDIAN_STEPS} steps" if steps > MEDIAN_STEPS else "all steps"


def robust_top(values: Floats) -> float:
    """Top of a scale that a few slow first steps do not flatten."""
    high, usual = float(values.max()), float(np.quantile(values, 0.95))
    return 1.15 * (1.3 * usual if high > 2 * usual > 0 else high)


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
        """Takes loss gauges and step ends; a step counts once every rank has ended it and told its loss."""
        if event.kind == "gauge" and event.name == "loss" and event.step > self.last_step:
            by_rank = self._pending.setdefault(event.step, {})
            by_rank.setdefault(event.rank, []).append(float(event.attrs["value"]))
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
            if (told and everywhere >= step) or everywhere > step or len(self._pending) > _PENDING_STEPS:
                self._append(step, self._pending.pop(step))
            else:
                break

    def _append(self, step: int, by_rank: dict[int, list[float]]) -> None:
        loss = float(np.mean([np.mean(losses) for losses in by_rank.values()]))
        if np.isfinite(loss):
            self._smooth = _SMOOTHING * self._smooth + (1 - _SMOOTHING) * loss
            self._weight = _SMOOTHING * self._weight + (1 - _SMOOTHING)
        self.series.append(step, loss, self._smooth / self._weight if self._weight else np.nan)
        self.first = loss if self.first is None else self.first
        self.last, self.last_step = loss, step

    def chart(self) -> Chart:
        """Loss over steps."""
        if not len(self.series):
            return Chart(key="loss", title="Loss", x_label="step", y_label="nats",
                         marks=(Text(text="no loss yet: it appears after the first step"),))
        steps, losses = self.series["step"].copy(), self.series["loss"].copy()
        finite = losses[np.isfinite(losses)]
        low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
        room = 0.06 * ((high - low) or 1.0)
        return Chart(
            key="loss", title="Loss", x_label="step", y_label="nats", value=short(self.last, 4),
            legend=tuple((role, theme.label(role)) for role in ("loss", "loss_smooth")),
            marks=(Line(role="loss", x=steps, y=losses, faint=True),
                   Line(role="loss_smooth", x=steps, y=self.series["smooth"].copy())),
            x_range=(float(steps[0]), float(steps[-1])), y_range=(low - room, high + room),
            note=f"{self.first:.3f} at step {steps[0]:.0f}, {self.last:.3f} at step {self.last_step}")


class StepPanel:
    """Time of each step on each rank: compute, exposed synchronisation, other (ms)."""

    def __init__(self) -> None:
        self.series: dict[int, Series] = {}

    def feed(self, step: Step) -> None:
        """Takes a finished step."""
        if step.rank >= SHOWN_RANKS:
            return
        if step.rank not in self.series:
            self.series[step.rank] = Series("step", *TIME_PARTS, "total", peak="total")
        parts = [ns / 1e6 for ns in step.split_ns()]
        self.series[step.rank].append(step.index, *parts, sum(parts))

    def medians(self, last: int = MEDIAN_STEPS, *, rank: int | None = None) -> dict[str, float] | None:
        """Median ms of each part over the last steps of all ranks, or of one; None before the first step."""
        chosen = self.series.values() if rank is None else [self.series[rank]] if rank in self.series else []
        if not chosen:
            return None
        recent = np.concatenate([series.rows(max(0, len(series) - last)) for series in chosen])
        columns = ("step", *TIME_PARTS, "total")
        return {name: float(value) for name, value in zip(columns, np.median(recent, axis=0), strict=True)
                if name != "step"}

    def chart(self, rank: int = 0) -> Chart:
        """One rank's step times, stacked; a step lasts until the next one's number."""
        title, median = f"Step time, rank {rank}", self.medians(rank=rank)
        if median is None:
            return Chart(key="steps", title=title, x_label="step", y_label="ms", rank=rank,
                         marks=(Text(text=f"no finished step on rank {rank} yet"),))
        series, over = self.series[rank], last_steps(len(self.series[rank]))
        legend = tuple((part, f"{theme.label(part)} {short(median[part])}") for part in TIME_PARTS)
        return Chart(
            key="steps", title=title, x_label="step", y_label="ms", rank=rank,
            value=f"{short(median['total'])} ms", legend=legend, caption=f"numbers: medians of {over}",
            marks=(StackedArea(roles=TIME_PARTS, x=series["step"].copy(),
                               ys=np.stack([series[part] for part in TIME_PARTS])),),
            x_range=(float(series["step"][0]), float(series["step"][-1]) + 1),
            y_range=(0.0, robust_top(series["total"])),
            note=f"median {short(median['total'])} ms: {', '.join(text for _, text in legend)} ({over})")


class MemoryPanel:
    """Memory by category over time (MB), the whole process beside it, and utilization (percent)."""

    def __init__(self) -> None:
        self.series: dict[int, Series] = {}
        self.utilization: dict[int, Series] = {}
        self.peak: dict[int, float] = {}
        """largest sum of the categories, bytes, by rank"""
        self._process: dict[int, float] = {}
        self._start: int | None = None

    def feed(self, event: Event) -> None:
        """Takes memory, process and utilization gauges; time starts at the first event of any kind."""
        self._start = event.t0 if self._start is None else self._start
        if event.kind != "gauge" or not 0 <= event.rank < SHOWN_RANKS:
            return
        seconds = (event.t0 - self._start) / 1e9
        if event.name == "memory":
            self._feed_memory(event, seconds)
        elif event.name == "process":
            self._process[event.rank] = max(event.attrs.get("private", 0), self._process.get(event.rank, 0))
        elif event.name == "utilization" and any(name in event.attrs for name in GAUGES):
            if event.rank not in self.utilization:
                self.utilization[event.rank] = Series("seconds", *GAUGES, peak="cpu", capacity=512)
            values = [event.attrs.get(name, np.nan) for name in GAUGES]
            self.utilization[event.rank].append(seconds, *values)

    def _feed_memory(self, event: Event, seconds: float) -> None:
        if event.rank not in self.series:
            self.series[event.rank] = Series("seconds", *CATEGORIES, "process", "total", peak="total", capacity=512)
        parts = [event.attrs.get(name, 0) / 1e6 for name in CATEGORIES]
        process = event.attrs.get("process", self._process.get(event.rank, np.nan)) / 1e6
        self.series[event.rank].append(seconds, *parts, process, sum(parts))
        self.peak[event.rank] = max(self.peak.get(event.rank, 0.0), sum(parts) * 1e6)

    def latest(self, rank: int = 0) -> dict[str, float]:
        """MB by category (those that are not empty), `process` and `total`, newest; empty before the first gauge."""
        if rank not in self.series:
            return {}
        series = self.series[rank]
        return {name: float(series[name][-1]) for name in series.columns[1:] if series[name][-1] > 0}

    def chart(self, rank: int = 0) -> Chart:
        """One rank's memory by category, stacked; a gauge holds until the next."""
        if rank not in self.series:
            return Chart(key="memory", title=f"Memory, rank {rank}", x_label="s", y_label="MB", rank=rank,
                         marks=(Text(text=f"no memory gauge of rank {rank} yet"),))
        series = self.series[rank]
        ys = np.stack([series[name] for name in CATEGORIES])
        used = [part for part in range(len(CATEGORIES)) if ys[part].any()]
        roles = tuple(CATEGORIES[part] for part in used)
        total, process = float(series["total"][-1]), float(series["process"][-1])
        legend = tuple((role, f"{theme.label(role)} {short(series[role][-1])}") for role in roles)
        value = f"{short(total)} MB in tensors"
        if np.isfinite(process):
            value += f", process peak {short(process)} MB"
        return Chart(
            key="memory", title=f"Memory, rank {rank}", x_label="s", y_label="MB", rank=rank, value=value,
            marks=(StackedArea(roles=roles, x=series["seconds"].copy(), ys=ys[used]),), legend=legend,
            x_range=self._time(rank), y_range=(0.0, 1.1 * float(series["total"].max())),
            note=f"{value}: {', '.join(text for _, text in legend)}" if legend else value)

    def _time(self, rank: int) -> tuple[float, float]:
        """Memory and utilization stand below each other: one axis."""
        both = [held[rank] for held in (self.series, self.utilization) if rank in held]
        # what came before the first gauge (imports, building the model) would only be a blank
        return (min(float(series["seconds"][0]) for series in both),
                max(float(series["seconds"][-1]) for series in both))

    def utilization_chart(self, rank: int = 0) -> Chart:
        """One rank's use of its core and its GPU."""
        if rank not in self.utilization:
            return Chart(key="utilization", title=f"Utilization, rank {rank}", x_label="s", y_label="%", rank=rank,
                         marks=(Text(text=f"utilization of rank {rank} is not measured yet"),))
        series = self.utilization[rank]
        measured = [name for name in GAUGES if not np.isnan(series[name]).all()]
        highest = max((float(np.nanmax(series[name])) for name in measured), default=100.0)
        said = {name: f"{series[name][-1]:.0f} %" if name in measured else "not measurable here" for name in GAUGES}
        value = f"CPU core {said['cpu']}, GPU {said['gpu']}"
        return Chart(
            key="utilization", title=f"Utilization, rank {rank}", x_label="s", y_label="%", rank=rank, value=value,
            marks=tuple(Line(role=name, x=series["seconds"].copy(), y=series[name].copy()) for name in measured),
            legend=tuple((name, theme.label(name)) for name in measured), note=value,
            x_range=self._time(rank), y_range=(0.0, 1.08 * max(100.0, highest)))
