"""A rank's recorder: what it writes, what survives kill -9, what a fork of the rank may not do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from dplab.errors import RunError
from dplab.telemetry import recorder
from dplab.telemetry.events import Event
from dplab.telemetry.file_recorder import FileRecorder
from dplab.telemetry.state import StatePage, read_state


@pytest.fixture
def rank(tmp_path: Path) -> Path:
    (tmp_path / "control").mkdir()
    (tmp_path / "rank-3").mkdir()
    return tmp_path / "rank-3"


def lines(rank: Path) -> list[str]:
    return (rank / "events.jsonl").read_text().splitlines()


def test_header_then_events_in_the_contract_s_format(rank: Path) -> None:
    before = time.monotonic_ns(), time.time_ns()
    events = FileRecorder(rank, 3)
    events.step = 7
    events.span("collective", "all_reduce", 10, 20, purpose="grads", bucket=None, bytes=4)
    events.gauge("loss", value=0.5)
    events.close()
    header, span, gauge = lines(rank)
    anchor = json.loads(header)
    assert (anchor["schema"], anchor["rank"], anchor["pid"]) == (1, 3, os.getpid())
    assert before[0] <= anchor["monotonic"] <= time.monotonic_ns()
    assert before[1] <= anchor["wall"] <= time.time_ns()
    expected = Event("collective", "all_reduce", 3, 7, 10, 20, {"purpose": "grads", "bucket": None, "bytes": 4})
    assert span == expected.to_line()
    assert Event.from_line(gauge, 3)._replace(t0=0, t1=0) == Event("gauge", "loss", 3, 7, 0, 0, {"value": 0.5})
    assert (rank / "events.jsonl").stat().st_mode & 0o777 == 0o600


def test_numbers_of_numpy_and_what_is_no_json(rank: Path) -> None:
    events = FileRecorder(rank, 3)
    events.gauge("mixed", scalar=np.float32(0.5), whole=np.int64(3), row=np.arange(2), path=Path("/x"))
    events.close()
    assert Event.from_line(lines(rank)[1], 3).attrs == {"scalar": 0.5, "whole": 3, "row": [0, 1], "path": "/x"}


def test_the_thread_writes_without_being_asked(rank: Path) -> None:
    events = FileRecorder(rank, 3)
    events.span("step", "train", 1, 2)
    until = time.monotonic() + 10
    while len(lines(rank)) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    assert Event.from_line(lines(rank)[1], 3).kind == "step"
    events.close()


def test_many_threads_lose_nothing(rank: Path) -> None:
    events = FileRecorder(rank, 3)

    def record(thread: int) -> None:
        for number in range(5000):
            events.gauge("count", thread=thread, number=number)
            if number % 100 == 0:
                events.flush()

    threads = [threading.Thread(target=record, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events.close()
    seen = [Event.from_line(line, 3).attrs for line in lines(rank)[1:]]
    for thread in range(4):
        assert [attrs["number"] for attrs in seen if attrs["thread"] == thread] == list(range(5000))


KILLED = """
import os, signal, sys
from pathlib import Path
from dplab.telemetry.file_recorder import FileRecorder
events = FileRecorder(Path(sys.argv[1]), 3)
for step in range(2000):
    events.step = step
    events.span("step", "train", step, step + 1)
events.flush()
events.phase("all_reduce grads", bucket=4)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_flushed_survives_kill_9_and_so_does_the_state(rank: Path) -> None:
    process = subprocess.run([sys.executable, "-c", KILLED, str(rank)], check=False)
    assert process.returncode == -signal.SIGKILL
    assert [Event.from_line(line, 3).step for line in lines(rank)[1:]] == list(range(2000))
    state = read_state(rank / "state")
    assert state is not None
    assert (state.step, state.phase, state.bucket, state.whole) == (1999, "all_reduce grads", 4, True)
    assert str(state) == "in step 2000, all_reduce grads, bucket 4"


