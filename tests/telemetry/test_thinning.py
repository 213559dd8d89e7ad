"""Files of a long run: small, and as true as if everything had stayed."""

from __future__ import annotations

from pathlib import Path

import pytest

from dplab.errors import RunError
from dplab.specs import RunSpec
from dplab.telemetry.event_file import EventFile, Record
from dplab.telemetry.events import Event
from dplab.telemetry.file_recorder import FileRecorder
from dplab.telemetry.reader import RunReader
from dplab.telemetry.rundir import RunDirectory
from dplab.telemetry.summary import Summary
from dplab.telemetry.thinning import DETAIL, FULL_STEPS, RecentFiles, Thinning, keeps
from dplab.views.fold import Fold
from dplab.views.table import table
from tests.views.synthetic import step_events


def made(path: Path, ranks: int = 2) -> RunDirectory:
    directory = RunDirectory(path)
    directory.create({"spec": RunSpec(function="m:f", world_size=ranks, strategy="zero2").to_dict(), "created": 0,
                      "versions": {}}, ranks)
    return directory


def records(rank: int, step: int) -> list[Record]:
    return [(event.kind, event.name, event.step, event.t0, event.t1, event.attrs) for event in step_events(rank, step)]


class Writer:
    """A rank's two kinds of files, written as its recorder does."""

    def __init__(self, directory: RunDirectory, rank: int) -> None:
        self.rank, self.file = rank, EventFile(directory.rank(rank) / "events.jsonl", rank)
        self.recent, self.thinning = RecentFiles(directory.rank(rank), rank), Thinning()

    def write(self, steps: range) -> None:
        kept, recent = self.thinning.part([record for step in steps for record in records(self.rank, step)])
        self.recent.write(recent)
        self.file.write(kept)


def test_as_many_steps_stay_whole_in_every_doubling() -> None:
    assert all(keeps(step) for step in range(2 * FULL_STEPS))
    for doubling in range(1, 8):
        begin = FULL_STEPS << doubling
        assert sum(keeps(step) for step in range(begin, 2 * begin)) == FULL_STEPS
    assert sum(keeps(step) for step in range(30_000)) < 1700      # ten minutes at 50 steps a second


def test_what_stays_tells_the_same_of_every_step(tmp_path: Path) -> None:
    steps = 1500
    whole = [event for step in range(steps) for rank in range(2) for event in step_events(rank, step)]
    directory = made(tmp_path / "run")
    for rank in range(2):
        Writer(directory, rank).write(range(steps))
    kept = RunReader(directory.path).poll()
    assert len(kept) < 0.7 * len(whole)
    told, expected = Summary().feed(kept), Summary().feed(whole)
    for name in ("steps", "loss", "step_ms", "sync_ms", "tokens_per_s", "wire"):
        assert getattr(told, name) == getattr(expected, name), name
    rows, all_rows = table(kept), table(whole)
    assert [(row["step"], row["rank"], row["loss"], row["bytes_sent"]) for row in rows] == [
        (row["step"], row["rank"], row["loss"], row["bytes_sent"]) for row in all_rows]
    thin = [row for row in rows if not keeps(row["step"] - 1)]
    assert {row["forward_ms"] for row in thin} == {None}
    assert [row for row in rows if keeps(row["step"] - 1)] == [row for row in all_rows if keeps(row["step"] - 1)]


def test_the_last_steps_are_whole_for_who_looks_at_them_meanwhile(tmp_path: Path) -> None:
    """Polled as it is written, through the turns of the files: the newest step always has its lanes."""
    directory = made(tmp_path / "run")
    writers = [Writer(directory, rank) for rank in range(2)]
    live, reader = Fold(2, "zero2"), RunReader(directory.path, recent=True)
    for begin in range(0, 2100, 7):
        for writer in writers:
            writer.write(range(begin, begin + 7))
        live.feed(reader.poll())
        assert live.sync.step == begin + 6 == live.pace.steps - 1
    attached = Fold(2, "zero2")
    attached.feed(RunReader(directory.path, recent=True).poll())
    assert attached.sync.step == live.sync.step
    newest = attached.steps.series[0]["step"][-FULL_STEPS:]
    assert newest.tolist() == list(range(2101 - FULL_STEPS, 2101))
    assert attached.status() == live.status()


def test_a_thin_step_is_not_drawn_as_if_it_had_done_nothing(tmp_path: Path) -> None:
    directory = made(tmp_path / "run", 1)
    Writer(directory, 0).write(range(900))
    fold = Fold(1, "zero2")
    fold.feed(RunReader(directory.path).poll())
    assert {int(step) - 1 for step in fold.steps.series[0]["step"]} <= {step for step in range(900) if keeps(step)}
    assert fold.steps.medians()["total"] == pytest.approx(100)      # type: ignore[index]
    assert fold.loss.last_step == 899


def test_a_recorder_parts_what_it_is_given(tmp_path: Path) -> None:
    directory = made(tmp_path / "run", 1)
    recorder = FileRecorder(directory.rank(0), 0)
    for step in range(410):
        recorder.step = step
        for kind in sorted(DETAIL):
            recorder.span(kind, "x", 10 * step, 10 * step + 5, purpose="grads", bytes=3, exposed=2)
        recorder.gauge("memory", params=1)
        recorder.gauge("loss", value=1.0)
        recorder.span("step", "train", 10 * step, 10 * step + 9)
        if step % 50 == 0:
            recorder.flush()
    recorder.close()
    events = RunReader(directory.path).poll()
    ends = {event.step: event for event in events if event.kind == "step"}
    assert len(ends) == 410
    assert ends[400].attrs == {}
    assert ends[401].attrs == {"thin": {"spans": len(DETAIL), "wire": {"x": [1, 3]}, "exposed": 2}}
    assert not [event for event in events if event.step == 401 and (event.kind in DETAIL or event.name == "memory")]
    recent = [event for event in RunReader(directory.path, recent=True).poll() if event.step == 401]
    assert {event.kind for event in recent} == {*DETAIL, "gauge", "step"}


def test_a_damaged_recent_file_is_told_as_any_other(tmp_path: Path) -> None:
    directory = made(tmp_path / "run", 1)
    (directory.rank(0) / "recent-0.jsonl").write_text("nonsense\n")
    with pytest.raises(RunError, match=r"recent-0\.jsonl does not start with a header"):
        RunReader(directory.path, recent=True).poll()
    assert RunReader(directory.path).poll() == []


def test_events_are_events() -> None:
    kept, recent = Thinning().part(records(0, 401))
    assert {Event(kind, name, 0, step, t0, t1, attrs).kind for kind, name, step, t0, t1, attrs in recent} <= {
        *DETAIL, "gauge"}
    assert [record[0] for record in kept] == ["data", "gauge", "step"]
