"""What a rank sends in a step beside what theory says: one bar each, gradients and parameters apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dplab.errors import UsageError
from dplab.planner.explain import explain
from dplab.planner.sharing import per_host
from dplab.specs import DTYPE_BYTES, Placement, Strategy
from dplab.telemetry.events import Event
from dplab.telemetry.pace import ranks_left
from dplab.telemetry.steps import Step
from dplab.views.records import Chart, Lanes, Text
from dplab.views.words import short

ROLES = ("reduce", "gather", "disagree")
_PARAMETERS = "all_gather"
_TOLERANCE = 0.02
"""Share by which what is sent may differ from what is predicted before it stands in red."""


class WirePanel:
    """Bytes that each rank sent in its newest step, and those that `dplab.explain` predicts from what it holds.

    The prediction takes the run's strategy, reads the number of parameters off the memory gauge and off the layout
    which of them are trained (without one all are); models count in fp32 where the strategy casts nothing.
    """

    def __init__(self, world_size: int, strategy: str | None) -> None:
        self._world_size = world_size
        self._sent: dict[int, dict[str, int]] = {}
        self._params: dict[int, int] = {}
        self._trained = 1.0
        """share of the parameters' bytes"""
        self._told: dict[int, dict[str, float] | None] = {}
        """what theory says, by bytes of parameters"""
        try:
            self._strategy = None if strategy is None else Strategy.parse(strategy)
        except UsageError:  # of a later version: what was sent is shown all the same
            self._strategy = None

    def feed(self, event: Event) -> None:
        """Takes memory gauges, the layout of rank 0, which tells what is trained, and restarts."""
        if event.kind == "restart":
            self._world_size = ranks_left(event, self._world_size)
            self._told.clear()
        if event.kind != "gauge":
            return
        if event.name == "memory":
            self._params[event.rank] = int(event.attrs.get("params", 0))
        elif event.name == "layout" and "buckets" in event.attrs:
            self._trained = _trained(event.attrs["buckets"])
            self._told.clear()

    def feed_step(self, step: Step) -> None:
        """Takes a finished step."""
        sent = self._sent[step.rank] = {}
        for span in step.sync():
            name = str(span.attrs.get("of", span.name))
            sent[name] = sent.get(name, 0) + int(span.attrs.get("bytes", 0))

    def predicted(self, rank: int) -> dict[str, float] | None:
        """Bytes by collective that theory has this rank send in a step; None where it cannot be known."""
        held = self._params.get(rank, 0)
        if self._strategy is None or not held:
            return None
        if held not in self._told:
            self._told[held] = self._theory(self._strategy, held)
        return self._told[held]

    def _theory(self, strategy: Strategy, held: int) -> dict[str, float] | None:
        cut = strategy.sharding.params is Placement.SHARDED
        try:
            numel = held * (per_host(strategy, self._world_size) if cut else 1) // DTYPE_BYTES[
                strategy.precision.param or "fp32"]
            sent = dict(explain(strategy, round(self._trained * numel), self._world_size).bytes_sent)
        except UsageError:      # PowerSGD's depend on shapes, hybrid's on hosts that the strategy may not name
            return None
        if cut:      # what is frozen is gathered all the same
            sent[_PARAMETERS] /= self._trained
        return sent

    def disagreeing(self, rank: int) -> list[str]:
        """Collectives of this rank's newest step whose bytes are not what theory says."""
        sent, told = self._sent.get(rank, {}), self.predicted(rank)
        if told is None or self._strategy is None:
            return []
        # a unit that stays gathered after its forward is gathered once, not twice: as little as half
        least = 0.5 if self._strategy.sharding.params is Placement.SHARDED else 1.0
        return [name for name in sorted({*sent, *told})
                if not ((least if name == _PARAMETERS else 1.0) - _TOLERANCE) * told.get(name, 0) <= sent.get(name, 0)
                <= (1 + _TOLERANCE) * told.get(name, 0)]

    def chart(self, rank: int, earlier: WirePanel | None = None) -> Chart:
        """One rank's two bars, in MB; below them that of an earlier run, if one is given."""
        emulated = self._strategy is not None and self._strategy.topology is not None
        title = f"Wire, rank {rank}" + (", emulated links" if emulated else "")
        if rank not in self._sent:
            return Chart(key="wire", title=title, x_label="MB", y_label="", rank=rank,
                         marks=(Text(text=f"no finished step on rank {rank} yet"),))
        sent, told, wrong = self._sent[rank], self.predicted(rank), self.disagreeing(rank)
        bars: dict[str, Mapping[str, float]] = {"sent": sent, **({} if told is None else {"theory": told})}
        if earlier is not None and rank in earlier._sent:
            bars["earlier"] = earlier._sent[rank]
        totals = {name: sum(parts.values()) / 1e6 for name, parts in bars.items()}
        value = f"{short(totals['sent'])} MB sent in a step"
        said = f"{value}{_parts(sent)}"
        if told is not None:
            value += f", {short(totals['theory'])} predicted"
            said += f", {short(totals['theory'])} predicted{_parts(told)}"
        if wrong:
            value = f"{short(totals['sent'])} MB sent, {short(totals['theory'])} predicted: they differ"
            said += f": {' and '.join(wrong)} not as predicted"
        if not any(totals.values()):
            return Chart(key="wire", title=title, x_label="MB", y_label="", rank=rank, note="nothing is sent",
                         marks=(Text(text="nothing is sent"),))
        return Chart(key="wire", title=title, x_label="MB", y_label="", rank=rank, value=value, note=said,
                     alert=bool(wrong), marks=(_lanes(bars, wrong),), x_range=(0.0, 1.04 * max(totals.values())))


def _trained(buckets: Any) -> float:
    """Share of the parameters' bytes that is trained; all where the layout is not understood (another version's)."""
    try:
        sizes = [(bool(told["trainable"]), int(told["itemsize"]) * sum(int(numel) for _, numel in told["slots"]))
                 for told in buckets]
        return sum(size for trained, size in sizes if trained) / sum(size for _, size in sizes)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return 1.0


def _parts(sent: Mapping[str, float]) -> str:
    used = [f"{name} {short(size / 1e6)}" for name, size in sent.items() if size]
    return f" ({', '.join(used)})" if used else ""


def _lanes(bars: Mapping[str, Mapping[str, float]], wrong: Sequence[str]) -> Lanes:
    """A lane a bar: gradients, then parameters; red what was sent and not predicted so."""
    columns: list[tuple[float, ...]] = []
    texts: list[str] = []
    for index, (bar, parts) in enumerate(bars.items()):
        start = 0.0
        for name, size in sorted(parts.items(), key=lambda item: (item[0] == _PARAMETERS, item[0])):
            if size:
                role = "disagree" if bar == "sent" and name in wrong else (
                    "gather" if name == _PARAMETERS else "reduce")
                columns.append((index, 0, start, start + size / 1e6, ROLES.index(role)))
                texts.append(f"{bar}, {name}: {short(size / 1e6)} MB")
                start += size / 1e6
    lane, row, begin, end, kind = np.array(columns, dtype=np.float64).reshape(-1, 5).T
    return Lanes(names=tuple(bars), rows=(1,) * len(bars), roles=ROLES, lane=lane, row=row, start=begin, end=end,
                 kind=kind, texts=tuple(texts))
