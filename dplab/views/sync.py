"""The gradient-synchronisation timeline: what every rank computed, and what was on the wire meanwhile."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from dplab.telemetry.events import Event
from dplab.telemetry.pace import ranks_left
from dplab.telemetry.steps import WORK, Step, without
from dplab.views import theme
from dplab.views.panels import SHOWN_RANKS
from dplab.views.records import Chart, Lanes, Text
from dplab.views.words import percent

KEPT_STEPS = 32
"""Steps of a rank that wait for the other ranks' files to be read."""
WIRE_ROWS = 2
"""Fixed, so that the picture keeps its shape from step to step; what needs more overlaps."""
ROLES = ("forward", "backward", "step_optimizer", "waiting", "reduce", "gather", "exposed")
_WORK_ROLE = {"forward": "forward", "backward": "backward", "optimizer": "step_optimizer"}
DEFINITION = "overlap = 1 - exposed / total: the share of the wire's time in which the ranks went on computing"
_SHORT = {"reduce": "grads", "gather": "params", "exposed": "exposed"}
LEGEND = tuple((role, _SHORT.get(role) or theme.label(role)) for role in ROLES)
"""Always whole, so that the picture below it does not jump from step to step; in one line of a still picture."""


@dataclass
class _Bars:
    """Bars under construction: one tuple (lane, row, start, end, kind) each, in ms from the step's start."""

    origin: int
    bars: list[tuple[float, ...]]
    texts: list[str]

    def add(self, place: tuple[int, int], t0: int, t1: int, role: str, text: str) -> None:
        self.bars.append((*place, (t0 - self.origin) / 1e6, (t1 - self.origin) / 1e6, ROLES.index(role)))
        self.texts.append(f"{text}: {(t1 - t0) / 1e6:.2f} ms")


class SyncPanel:
    """The newest step that every rank has finished: a lane of work and a lane of buckets a rank."""

    def __init__(self, world_size: int) -> None:
        self._ranks = range(min(world_size, SHOWN_RANKS))
        self._steps: dict[int, deque[Step]] = {rank: deque(maxlen=KEPT_STEPS) for rank in self._ranks}
        self._newest: list[Step] | None = []
        """the newest complete step, rank by rank; None: to be looked for"""

    def feed(self, step: Step) -> None:
        """Takes a finished step."""
        if step.rank in self._steps:
            self._steps[step.rank].append(step)
            self._newest = None

    def restart(self, event: Event) -> None:
        """Takes a restart, behind which there may be fewer ranks."""
        ranks = min(ranks_left(event, len(self._ranks)), SHOWN_RANKS)
        if ranks != len(self._ranks):
            self._ranks = range(ranks)
            self._steps = {rank: deque(maxlen=KEPT_STEPS) for rank in self._ranks}
            self._newest = None

    @property
    def step(self) -> int | None:
        """Index of the newest step that all (shown) ranks have finished."""
        return self._latest()[0].index if self._latest() else None

    def overlap(self) -> float | None:
        """1 - exposed / total over the collectives of the newest complete step; None where nothing was sent."""
        spans = [span for step in self._latest() for span in step.sync()]
        total = sum(span.t1 - span.t0 for span in spans)
        exposed = sum(min(span.attrs.get("exposed", 0), span.t1 - span.t0) for span in spans)
        return 1 - exposed / total if total else None

    def chart(self) -> Chart:
        """Lanes of the newest complete step."""
        steps = self._latest()
        if not steps:
            return Chart(key="sync", title="Gradient synchronisation", x_label="ms", y_label="",
                         marks=(Text(text="no step is complete on every rank yet"),))
        overlap, mark = self.overlap(), lanes(steps)
        value = "nothing was sent" if overlap is None else f"overlap {percent(overlap)}"
        return Chart(
            key="sync", title=f"Gradient synchronisation, step {steps[0].index + 1}", x_label="ms", y_label="",
            marks=(mark,), value=value, legend=LEGEND, caption=DEFINITION,
            x_range=(0.0, float(mark.end.max(initial=0.0)) or 1.0),
            note=value if overlap is None else f"{value}; {DEFINITION}")

    def _latest(self) -> list[Step]:
        if self._newest is None:
            common = set.intersection(*({step.index for step in steps} for steps in self._steps.values()))
            newest = max(common, default=None)
            found = {step.rank: step for steps in self._steps.values() for step in steps if step.index == newest}
            self._newest = list(found.values())
        return self._newest


def lanes(steps: list[Step]) -> Lanes:
    """Lanes of one step of several ranks, in ms from the earliest start."""
    bars = _Bars(min(step.t0 for step in steps), [], [])
    names: list[str] = []
    rows: list[int] = []
    for step in steps:
        names += [f"rank {step.rank}", "wire"]
        _add_work(bars, len(rows), step)
        _add_wire(bars, len(rows) + 1, step)
        rows += [1, WIRE_ROWS]
    columns = np.array(bars.bars, dtype=np.float64).reshape(-1, 5).T
    return Lanes(names=tuple(names), rows=tuple(rows), roles=ROLES, lane=columns[0], row=columns[1],
                 start=columns[2], end=columns[3], kind=columns[4], texts=tuple(bars.texts))


def _add_work(bars: _Bars, lane: int, step: Step) -> None:
    """Adds what the rank computed, and where it stood still for the wire instead."""
    waits = step.waits()
    for span in step.spans:
        if span.kind in WORK:
            for start, end in without((max(span.t0, step.t0), min(span.t1, step.t1)), waits):
                bars.add((lane, 0), start, end, _WORK_ROLE[span.kind], f"rank {step.rank}, {span.kind}")
    for start, end in waits:
        bars.add((lane, 0), start, end, "waiting", f"rank {step.rank}, waiting for the wire")


def _add_wire(bars: _Bars, lane: int, step: Step) -> None:
    """Adds a step's collectives, each in the row that is free first; the shorter of two that begin together on top."""
    free = [0] * WIRE_ROWS
    for span in sorted(step.sync(), key=lambda span: (_begin(span), -span.t1)):
        begin = max(_begin(span), step.t0)
        row = next((row for row, end in enumerate(free) if end <= begin), free.index(min(free)))
        free[row] = max(free[row], span.t1)
        bucket = span.attrs.get("bucket")
        what = f"rank {step.rank}, {span.name}" + (f", bucket {bucket}" if bucket is not None else "")
        issued, end = max(span.t0, step.t0), min(span.t1, step.t1)
        if begin < issued:
            bars.add((lane, row), begin, issued, "waiting", f"{what}, filled but not sent")
        bars.add((lane, row), issued, end, "reduce" if span.attrs["purpose"] == "grads" else "gather", what)
        exposed = min(span.attrs.get("exposed", 0), end - issued)
        if exposed > 0:
            bars.add((lane, row), end - exposed, end, "exposed", f"{what}, exposed")


def _begin(span: Event) -> int:
    return int(span.attrs.get("filled") or span.t0)
