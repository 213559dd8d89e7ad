"""How busy a rank's core and GPU are over time, and what else of the GPU is measured."""

from __future__ import annotations

import numpy as np

from dplab.telemetry.events import Event
from dplab.views import theme
from dplab.views.panels import SHOWN_RANKS
from dplab.views.records import Chart, Line, Text
from dplab.views.series import Series
from dplab.views.words import short, size

GAUGES = ("cpu", "gpu")
_TRAFFIC = {"pcie": ("pcie_sent", "pcie_received"), "NVLink": ("nvlink_sent", "nvlink_received")}


class UtilizationPanel:
    """Percent of a core and of a GPU; of the GPU its memory, power and traffic in words."""

    def __init__(self) -> None:
        self.series: dict[int, Series] = {}
        self._newest: dict[int, dict[str, float]] = {}
        self._start: int | None = None

    def feed(self, event: Event) -> None:
        """Takes utilization gauges; time starts at the first event of any kind."""
        self._start = event.t0 if self._start is None else self._start
        if event.kind != "gauge" or event.name != "utilization" or not 0 <= event.rank < SHOWN_RANKS:
            return
        self._newest[event.rank] = {**self._newest.get(event.rank, {}), **event.attrs}
        if any(name in event.attrs for name in GAUGES):
            if event.rank not in self.series:
                self.series[event.rank] = Series("seconds", *GAUGES, peak="cpu", capacity=512)
            values = [event.attrs.get(name, np.nan) for name in GAUGES]
            self.series[event.rank].append((event.t0 - self._start) / 1e9, *values)

    def time(self, rank: int) -> tuple[float, float] | None:
        """Seconds of the first and the last gauge; None before the first."""
        if rank not in self.series:
            return None
        return float(self.series[rank]["seconds"][0]), float(self.series[rank]["seconds"][-1])

    def chart(self, rank: int = 0, x_range: tuple[float, float] | None = None) -> Chart:
        """One rank's use of its core and its GPU."""
        if rank not in self.series:
            return Chart(key="utilization", title=f"Utilization, rank {rank}", x_label="s", y_label="%", rank=rank,
                         marks=(Text(text=f"utilization of rank {rank} is not measured yet"),))
        series = self.series[rank]
        measured = [name for name in GAUGES if not np.isnan(series[name]).all()]
        highest = max((float(np.nanmax(series[name])) for name in measured), default=100.0)
        said = {name: f"{series[name][-1]:.0f} %" if name in measured else "not measurable here" for name in GAUGES}
        value = f"CPU core {said['cpu']}, GPU {said['gpu']}{self._more(rank)}"
        return Chart(
            key="utilization", title=f"Utilization, rank {rank}", x_label="s", y_label="%", rank=rank, value=value,
            marks=tuple(Line(role=name, x=series["seconds"].copy(), y=series[name].copy()) for name in measured),
            legend=tuple((name, theme.label(name)) for name in measured), note=value,
            x_range=x_range or self.time(rank), y_range=(0.0, 1.08 * max(100.0, highest)))

    def _more(self, rank: int) -> str:
        newest = self._newest[rank]
        parts = []
        if "power" in newest:
            parts.append(f"{newest['power']:.0f} W")
        if "gpu_memory" in newest:
            parts.append(size(newest["gpu_memory"]))
        for link, names in _TRAFFIC.items():
            if all(name in newest for name in names):
                rates = [short(newest[name] / 1e9) for name in names]
                parts.append(f"{link.replace('pcie', 'PCIe')} {rates[0]} GB/s out, {rates[1]} in")
        return "".join(f", {part}" for part in parts)
