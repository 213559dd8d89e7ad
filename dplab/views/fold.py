"""Everything the board shows, folded from the events of a run: live, replayed and re-attached alike."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from dplab.telemetry.events import Event
from dplab.views.panels import LossPanel, MemoryPanel, StepPanel
from dplab.views.records import Chart
from dplab.views.steps import StepAssembler
from dplab.views.sync import DEFINITION, SyncPanel
from dplab.views.wire import WirePanel
from dplab.views.words import short

_RATE_WINDOW_NS = 5_000_000_000


@dataclass(frozen=True, kw_only=True)
class Status:
    """The board's first line. `tokens_per_s` is of all ranks over the last 5 s, `overlap` a share of 1."""

    step: int | None
    loss: float | None
    step_ms: float | None
    tokens_per_s: float | None
    overlap: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    def facts(self) -> tuple[tuple[str, str], ...]:
        """Name and value of each, as the board's first line says them."""
        return (("step", "–" if self.step is None else str(self.step)), ("loss", short(self.loss, 4)),
                ("tokens/s", short(self.tokens_per_s)))


class Fold:
    """The panels of a run of `world_size` ranks, fed with events in the order in which each rank wrote them.

    `strategy`: the run's own, in one line; without it the wire's bytes stand without a prediction.
    """

    def __init__(self, world_size: int, strategy: str | None = None) -> None:
        self.world_size = world_size
        self.loss = LossPanel(world_size)
        self.steps = StepPanel()
        self.sync = SyncPanel(world_size)
        self.wire = WirePanel(world_size, strategy)
        self.memory = MemoryPanel()
        self._assembler = StepAssembler()
        self._tokens: deque[tuple[int, int]] = deque()

    def feed(self, events: Iterable[Event]) -> None:
        """Takes events."""
        for event in events:
            self.memory.feed(event)
            self.wire.feed(event)
            self.loss.feed(event)
            if event.kind == "data":
                self._feed_tokens(event)
            step = self._assembler.feed(event)
            if step is not None:
                self.steps.feed(step)
                self.sync.feed(step)
                self.wire.feed_step(step)

    def _feed_tokens(self, event: Event) -> None:
        self._tokens.append((event.t1, int(event.attrs.get("tokens", 0))))
        newest = max(self._tokens[-1][0], self._tokens[0][0])
        while self._tokens[0][0] < newest - _RATE_WINDOW_NS:
            self._tokens.popleft()

    def tokens_per_s(self) -> float | None:
        """Tokens of all ranks per second over the last five seconds; None before there are two batches."""
        if len(self._tokens) < 2:
            return None
        times = [time for time, _ in self._tokens]
        span = max(times) - min(times)
        # the earliest batch opens the interval, its tokens were worked on before it
        return (sum(tokens for _, tokens in self._tokens) - self._tokens[0][1]) * 1e9 / span if span else None

    def status(self) -> Status:
        """The newest figures."""
        median = self.steps.medians()
        return Status(step=self.sync.step, loss=self.loss.last, step_ms=median["total"] if median else None,
                      tokens_per_s=self.tokens_per_s(), overlap=self.sync.overlap())

    def charts(self, rank: int = 0) -> list[Chart]:
        """Loss, step time, synchronisation, wire, memory, utilization."""
        loss, sync = self.shared_charts()
        steps, wire, memory, utilization = self.rank_charts(rank)
        return [loss, steps, sync, wire, memory, utilization]

    def grid(self, rank: int = 0) -> list[Chart | tuple[Chart, Chart]]:
        """The charts as they lie on a board of two columns; of two in a cell the second is small."""
        loss, steps, sync, wire, memory, utilization = self.charts(rank)
        return [loss, steps, (sync, wire), (memory, utilization)]

    def shared_charts(self) -> list[Chart]:
        """Those that show all ranks: loss, synchronisation."""
        return [self.loss.chart(), self.sync.chart()]

    def rank_charts(self, rank: int) -> list[Chart]:
        """Those that show one rank: step time, wire, memory, utilization."""
        return [self.steps.chart(rank), self.wire.chart(rank), self.memory.chart(rank),
                self.memory.utilization_chart(rank)]

    def summary(self, title: str = "dplab run", rank: int = 0) -> str:
        """The board in words, for text displays, screen readers and diffs."""
        lines = [title]
        for chart in self.charts(rank):
            note = chart.note.replace(f"; {DEFINITION}", "")
            lines.append(f"  {chart.title}: {chart.words or note}")
        status = self.status()
        if status.tokens_per_s is not None:
            lines.append(f"  {status.tokens_per_s:,.0f} tokens/s over all ranks")
        return "\n".join(lines)
