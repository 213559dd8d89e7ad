"""One rank's step, put together from its spans, and where its time went."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from dplab.telemetry.events import Event
from dplab.telemetry.thinning import DETAIL

WORK = ("forward", "backward", "optimizer")
ANATOMY = ("forward", "backward", "step_optimizer", "exposed", "data", "other_time")
"""Parts of a step, as they are stacked."""
_OPEN_LIMIT = 20_000
"""Spans kept while no step ends (a program that never steps); older ones are dropped."""

Interval = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Step:
    """A finished step of one rank: its own span and everything that happened within, in the order recorded."""

    rank: int
    index: int
    t0: int
    t1: int
    spans: list[Event]
    whole: bool = True
    """False where its spans did not stay: only when it was is known then"""

    def sync(self) -> list[Event]:
        """Collectives that carried gradients or parameters."""
        return [span for span in self.spans
                if span.kind == "collective" and span.attrs.get("purpose") in ("grads", "params")]

    def waits(self) -> list[Interval]:
        """When the rank stood still for collectives, in order and apart from each other.

        A collective blocks its caller at its end, so its exposed time is taken as the last part of its span.
        """
        return self._clip(_union((span.t1 - span.attrs.get("exposed", 0), span.t1) for span in self.spans
                                 if span.kind == "collective" and span.attrs.get("purpose") != "init"))

    def anatomy_ns(self) -> dict[str, int]:
        """ns by part, in the order of ANATOMY; they add up to the step.

        Where two happen at once the first of exposed, forward, backward, optimizer and data counts: a wait inside a
        backward is exposed synchronisation, no backward.
        """
        return dict(self._parts)

    @cached_property
    def _parts(self) -> dict[str, int]:
        taken = {"exposed": self.waits()}
        parts = {"exposed": _length(taken["exposed"])}
        covered = taken["exposed"]
        for part, kind in (("forward", "forward"), ("backward", "backward"), ("step_optimizer", "optimizer"),
                           ("data", "data")):
            before = _length(covered)
            covered = _union([*covered, *self._clip([(span.t0, span.t1) for span in self.spans if span.kind == kind])])
            parts[part] = _length(covered) - before
        parts["other_time"] = self.t1 - self.t0 - _length(covered)
        return {part: parts[part] for part in ANATOMY}

    def split_ns(self) -> tuple[int, int, int]:
        """Compute, exposed synchronisation and the rest, in ns; they add up to the step."""
        parts = self.anatomy_ns()
        compute = parts["forward"] + parts["backward"] + parts["step_optimizer"]
        return compute, parts["exposed"], parts["data"] + parts["other_time"]

    def _clip(self, intervals: list[Interval]) -> list[Interval]:
        return [(max(start, self.t0), min(end, self.t1)) for start, end in intervals
                if end > self.t0 and start < self.t1]


class StepAssembler:
    """Collects the spans of each rank until its step ends: a rank records in the order in which things end."""

    def __init__(self) -> None:
        self._open: dict[int, list[Event]] = {}

    def feed(self, event: Event) -> Step | None:
        """The step that this event ends, or None."""
        spans = self._open.setdefault(event.rank, [])
        if event.kind == "step":
            self._open[event.rank] = []
            start = event.t0
            for span in spans:      # a pause at its beginning lies between the steps
                if span.kind != "pause":
                    break
                start = min(max(start, span.t1), event.t1)
            left_out = (event.attrs.get("thin") or {}).get("spans", 0)
            whole = not left_out or sum(span.kind in DETAIL for span in spans) >= left_out
            inside = [span for span in spans if span.t1 > start or span.kind == "pause"]
            return Step(event.rank, event.step, start, event.t1, inside, whole)
        if event.t1 > event.t0:
            spans.append(event)
            if len(spans) > _OPEN_LIMIT:
                del spans[: _OPEN_LIMIT // 2]
        return None


def without(interval: Interval, holes: list[Interval]) -> list[Interval]:
    """What is left of an interval outside of holes that are in order."""
    start, end = interval
    left = []
    for begin, over in holes:
        if begin < end and over > start:
            left.append((start, begin))
            start = max(start, over)
    return [(a, b) for a, b in [*left, (start, end)] if b > a]


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _length(intervals: list[Interval]) -> int:
    return sum(end - start for start, end in intervals)
