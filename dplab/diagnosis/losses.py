"""What a run's losses tell: since when they are no numbers, and which steps were skipped on the way."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from itertools import groupby

from dplab.telemetry.events import Event
from dplab.telemetry.numerics import NOT_FINITE
from dplab.telemetry.pace import number, ranks_left


@dataclass
class RankLosses:
    """Of one rank, the newest as they are now. Steps are indices, from 0."""

    step: int = -1
    first: tuple[int, float] | None = None
    """step and value of the first loss that was a number"""
    last: tuple[int, float] | None = None
    """step and value of the newest one that was"""
    since: int | None = None
    """step from which on none was; None where the newest is one"""
    what: str = ""
    """of the loss of that step: `NaN` or `infinite`"""


@dataclass
class Losses:
    """Folds the gauges of the loss and of overflows, and what a Lens logs. `newest`: steps over which skipped ones are
    counted."""

    newest: int
    ranks: dict[int, RankLosses] = field(default_factory=dict)
    broken: Event | None = None
    """the log of the first gradient that was not finite, where a Lens watches"""
    scale: float | None = None
    """the loss scale as it is now"""

    def __post_init__(self) -> None:
        self._skipped: deque[bool] = deque(maxlen=self.newest)

    @property
    def counted(self) -> int:
        """Steps of which it is known whether they were skipped."""
        return len(self._skipped)

    @property
    def skipped(self) -> int:
        """Those of them that were, by every rank."""
        return sum(self._skipped)

    @property
    def in_a_row(self) -> int:
        """The most of them that came one after the other."""
        return max((len(list(steps)) for skipped, steps in groupby(self._skipped) if skipped), default=0)

    def feed(self, event: Event) -> None:
        """Takes gauges, logs and restarts, and leaves everything else."""
        if event.kind == "log" and event.name == NOT_FINITE:
            if self.broken is None or (event.step, event.t0) < (self.broken.step, self.broken.t0):
                self.broken = event
        elif event.kind == "restart":
            self._go_on_from(event)
        elif event.kind == "gauge":
            value = number(event, "value")
            if value is None:
                return
            if event.name == "loss":
                self._take(event.rank, event.step, float(value))
            elif event.rank == 0 and event.name == "overflow":      # the ranks skip a step together
                self._skipped.append(bool(value))
            elif event.rank == 0 and event.name == "loss_scale":
                self.scale = float(value)

    def _take(self, rank: int, step: int, value: float) -> None:
        told = self.ranks.setdefault(rank, RankLosses())
        told.step = step
        if math.isfinite(value):
            told.first, told.last, told.since = told.first or (step, value), (step, value), None
        elif told.since is None:
            told.since, told.what = step, "NaN" if math.isnan(value) else "infinite"

    def _go_on_from(self, restart: Event) -> None:
        """Steps that are trained again are void as they were, and so are ranks that are gone."""
        size, again = ranks_left(restart), restart.step
        self.ranks = {rank: told for rank, told in self.ranks.items() if rank < size}
        for told in self.ranks.values():
            told.first, told.last = (None if loss is None or loss[0] >= again else loss
                                     for loss in (told.first, told.last))
            told.since = None if told.since is None or told.since >= again else told.since
        self._skipped.clear()
        if self.broken is not None and self.broken.step >= again:
            self.broken = None
