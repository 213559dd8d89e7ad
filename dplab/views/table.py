"""A run as a table: a row for each step of each rank, in plain values."""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from dplab.telemetry.events import CATEGORIES, Event
from dplab.telemetry.pace import number
from dplab.telemetry.steps import ANATOMY, StepAssembler

_MS = {part: f"{part.removeprefix('step_').removesuffix('_time')}_ms" for part in ANATOMY}
COLUMNS = ("step", "rank", "loss", "step_ms", *_MS.values(), "bytes_sent", "tokens", "memory_bytes", "moved")
"""`step` counts from 1, as charts and `seek` do; `loss` is the rank's own; the parts in ms add up to `step_ms`;
`bytes_sent` for gradients and parameters; `memory_bytes` in tensors when the step ended. None (an empty cell) where
nothing was recorded, such as the parts of a step whose spans did not stay."""

Row = dict[str, Any]


def table(events: Iterable[Event]) -> list[Row]:
    """Rows of COLUMNS by step, then rank."""
    assembler = StepAssembler()
    gauges: dict[tuple[int, int], Row] = defaultdict(dict)
    rows: list[Row] = []
    for event in events:
        step = assembler.feed(event)
        if step is not None:
            left_out = (event.attrs.get("thin") or {"wire": {}})["wire"]
            sent = sum(int(number(span, "bytes") or 0) for span in step.sync()) + sum(
                nbytes for _, nbytes in left_out.values())
            parts = {_MS[part]: ns / 1e6 for part, ns in step.anatomy_ns().items()} if step.whole else {}
            rows.append({"step": step.index + 1, "rank": step.rank, "step_ms": (step.t1 - step.t0) / 1e6, **parts,
                         "bytes_sent": sent, "moved": event.attrs.get("moved")})
        elif event.kind == "gauge" and event.name == "loss":
            gauges[event.step, event.rank]["loss"] = number(event, "value")
        elif event.kind == "gauge" and event.name == "memory":
            held = sum(int(number(event, name) or 0) for name in CATEGORIES)
            gauges[event.step, event.rank]["memory_bytes"] = held
        elif event.kind == "data":
            told = gauges[event.step, event.rank]
            told["tokens"] = told.get("tokens", 0) + int(number(event, "tokens") or number(event, "samples") or 0)
    whole = [{**dict.fromkeys(COLUMNS), **row, **gauges.get((row["step"] - 1, row["rank"]), {})} for row in rows]
    return sorted(whole, key=lambda row: (row["step"], row["rank"]))


def to_csv(rows: Sequence[Row]) -> str:
    """The rows as comma-separated values with a head; times in microseconds' precision."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: round(value, 6) if isinstance(value, float) else value for name, value in row.items()}
                     for row in rows)
    return text.getvalue()