@pytest.mark.parametrize(("step", "phase", "bucket", "said"), [
    (0, "import", -1, "before its first step, importing its program"), (0, "running", -1, "before its first step, in "
                                                                                          "its program"),
    (0, "forward", -1, "in step 1, forward"), (4, "all_reduce grads", 2, "in step 5, all_reduce grads, bucket 2"),
    (4, "paused", -1, "after step 4, paused"), (12, "returned", -1, "after step 12, returned"),
    (0, "", -1, "in step 1, not started")])
def test_where_a_rank_stands_is_said_in_steps_that_count_from_1(rank: Path, step: int, phase: str, bucket: int,
                                                                said: str) -> None:
    StatePage(rank / "state").write(step, phase, bucket)
    assert str(read_state(rank / "state")) == said


def test_a_full_disk_is_raised_where_the_rank_flushes(rank: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = FileRecorder(rank, 3)
    real, full = os.write, True

    def write(handle: int, data: bytes) -> int:
        if full:
            raise OSError(28, "No space left on device")
        return real(handle, data[:10])  # and short writes afterwards

    monkeypatch.setattr(os, "write", write)
    events.span("step", "train", 1, 2)
    with pytest.raises(RunError, match=r"rank 3 cannot write its events to \S+events\.jsonl: the disk is full; free "
                                       r"space there, or set DPLAB_RUNS"):
        events.flush()
    full = False
    events._error = None
    events.span("step", "train", 3, 4)
    events.close()
    assert [Event.from_line(line, 3).t0 for line in lines(rank)[1:]] == [1, 3]


def test_an_error_of_the_thread_reaches_the_rank(rank: Path) -> None:
    events = FileRecorder(rank, 3)
    events._append(("gauge", "loss", 0, 0, 0, {(1, 2): "a key that is no JSON"}))  # type: ignore[dict-item]
    events._thread.join(10)
    assert not events._thread.is_alive()
    with pytest.raises(TypeError, match="keys must be str"):
        events.flush()


def test_stop_is_seen(rank: Path) -> None:
    events = FileRecorder(rank, 3)
    assert not events.stop_requested()
    (rank.parent / "control" / "stop").touch()
    assert events.stop_requested()
    events.close()


def test_a_fork_of_the_rank_records_nothing(rank: Path) -> None:
    events = FileRecorder(rank, 3)
    recorder.install(events, process=True)
    try:
        events.phase("mine")
        events.span("step", "train", 1, 2)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                events.span("step", "the child's", 3, 4)
                events.phase("the child's")
                events.flush()
                status = 0 if recorder.current() is recorder.NULL else 2
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        assert recorder.current() is events
    finally:
        recorder.install(recorder.NULL, process=True)
    events.close()
    assert [Event.from_line(line, 3).name for line in lines(rank)[1:]] == ["train"]
    state = read_state(rank / "state")
    assert state is not None
    assert state.phase == "mine"


def test_a_thread_that_torch_starts_finds_the_process_s_recorder() -> None:
    mine, seen = recorder.Recorder(), []
    recorder.install(mine, process=True)
    try:
        thread = threading.Thread(target=lambda: seen.append(recorder.current()))
        thread.start()
        thread.join()
    finally:
        recorder.install(recorder.NULL, process=True)
    assert seen == [mine]


def test_state_of_nobody_and_of_another_version(tmp_path: Path) -> None:
    assert read_state(tmp_path / "state") is None
    page = StatePage(tmp_path / "state")
    assert read_state(tmp_path / "state") is None
    page.write(1, "é" * 60, -1)
    state = read_state(tmp_path / "state")
    assert state is not None
    assert state.phase == "é" * 24
    (tmp_path / "state").write_bytes(b"else" + bytes(4092))
    with pytest.raises(RunError, match=r"state is not a state page of this version \(1\)"):
        read_state(tmp_path / "state")
