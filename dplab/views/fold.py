"""Everything the board shows, folded from the events of a run: live, replayed and re-attached alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dplab.errors import UsageError
from dplab.telemetry.events import Event
from dplab.telemetry.pace import Pace
from dplab.telemetry.steps import StepAssembler
from dplab.views.findings import FindingsPanel
from dplab.views.logs import LogPanel
from dplab.views.memory import MemoryPanel
from dplab.views.ownership import OwnershipPanel
from dplab.views.panels import LossPanel, StepPanel
from dplab.views.records import Chart
from dplab.views.sync import DEFINITION, SyncPanel
from dplab.views.throughput import ThroughputPanel
from dplab.views.usage import UtilizationPanel
from dplab.views.wire import WirePanel
from dplab.views.words import short

Cells = tuple[tuple[str, ...], ...]
GRID: Cells = (
    ("loss", "throughput"), ("steps", "anatomy"), ("sync", "wire"), ("memory", "utilization"), ("ownership",),
    ("logs",), ("findings",))
"""Panels by their cell on a board of two columns; the last is as wide as both."""


def chosen(panels: Sequence[str] | None) -> Cells:
    """Cells of a board of these panels, a cell each; None: of all, as GRID has them. UsageError for a name that none
    has."""
    if panels is None:
        return GRID
    known = [key for keys in GRID for key in keys]
    if not isinstance(panels, list | tuple) or not panels or not all(key in known for key in panels):
        raise UsageError(f"panels={panels!r} is not allowed; give some of {', '.join(known)} in a list")
    return tuple((key,) for key in dict.fromkeys(panels))


@dataclass(frozen=True, kw_only=True)
class Status:
    """The board's first line: `steps` that every rank has finished, `tokens_per_s` of all ranks over the whole run
    (`unit` says of what), both as the command line counts them; `overlap` a share of 1."""

    steps: int | None
    loss: float | None
    step_ms: float | None
    tokens_per_s: float | None
    unit: str | None
    overlap: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    def facts(self) -> tuple[tuple[str, str], ...]:
        """Name and value of each, as the board's first line says them."""
        return (("steps", "–" if self.steps is None else str(self.steps)), ("loss", short(self.loss, 4)),
                (f"{self.unit or 'tokens'}/s", short(self.tokens_per_s)))


class Fold:
    """The panels of a run of `world_size` ranks, fed with events in the order in which each rank wrote them.

    `strategy`: the run's own, in one line; without it the wire's bytes stand without a prediction. `cores`: of the
    machine that the run is on, if known.
    """

    def __init__(self, world_size: int, strategy: str | None = None, cores: int | None = None) -> None:
        self.world_size = world_size
        self.loss = LossPanel(world_size)
        self.throughput = ThroughputPanel(world_size)
        self.steps = StepPanel()
        self.sync = SyncPanel(world_size)
        self.wire = WirePanel(world_size, strategy)
        self.memory = MemoryPanel()
        self.utilization = UtilizationPanel()
        self.ownership = OwnershipPanel()
        self.logs = LogPanel()
        self.findings = FindingsPanel(world_size, strategy, cores)
        self.earlier: Fold | None = None
        """another run, which stands beside this one where two can"""
        self.pace = Pace(world_size)
        self._assembler = StepAssembler()
        self._status: Status | None = None
        self._begun = False

    def feed(self, events: Iterable[Event]) -> None:
        """Takes events."""
        self._status = None
        for event in events:
            # time starts at the first event of any kind
            if event.kind in ("gauge", "log", "restart") or not self._begun:
                self._begun = True
                for panel in (self.memory, self.utilization, self.ownership, self.logs, self.findings, self.wire):
                    panel.feed(event)
            self.loss.feed(event)
            took = self.pace.feed(event)
            if event.kind == "restart":
                self.sync.restart(event)
            if took is not None or event.kind in ("data", "restart"):
                self.throughput.feed(event, took)
            step = self._assembler.feed(event)
            if step is not None and step.whole:
                self.steps.feed(step)
                self.findings.feed_step(step)
                self.sync.feed(step)
                self.wire.feed_step(step)

    def status(self) -> Status:
        """The newest figures."""
        if self._status is None:
            self._status = self._newest()
        return self._status

    def _newest(self) -> Status:
        median, rate = self.steps.medians(), self.pace.tokens_per_s
        return Status(steps=self.pace.steps or None, loss=self.loss.last, step_ms=median["total"] if median else None,
                      tokens_per_s=rate, unit=None if rate is None else self.pace.unit, overlap=self.sync.overlap())

    def charts(self, rank: int = 0, cells: Cells = GRID) -> list[Chart]:
        """Every panel of these cells, as `rank` has it where it is of one rank; of who holds what, the first verb."""
        shown = {chart.key: chart for chart in reversed([*self.shared_charts(), *self.rank_charts(rank)])}
        return [shown[key] for keys in cells for key in keys]

    def grid(self, rank: int = 0, cells: Cells = GRID) -> list[Chart | tuple[Chart, Chart]]:
        """The charts as they lie on a board of two columns; of two in a cell the second is small."""
        charts = iter(self.charts(rank, cells))
        return [next(charts) if len(keys) == 1 else (next(charts), next(charts)) for keys in cells]

    def shared_charts(self) -> list[Chart]:
        """Those that show all ranks."""
        earlier = self.earlier
        return [self.loss.chart(earlier.loss if earlier else None),
                self.throughput.chart(self.pace, earlier.throughput if earlier else None),
                self.steps.anatomy(earlier.steps if earlier else None),
                self.sync.chart(), *self.ownership.charts(), self.logs.chart(), self.findings.chart()]

    def rank_charts(self, rank: int) -> list[Chart]:
        """Those that show one rank; memory and utilization stand below each other: one time axis."""
        times = [time for time in (self.memory.time(rank), self.utilization.time(rank)) if time is not None]
        span = (min(low for low, _ in times), max(high for _, high in times)) if times else None
        return [self.steps.chart(rank), self.wire.chart(rank, self.earlier.wire if self.earlier else None),
                self.memory.chart(rank, span), self.utilization.chart(rank, span)]

    def summary(self, title: str = "dplab run", rank: int = 0, cells: Cells = GRID) -> str:
        """The board in words, for text displays, screen readers and diffs."""
        lines = [title]
        for chart in self.charts(rank, cells):
            note = chart.note.replace(f"; {DEFINITION}", "")
            lines.append(f"  {chart.title}: {chart.words or note}")
        status = self.status()
        if status.tokens_per_s is not None:
            lines.append(f"  {status.tokens_per_s:,.0f} {status.unit}/s over all ranks")
        return "\n".join(lines)
