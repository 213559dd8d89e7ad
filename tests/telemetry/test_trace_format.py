"""The trace held to the rules of the trace-event format, by a reader that knows nothing of how it is written.

The rules are those of "Trace Event Format" (the Chromium project's document), for the phases X, C, M and s/t/f.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dplab
from dplab.specs import RunSpec
from dplab.telemetry.event_file import EventFile
from dplab.telemetry.events import Event
from dplab.telemetry.rundir import RunDirectory
from dplab.telemetry.trace import chrome_trace, export

KNOWN = {"X", "C", "M", "s", "t", "f"}
NEEDS = {"X": ("name", "cat", "ts", "dur", "pid", "tid"), "C": ("name", "ts", "pid", "args"),
         "M": ("name", "pid", "args"), **dict.fromkeys("stf", ("name", "cat", "id", "ts", "pid", "tid"))}


def broken(trace: dict[str, Any]) -> list[str]:
    """Every rule that the trace breaks, in words."""
    found: list[str] = []
    rows = trace["traceEvents"]
    slices: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    flows: dict[tuple[str, Any], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        phase = row.get("ph")
        if phase not in KNOWN:
            found.append(f"phase {phase!r}")
            continue
        found += [f"{phase} without {name}: {row}" for name in NEEDS[phase] if name not in row]
        found += [f"{name} is no integer: {row}" for name in ("pid", "tid")
                  if name in row and type(row[name]) is not int]
        if phase != "M" and not row["ts"] >= 0:
            found.append(f"before the beginning: {row}")
        if phase == "X":
            if not row["dur"] >= 0:
                found.append(f"negative length: {row}")
            slices[row["pid"], row["tid"]].append((_ns(row["ts"]), _ns(row["ts"]) + _ns(row["dur"])))
        elif phase == "C" and not all(isinstance(value, int | float) and value == value
                                      for value in row["args"].values()):
            found.append(f"a counter that is no number: {row}")
        elif phase in "stf":
            flows[row["cat"], row["id"]].append(row)
    named = {(row["pid"], row.get("tid")) for row in rows if row["ph"] == "M" and row["name"] in (
        "process_name", "thread_name")}
    found += [f"lane {lane} has no name" for lane in slices if lane not in named or (lane[0], None) not in named]
    for lane, spans in slices.items():
        found += crossings(lane, spans)
    for key, steps in flows.items():
        found += bad_flow(key, steps, slices)
    return found


def _ns(microseconds: float) -> int:
    """What Perfetto counts in."""
    return round(1000 * microseconds)


def crossings(lane: tuple[int, int], spans: list[tuple[int, int]]) -> list[str]:
    """Slices of one thread nest or follow each other."""
    found: list[str] = []
    open_: list[int] = []
    for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_ and open_[-1] <= start:
            open_.pop()
        if open_ and end > open_[-1]:
            found.append(f"{start}..{end} crosses the end at {open_[-1]} on {lane}")
        open_.append(end)
    return found


def bad_flow(key: tuple[str, Any], steps: list[dict[str, Any]],
             slices: dict[tuple[int, int], list[tuple[int, int]]]) -> list[str]:
    """A flow starts once, ends once, goes on in time, and each of its points lies in a slice of its thread."""
    phases = [row["ph"] for row in sorted(steps, key=lambda row: (row["ts"], "stf".index(row["ph"])))]
    found = []
    if phases[0] != "s" or phases[-1] != "f" or set(phases[1:-1]) - {"t"}:
        found.append(f"flow {key} goes {phases}")
    if len({row["name"] for row in steps}) != 1:
        found.append(f"flow {key} changes its name")
    found += [f"flow {key} ends at the next slice, not at its own" for row in steps
              if row["ph"] == "f" and row.get("bp") != "e"]
    found += [f"flow {key} starts or ends outside of any slice" for row in steps if not any(
        start <= _ns(row["ts"]) <= end for start, end in slices[row["pid"], row["tid"]])]
    return found


def test_the_judge_finds_what_is_wrong() -> None:
    good = {"ph": "X", "name": "a", "cat": "c", "ts": 0, "dur": 10, "pid": 0, "tid": 0}
    names = [{"ph": "M", "name": "process_name", "pid": 0, "args": {}},
             {"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {}}]
    flow = {"name": "a", "cat": "flow", "id": 1, "pid": 0, "tid": 0}
    arrows = [{**flow, "ph": "s", "ts": 1}, {**flow, "ph": "f", "ts": 2, "bp": "e"}]
    assert broken({"traceEvents": [*names, good, *arrows]}) == []
    for rows, said in (
            ([good], "has no name"), ([*names, {**good, "dur": -1}], "negative length"),
            ([*names, good, {**good, "ts": 5}], "crosses the end"), ([*names, {**good, "ph": "B"}], "phase 'B'"),
            ([*names, {**good, "tid": "x"}], "no integer"), ([*names, good, arrows[0]], "goes ['s']"),
            ([*names, good, arrows[0], {**arrows[1], "ts": 99}], "outside of any slice"),
            ([*names, good, {**arrows[0], "ts": 3}, arrows[1]], "goes ['f', 's']"),
            ([*names, {"ph": "C", "name": "x", "pid": 0, "ts": 0, "args": {"v": "no"}}], "no number")):
        assert any(said in text for text in broken({"traceEvents": rows})), said


spans = st.tuples(st.sampled_from(["forward", "backward", "collective", "data", "log", "pause", "unheard-of"]),
                  st.integers(0, 3), st.integers(0, 2), st.integers(0, 60), st.integers(0, 30), st.integers(0, 1))


@given(st.lists(spans, max_size=40))
def test_whatever_was_recorded_keeps_the_rules(drawn: list[tuple[str, int, int, int, int, int]]) -> None:
    attrs = {"purpose": "grads"}
    events = [Event(kind, "all_reduce", rank, step, 1000 + t0, 1000 + t0 + length, {**attrs, "bucket": bucket})
              for kind, rank, step, t0, length, bucket in drawn]
    gauges = [Event("gauge", "memory", 0, 0, 1000, 1000, {"params": 3, "limit_of": "host", "slots": [["a", 1]]})]
    assert broken(chrome_trace([*events, *gauges])) == []


def traced(strategy: str, world_size: int, folder: Path) -> tuple[dplab.Run, list[dict[str, Any]]]:
    """A run of three steps and the rows of its trace, which keeps the rules."""
    run = dplab.launch("dplab.workloads.train:train", world_size=world_size, strategy=strategy, root=folder,
                       detach=False, kwargs={"steps": 3, "batch_size": 1})
    run.wait()
    trace = json.loads(export(run.path, folder / "trace.json").read_text())
    assert broken(trace) == []
    return run, trace["traceEvents"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero3+accum2"])
def test_the_trace_of_a_real_run_keeps_the_rules_and_joins_every_collective(strategy: str, tmp_path: Path) -> None:
    run, rows = traced(strategy, 3, tmp_path)
    sent = [event for event in run.events() if event.kind == "collective"]
    assert len([row for row in rows if row["ph"] in "stf"]) == len(sent)
    assert len({row["id"] for row in rows if row["ph"] == "s"}) == len(sent) / 3
    assert {row["args"]["name"] for row in rows if row["name"] == "process_name"} == {"rank 0", "rank 1", "rank 2"}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp+hybrid+topology=2x2@10gbe", "zero2+hybrid+topology=2x2@10gbe"])
def test_arrows_join_the_ranks_of_a_host_or_those_across_and_no_others(strategy: str, tmp_path: Path) -> None:
    _, rows = traced(strategy, 4, tmp_path)
    joined: dict[tuple[str, int], list[int]] = defaultdict(list)
    for row in rows:
        if row["ph"] in "stf":
            joined[row["name"], row["id"]].append(row["pid"])
    found = {(name, tuple(sorted(ranks))) for (name, _), ranks in joined.items()}
    hosts, across, everyone = {(0, 1), (2, 3)}, {(0, 2), (1, 3)}, (0, 1, 2, 3)
    assert {ranks for name, ranks in found if name == "reduce_scatter"} == hosts
    assert {ranks for name, ranks in found if name == "all_gather"} == hosts
    assert {ranks for name, ranks in found if name == "all_reduce"} == {*across, everyone}      # control goes to all


def test_ranks_of_two_hosts_lie_on_one_clock(tmp_path: Path) -> None:
    """The second host started 100 s later, so that its monotonic clock shows less at the same moment."""
    directory = RunDirectory(tmp_path / "run")
    directory.create({"spec": RunSpec(function="m:f", world_size=3).to_dict(), "created": 0, "versions": {}}, 3)
    for rank, (host, monotonic) in enumerate([("a", 500 * 10**9), ("a", 510 * 10**9), ("b", 400 * 10**9)]):
        file = EventFile(directory.rank(rank) / "events.jsonl", rank, host=host, monotonic=monotonic,
                         wall=10**18 + (10 * 10**9 if rank == 1 else 0))
        begun = 600 * 10**9 if host == "a" else 500 * 10**9      # the same moment on both
        file.write([("collective", "all_reduce", 0, begun, begun + 5000, {"purpose": "grads", "bucket": 0})])
        file.close()
    trace = json.loads(export(directory.path, tmp_path / "trace.json").read_text())
    assert broken(trace) == []
    assert [row["ts"] for row in trace["traceEvents"] if row["ph"] == "X"] == [0, 0, 0]
