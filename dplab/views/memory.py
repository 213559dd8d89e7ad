"""Memory by category over time, its limit and its peak: an incremental fold into bounded columns."""

from __future__ import annotations

import numpy as np

from dplab.telemetry.events import CATEGORIES, Event
from dplab.views import theme
from dplab.views.panels import SHOWN_RANKS
from dplab.views.records import Chart, Line, StackedArea, Text
from dplab.views.series import Series
from dplab.views.words import short, size

_NEAR = 0.4
"""Share of the limit from which on the scale reaches up to it; below, the line would flatten everything else."""


class MemoryPanel:
    """Memory by category over time (MB), and the whole process beside it."""

    def __init__(self) -> None:
        self.series: dict[int, Series] = {}
        self.peak: dict[int, float] = {}
        """largest sum of the categories, bytes, by rank"""
        self.limit: dict[int, tuple[float, str]] = {}
        """bytes that there are, and whose they are, by rank"""
        self._peak_at: dict[int, float] = {}
        self._process: dict[int, float] = {}
        self._start: int | None = None

    def feed(self, event: Event) -> None:
        """Takes memory, process and layout gauges; time starts at the first event of any kind."""
        self._start = event.t0 if self._start is None else self._start
        if event.kind != "gauge" or not 0 <= event.rank < SHOWN_RANKS:
            return
        if event.name == "memory":
            self._feed_memory(event, (event.t0 - self._start) / 1e9)
        elif event.name == "process":
            self._process[event.rank] = max(event.attrs.get("private", 0), self._process.get(event.rank, 0))
        elif event.name == "layout" and event.attrs.get("limit"):
            self.limit[event.rank] = float(event.attrs["limit"]), str(event.attrs.get("limit_of", "limit"))

    def _feed_memory(self, event: Event, seconds: float) -> None:
        rank = event.rank
        if rank not in self.series:
            self.series[rank] = Series("seconds", *CATEGORIES, "process", "reserved", "total", peak="total",
                                       capacity=512)
        parts = [event.attrs.get(name, 0) / 1e6 for name in CATEGORIES]
        process = event.attrs.get("process", self._process.get(rank, np.nan)) / 1e6
        self.series[rank].append(seconds, *parts, process, event.attrs.get("reserved", np.nan) / 1e6, sum(parts))
        if sum(parts) * 1e6 > self.peak.get(rank, -1.0):
            self.peak[rank], self._peak_at[rank] = sum(parts) * 1e6, seconds

    def latest(self, rank: int = 0) -> dict[str, float]:
        """MB by category (those that are not empty), `process` and `total`, newest; empty before the first gauge."""
        if rank not in self.series:
            return {}
        series = self.series[rank]
        return {name: float(series[name][-1]) for name in series.columns[1:] if series[name][-1] > 0}

    @property
    def cuda(self) -> bool:
        """Whether the run's memory is CUDA's, by what its gauges tell."""
        return any(np.isfinite(series["reserved"]).any() for series in self.series.values())

    def time(self, rank: int) -> tuple[float, float] | None:
        """Seconds of the first and the last gauge; None before the first."""
        if rank not in self.series:
            return None
        seconds = self.series[rank]["seconds"]
        # what came before the first gauge (imports, building the model) would only be a blank
        return float(seconds[0]), float(seconds[-1])

    def chart(self, rank: int = 0, x_range: tuple[float, float] | None = None) -> Chart:
        """One rank's memory by category, stacked; a gauge holds until the next."""
        if rank not in self.series:
            return Chart(key="memory", title=f"Memory, rank {rank}", x_label="s", y_label="MB", rank=rank,
                         marks=(Text(text=f"no memory gauge of rank {rank} yet"),))
        series = self.series[rank]
        ys = np.stack([series[name] for name in CATEGORIES])
        used = [part for part in range(len(CATEGORIES)) if ys[part].any()]
        roles = tuple(CATEGORIES[part] for part in used)
        span = x_range or self.time(rank) or (0.0, 1.0)
        lines, caption, top = self._lines(rank, span)
        value = self._value(rank)
        legend = tuple((role, f"{theme.label(role)} {short(series[role][-1])}") for role in roles)
        legend += tuple((line.role, theme.label(line.role)) for line in lines if line.role != "peak")
        return Chart(
            key="memory", title=f"Memory, rank {rank}", x_label="s", y_label="MB", rank=rank, value=value,
            marks=(StackedArea(roles=roles, x=series["seconds"].copy(), ys=ys[used]), *lines), legend=legend,
            x_range=span, y_range=(0.0, 1.1 * top), caption=caption,
            note=f"{value}: {', '.join(text for _, text in legend)}; {caption}")

    def _value(self, rank: int) -> str:
        series = self.series[rank]
        value = f"{short(series['total'][-1])} MB in tensors"
        process, reserved, total = series["process"][-1], series["reserved"][-1], series["total"][-1]
        if np.isfinite(reserved) and reserved > 0:
            value += f", {max(0.0, 1 - total / reserved):.0%} of what is reserved in fragments"
        elif np.isfinite(process):
            value += f", process peak {short(process)} MB"
        return value

    def _lines(self, rank: int, span: tuple[float, float]) -> tuple[list[Line], str, float]:
        """Reserved memory, the limit and the peak as lines, what is said of the limit, and the top of the scale."""
        series, peak = self.series[rank], self.peak[rank] / 1e6
        top, lines = float(series["total"].max()), []
        if np.isfinite(series["reserved"]).any():
            lines.append(Line(role="reserved", x=series["seconds"].copy(), y=series["reserved"].copy()))
            top = max(top, float(np.nanmax(series["reserved"])))
        lines.append(Line(role="peak", x=np.array([self._peak_at[rank]]), y=np.array([peak])))
        caption = f"dot: peak of {short(peak)} MB"
        if rank in self.limit:
            limit, whose = self.limit[rank]
            caption += f"; limit {size(limit)} ({whose})"
            if top >= _NEAR * limit / 1e6:
                top = limit / 1e6
                lines.append(Line(role="limit", x=np.array(span), y=np.full(2, top)))
            else:
                caption += ", off the scale"
        return lines, caption, top
