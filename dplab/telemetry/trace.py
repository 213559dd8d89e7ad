"""A run as a Chrome trace, which ui.perfetto.dev opens from disk: a process for each rank, a lane for each kind.

Arrows join the same collective on all ranks, so that a late rank can be seen to hold up the others. Times are
microseconds since the run's first event; the metadata anchors them to the wall clock.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dplab.errors import RunError
from dplab.telemetry.events import Event
from dplab.telemetry.reader import RunReader

LANES = {
    "step": "steps", "forward": "compute", "backward": "compute", "optimizer": "compute",
    "unshard": "gathered units", "reshard": "gathered units", "data": "data", "checkpoint": "checkpoints",
    "collective": "collectives", "log": "notes",
}
_ORDER = ("steps", "compute", "collectives", "gathered units", "data", "checkpoints", "notes", "other")
_COUNTED = 1000
"""Lanes of one kind that may overlap (collectives under way at once) take numbers `kind * _COUNTED + i`."""


def chrome_trace(events: Iterable[Event], metadata: dict[str, Any] | None = None) -> dict[str, Any]:
    """Events of any number of ranks as one trace object, ready for `json.dump`. Its steps count from 1, for people."""
    ordered = sorted(events, key=lambda event: (event.t0, -event.t1))
    start = ordered[0].t0 if ordered else 0
    lanes = _Lanes()
    rows: list[dict[str, Any]] = []
    placed: list[tuple[Event, int]] = []
    for event in ordered:
        if event.kind == "gauge":
            rows += _counters(event, start)
            continue
        lane = lanes.place(event)
        placed.append((event, lane))
        rows.append({"ph": "X", "cat": event.kind, "name": _title(event), "pid": event.rank, "tid": lane,
                     "ts": (event.t0 - start) / 1e3, "dur": (event.t1 - event.t0) / 1e3,
                     "args": {"step": event.step + 1, **event.attrs}})
    rows = lanes.names() + rows + _arrows(placed, start)
    return {"traceEvents": rows, "displayTimeUnit": "ms", "metadata": metadata or {}}


def export(source: str | os.PathLike[str], output: str | os.PathLike[str]) -> Path:
    """Writes the trace of a run's directory to a file and returns its path. RunError where nothing is recorded."""
    reader = RunReader(source)
    events = reader.poll()
    if not events:
        raise RunError(f"run {reader.path} has recorded no events, so there is nothing to trace; "
                       f"its program records some through dplab.parallelize")
    headers = {rank: reader.header(rank) or {} for rank in sorted({event.rank for event in events})}
    header = next(filter(None, headers.values()), {})      # a rank may have died before its first write
    events = _aligned(events, headers, header)
    start = min(event.t0 for event in events)
    anchor = {"run": reader.path.name, "spec": reader.spec.to_dict(), "host": header.get("host"),
              "wall_seconds_at_zero": (header["wall"] + start - header["monotonic"]) / 1e9 if header else None}
    path = Path(output)
    try:
        write(events, anchor, path)
    except OSError as error:
        raise RunError(f"the trace cannot be written to {path}: {error.strerror}; give another file") from error
    return path


def _aligned(events: list[Event], headers: dict[int, dict[str, Any]], first: dict[str, Any]) -> list[Event]:
    """Events on one clock: that of the host that the `first` header is of. The ranks of a host share one; others' are
    laid over it by the wall clock, so as well as that is kept."""
    shifts = {rank: 0 if header.get("host") == first.get("host") or not header else
              (header["wall"] - header["monotonic"]) - (first["wall"] - first["monotonic"])
              for rank, header in headers.items()}
    if not any(shifts.values()):
        return events
    return [event._replace(t0=event.t0 + shifts[event.rank], t1=event.t1 + shifts[event.rank]) for event in events]


