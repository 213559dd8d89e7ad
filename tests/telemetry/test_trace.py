"""The trace that Perfetto opens: lanes that nest, arrows that join, clocks that agree."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dplab.errors import RunError
from dplab.specs import RunSpec
from dplab.telemetry.event_file import EventFile
from dplab.telemetry.events import Event
from dplab.telemetry.rundir import RunDirectory
from dplab.telemetry.trace import chrome_trace, export


def collective(rank: int, t0: int, t1: int, *, bucket: int = 0, step: int = 0, **more: Any) -> Event:
    return Event("collective", "all_reduce", rank, step, t0, t1, {
        "purpose": "grads", "bucket": bucket, "bytes": 8, **more})


RUN = [
    Event("step", "train", 0, 0, 1_000, 9_000, {}), Event("forward", "GPT", 0, 0, 1_000, 4_000, {}),
    Event("forward", "Block", 0, 0, 2_000, 3_000, {}), Event("backward", "GPT", 0, 0, 4_000, 8_000, {}),
    collective(0, 5_000, 7_000, bucket=0), collective(0, 6_000, 8_000, bucket=1),
    Event("step", "train", 1, 0, 1_500, 9_500, {}),
    collective(1, 5_500, 7_500, bucket=0), collective(1, 6_500, 8_500, bucket=1),
    Event("gauge", "loss", 0, 0, 9_000, 9_000, {"value": 2.5, "note": "text"}),
    Event("gauge", "note", 0, 0, 9_000, 9_000, {"text": "no number"}),
]


def rows(phase: str, events: list[Event] = RUN) -> list[dict[str, Any]]:
    return [row for row in chrome_trace(events)["traceEvents"] if row["ph"] == phase]


def test_a_process_a_rank_and_a_lane_a_kind() -> None:
    names = {(row["name"], row["pid"], row.get("tid")): row["args"].get("name") for row in rows("M")}
    assert names["process_name", 0, None] == "rank 0"
    lanes = {(pid, name) for (what, pid, _), name in names.items() if what == "thread_name"}
    assert lanes == {(0, "steps"), (0, "compute"), (0, "collectives"), (0, "collectives 2"),
                     (1, "steps"), (1, "collectives"), (1, "collectives 2")}


def test_spans_in_microseconds_from_the_first() -> None:
    first = next(row for row in rows("X") if row["name"] == "all_reduce grads bucket 0")
    assert (first["ts"], first["dur"], first["cat"]) == (4.0, 2.0, "collective")
    assert first["args"] == {"step": 1, "purpose": "grads", "bucket": 0, "bytes": 8}


def test_spans_of_a_lane_nest_or_follow() -> None:
    crossing = [*RUN, Event("backward", "Other", 0, 0, 7_500, 8_800, {})]
    lanes: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in rows("X", crossing):
        lanes.setdefault((row["pid"], row["tid"]), []).append(row)
    assert sum(map(len, lanes.values())) == len(crossing) - 2
    for lane in lanes.values():
        for before, after in pairwise(lane):
            end, begin = before["ts"] + before["dur"], after["ts"]
            assert begin >= end or begin + after["dur"] <= end


def test_arrows_join_the_same_collective_on_all_ranks() -> None:
    begins, ends = rows("s"), rows("f")
    assert [(row["pid"], row["ts"]) for row in begins] == [(0, 5.0), (0, 6.0)]
    assert [(row["pid"], row["ts"], row["bp"]) for row in ends] == [(1, 5.5, "e"), (1, 6.5, "e")]
    assert [row["id"] for row in begins] == [row["id"] for row in ends]
    spans = {(row["pid"], row["tid"]): row for row in rows("X")}
    for row in begins + ends:
        span = spans[row["pid"], row["tid"]]
        assert span["ts"] <= row["ts"] <= span["ts"] + span["dur"]
    three = [collective(rank, rank, rank + 5, step=step) for rank in range(3) for step in range(2)]
    assert [row["pid"] for row in rows("t", three)] == [1, 1]
    assert rows("s", [collective(0, 1, 2)]) == []  # alone, it joins nothing
    hosts = [collective(rank, 1, 2, ranks=[rank // 2 * 2, rank // 2 * 2 + 1]) for rank in range(4)]
    assert [(row["pid"], row["id"]) for row in rows("s", hosts)] == [(0, 0), (2, 1)]      # two of four ranks each
    assert [(row["pid"], row["id"]) for row in rows("f", hosts)] == [(1, 0), (3, 1)]


def test_gauges_become_counters() -> None:
    assert rows("C") == [{"ph": "C", "name": "loss", "pid": 0, "ts": 8.0, "args": {"value": 2.5}}]


def make_run(path: Path) -> RunDirectory:
    directory = RunDirectory(path)
    directory.create({"spec": RunSpec(function="m:f", world_size=1).to_dict(), "created": 0}, 1)
    return directory


def test_export_writes_strict_json(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run")
    now = EventFile(directory.rank(0) / "events.jsonl", 0)
    now.write([("gauge", "loss", 0, 5, 5, {"value": float("nan")}), ("step", "train", 0, 5, 9, {})])
    written = json.loads(export(directory.path, tmp_path / "trace.json").read_text(), parse_constant=pytest.fail)
    assert written["metadata"]["run"] == "run"
    assert written["metadata"]["spec"]["function"] == "m:f"
    assert written["metadata"]["wall_seconds_at_zero"] < 2e9
    assert [row["args"] for row in written["traceEvents"] if row["ph"] == "C"] == [{"value": "nan"}]


def test_a_rank_that_died_before_its_first_write_has_no_clock_to_be_laid_over(tmp_path: Path) -> None:
    """Of rank 0 there is only what the supervisor sampled; its file of events is empty."""
    directory = RunDirectory(tmp_path / "run")
    directory.create({"spec": RunSpec(function="m:f", world_size=2).to_dict(), "created": 0}, 2)
    EventFile(directory.rank(0) / "utilization.jsonl", 0).write([("gauge", "utilization", 0, 5, 5, {"cpu": 9.0})])
    (directory.rank(0) / "events.jsonl").write_text("")
    EventFile(directory.rank(1) / "events.jsonl", 1).write([("step", "train", 0, 5, 9, {})])
    written = json.loads(export(directory.path, tmp_path / "trace.json").read_text())
    assert {row["pid"]: row["ts"] for row in written["traceEvents"] if "ts" in row} == {0: 0.0, 1: 0.0}
    assert written["metadata"]["wall_seconds_at_zero"] is not None


def test_nothing_to_trace_and_nowhere_to_write(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run")
    with pytest.raises(RunError, match="has recorded no events, so there is nothing to trace"):
        export(directory.path, tmp_path / "trace.json")
    EventFile(directory.rank(0) / "events.jsonl", 0).write([("step", "train", 0, 5, 9, {})])
    with pytest.raises(RunError, match=r"the trace cannot be written to \S+: No such file or directory"):
        export(directory.path, tmp_path / "absent" / "trace.json")