def write(events: Iterable[Event], metadata: dict[str, Any], output: str | os.PathLike[str]) -> None:
    """Writes the trace of any events, measured or predicted, to a file; OSError where that cannot be."""
    with open(output, "w", encoding="utf-8") as file:
        json.dump(finite(chrome_trace(events, metadata)), file, allow_nan=False)


class _Lanes:
    """Threads of the trace: events of one lane nest or follow each other, never cross."""

    def __init__(self) -> None:
        self._busy: dict[tuple[int, str], list[list[int]]] = defaultdict(list)
        self._used: dict[tuple[int, int], str] = {}

    def place(self, event: Event) -> int:
        """Lane number for the next event, by start time: the first where it nests into what is open there."""
        kind = LANES.get(event.kind, "other")
        lanes = self._busy[event.rank, kind]
        for ends in lanes:
            while ends and ends[-1] <= event.t0:
                ends.pop()
        index = next((index for index, ends in enumerate(lanes)
                      if not ends or (event.t1 <= ends[-1] and kind != "collectives")), len(lanes))
        if index == len(lanes):
            lanes.append([])
        lanes[index].append(event.t1)
        number = _ORDER.index(kind) * _COUNTED + index
        self._used[event.rank, number] = kind if index == 0 else f"{kind} {index + 1}"
        return number

    def names(self) -> list[dict[str, Any]]:
        """Metadata rows that name and order processes and threads."""
        rows = []
        for rank in sorted({rank for rank, _ in self._used}):
            rows += [{"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}},
                     {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}]
        for (rank, number), name in sorted(self._used.items()):
            rows += [{"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": name}},
                     {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": number,
                      "args": {"sort_index": number}}]
        return rows


def _arrows(placed: list[tuple[Event, int]], start: int) -> list[dict[str, Any]]:
    """From each collective to the same one on the other ranks: the n-th of its name, purpose, bucket and ranks in a
    step."""
    counts: dict[tuple[Any, ...], int] = defaultdict(int)
    groups: dict[tuple[Any, ...], list[tuple[Event, int]]] = defaultdict(list)
    for event, lane in placed:
        if event.kind == "collective":
            key = (event.step, event.name, event.attrs.get("purpose"), event.attrs.get("bucket"),
                   str(event.attrs.get("ranks")))
            counts[event.rank, *key] += 1
            groups[*key, counts[event.rank, *key]].append((event, lane))
    rows: list[dict[str, Any]] = []
    # an arrow goes on in time, so that from the rank that came first
    flows = [sorted(group, key=lambda item: (item[0].t0 + item[0].t1, item[0].rank)) for group in groups.values()
             if len(group) > 1]
    for number, group in enumerate(flows):
        for index, (event, lane) in enumerate(group):
            phase = "s" if index == 0 else "f" if index == len(group) - 1 else "t"
            # Bound to its slice by a moment inside it: the middle.
            rows.append({"ph": phase, "cat": "flow", "name": event.name, "id": number, "pid": event.rank, "tid": lane,
                         "ts": ((event.t0 + event.t1) / 2 - start) / 1e3, **({"bp": "e"} if phase == "f" else {})})
    return rows


def _counters(event: Event, start: int) -> list[dict[str, Any]]:
    values = {name: value for name, value in event.attrs.items()
              if isinstance(value, int | float) and not isinstance(value, bool)}
    if not values:
        return []
    return [{"ph": "C", "name": event.name, "pid": event.rank, "ts": (event.t0 - start) / 1e3, "args": values}]


def _title(event: Event) -> str:
    bucket = event.attrs.get("bucket")
    return f"{event.name} {event.attrs.get('purpose', '')}{'' if bucket is None else f' bucket {bucket}'}".rstrip() \
        if event.kind == "collective" else f"{event.kind} {event.name}" if event.kind != "log" else event.name


def finite(value: Any) -> Any:
    """The same with NaN and infinities as text: JSON has neither, and Perfetto refuses the whole file."""
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return value
