"""Pausing, stepping, resuming, relaunching and profiling a run: on real ranks, from this process and from the files."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rank_programs

import dplab
from dplab.diagnosis import hang
from dplab.errors import RunError, UsageError
from dplab.launcher import steer
from dplab.launcher.run import Run, attach
from dplab.specs import RunSpec
from dplab.telemetry.rundir import RunDirectory
from dplab.telemetry.wishes import Pause, read_capture, read_pause, write_pause


def until(holds: Callable[[], Any], seconds: float = 60) -> None:
    limit = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < limit, f"did not happen within {seconds} s"
        time.sleep(0.02)


def started(**options: Any) -> Run:
    run = dplab.launch(rank_programs.train_small, world_size=2, strategy="zero2", detach=False, **options)
    until(lambda: run.steps)
    return run


def ended_steps(run: Run) -> dict[int, list[int]]:
    """Indices of the steps that each rank has recorded."""
    found: dict[int, list[int]] = {0: [], 1: []}
    for event in run.events():
        if event.kind == "step":
            found[event.rank].append(event.step)
    return found


def test_a_paused_run_stands_still_steps_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    run = started()
    assert run.pause() == "paused"
    assert "paused" in repr(run)
    before = run.steps
    assert before is not None
    assert ended_steps(run) == {0: list(range(before)), 1: list(range(before))}
    assert run.step() == before + 1
    assert run.step(3) == before + 4
    assert run.state == "paused"
    assert ended_steps(run) == {0: list(range(before + 4)), 1: list(range(before + 4))}

    monkeypatch.setattr(hang, "STILL_SECONDS", 0.0)      # it does not move, and does not hang
    assert not [finding for finding in run.diagnose().findings if finding.kind == "hang"]
    assert attach(run.path).state == "paused"
    with pytest.raises(TimeoutError, match=r"is paused after 0 s; it waits for resume\(\): wait again, or stop\(\) it"):
        run.wait(0)

    attach(run.path).resume()
    until(lambda: run.state == "running" and (run.steps or 0) > before + 10)
    assert run.stop() == "stopped"
    pauses = [event for event in run.events() if event.kind == "pause"]
    assert {event.rank for event in pauses} == {0, 1}
    slowest = max(event.t1 - event.t0 for event in pauses)
    summary_ms = [parts for parts in (run._fold().step_ms,) if parts is not None]
    assert summary_ms[0] * 1e6 < slowest      # no step counts the time for which it was held up


def test_a_paused_run_can_be_stopped_and_no_step_more_is_done() -> None:
    run = started()
    run.pause()
    steps = run.steps
    assert run.stop() == "stopped"
    assert run.stopped_by == "stop was asked for"
    assert ended_steps(run)[0] == list(range(steps or 0)) == ended_steps(run)[1]
    assert run.pause() == "stopped"      # an ended run says what it is, like stop()
    run.resume()
    assert run.state == "stopped"


def test_a_rank_of_a_paused_run_that_is_killed_fails_the_run() -> None:
    run = started()
    run.pause()
    processes = RunDirectory(run.path).processes()
    assert processes is not None
    os.kill(processes["ranks"][1].pid, signal.SIGKILL)
    until(lambda: run.state == "failed")
    assert "rank 1" in (run.failure or "")


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_pause_that_outlasts_the_wire_s_patience_is_no_hang(backend: str) -> None:
    run = dplab.launch(rank_programs.train_small, world_size=2, strategy="zero2", detach=False, backend=backend,
                       env={"DPLAB_TIMEOUT": "1"})
    until(lambda: run.steps)
    run.pause()
    began, steps = time.monotonic(), run.steps or 0
    until(lambda: time.monotonic() > began + 1.5)
    assert run.state == "paused"
    assert run.step() == steps + 1
    run.resume()
    until(lambda: (run.steps or 0) > steps + 5)
    assert run.stop() == "stopped"


def test_wishes_that_come_and_go_quickly_leave_no_rank_behind() -> None:
    """Ranks look at the file at different moments: however it changes meanwhile, all of them wait at one step."""
    run = started()
    for round_ in range(60):
        run.request_pause()
        if round_ % 3:
            run.request_resume()
            run.request_pause()
        if round_ % 2:
            until(lambda: run.state == "paused")
            run.request_step()
        run.request_resume()
    assert run.pause() == "paused"
    steps = run.steps
    assert ended_steps(run) == {0: list(range(steps or 0)), 1: list(range(steps or 0))}
    run.stop()


def test_a_program_that_never_steps_says_that_it_does_not_pause(tmp_path: Path) -> None:
    release = tmp_path / "go"
    run = dplab.launch(rank_programs.wait_for, args=(str(release),), detach=False)
    until(lambda: run.state == "running")
    with pytest.raises(TimeoutError, match=r"is running 0.2 s after it was asked to pause; a program pauses in "
                                           r"engine.step\(\), and this one will when it comes there: wait again with "
                                           r"pause\(\), or resume\(\) it"):
        run.pause(timeout=0.2)
    run.stop(timeout=0)


@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_a_number_of_steps_that_is_not_allowed(count: Any, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.create({"spec": RunSpec(function="m:f", world_size=1).to_dict(), "created": 0, "versions": {}}, 1)
    with pytest.raises(UsageError, match=rf"step\({re.escape(repr(count))}\) is not allowed; give a whole number of "
                                         rf"steps >= 1"):
        steer.request_step(directory, count)


def test_a_damaged_wish_is_none(tmp_path: Path) -> None:
    for text in ("", "{", "[]", '{"asked": true}', '{"asked": true, "go": "x"}'):
        (tmp_path / "pause").write_text(text)
        (tmp_path / "profile").write_text(text)
        assert read_pause(tmp_path) == Pause()
        assert read_capture(tmp_path) is None
    write_pause(tmp_path, Pause(True, 7))
    assert (read_pause(tmp_path).holds(6), read_pause(tmp_path).holds(7)) == (False, True)


def test_a_wish_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"cannot be paused or resumed: No such file or directory on control/pause; only "
                                       r"its owner may, on a disk that is not full"):
        write_pause(tmp_path / "run" / "control", Pause(True))


def test_relaunched_under_another_strategy_the_old_run_is_stopped() -> None:
    run = started(label="mine", threads=1)
    with pytest.raises(UsageError, match="zero9"):
        run.relaunch("zero9")
    assert run.state == "running"      # nothing was stopped for it
    again = run.relaunch("zero3")
    assert run.state == "stopped"
    assert (again.spec.strategy, again.spec.world_size, again.spec.label) == ("zero3", 2, "mine")
    until(lambda: again.steps)
    other = attach(again.path).relaunch(world_size=1, label="alone")      # another process's: from its own files
    assert again.state == "stopped"
    until(lambda: other.steps)
    assert (other.spec.strategy, other.spec.world_size, other.spec.label) == ("zero3", 1, "alone")
    other.stop()
    assert other.relaunchable
    assert not attach(other.path).relaunchable
    with pytest.raises(RunError, match=rf"run {other.id} cannot be launched again: it has ended, and only the process "
                                       rf"that launched it keeps what it called; call dplab.launch with its function "
                                       rf"\(rank_programs:train_small\)"):
        attach(other.path).relaunch()


def test_steps_are_recorded_by_torch_s_profiler_on_every_rank() -> None:
    run = started()
    run.pause()
    first = (run.steps or 0) + 1
    files = run.profile(steps=(first, first + 1))
    run.resume()
    until(lambda: all(file.exists() for file in files))
    assert [file.parent.name for file in files] == ["rank-0", "rank-1"]
    names = {row.get("name") for row in json.loads(files[0].read_text())["traceEvents"]}
    assert "aten::linear" in names
    assert sum(row.get("name") == "aten::linear" for row in json.loads(files[1].read_text())["traceEvents"]) == 2
    said = [(event.step, event.attrs["text"]) for event in run.events() if event[:2] == ("log", "capture")]
    steps = f"steps {first} to {first + 1}"
    begun, ended = first - 1, first + 1      # indices of the steps that come next
    assert sorted(said) == sorted([(begun, f"recording {steps}")] * 2
                                  + [(ended, f"{steps} are recorded in {file}") for file in files])
    run.stop()


def test_a_memory_snapshot_without_cuda_says_that_it_is_not_measurable() -> None:
    run = started()
    run.pause()
    first = (run.steps or 0) + 1
    files = run.profile((first, first), memory=True)
    run.step(2)
    said = [event.attrs["text"] for event in run.events() if event.kind == "log" and event.name == "capture"]
    run.stop()
    assert said == ["memory snapshot: not measurable here, it is of CUDA's allocator"] * 2
    assert not any(file.exists() for file in files)


@pytest.mark.parametrize("steps", [(3,), (4, 3), (-1, 2), (0, 2), "10", (1, 5000), (1.0, 2)])
def test_steps_that_cannot_be_profiled(steps: Any, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.create({"spec": RunSpec(function="m:f", world_size=1).to_dict(), "created": 0, "versions": {}}, 1)
    with pytest.raises(UsageError, match=r"profile\(steps=.*\) is not allowed; give the first and the last step, "
                                         r"counted from 1, such as \(10, 12\), at most 1000 of them"):
        steer.request_capture(directory, steps, memory=False)


def test_steps_that_are_over_cannot_be_profiled_and_an_ended_run_neither() -> None:
    run = started()
    with pytest.raises(UsageError, match=r"profile\(steps=\(1, 2\)\) is not allowed; the run is in step \d+: give "
                                         r"steps ahead of it, such as \(\d+, \d+\), or pause\(\) it first"):
        run.profile((1, 2))
    run.pause()
    ended = run.steps or 0
    with pytest.raises(UsageError, match=rf"profile\(steps=\(1, 2\)\) is not allowed; {ended} steps have ended: give "
                                         rf"{ended + 1} or later"):
        run.profile((1, 2))
    run.stop()
    with pytest.raises(RunError, match=rf"run {run.id} has ended \(stopped\); only steps of a run that goes can be "
                                       rf"recorded"):
        run.profile((10**6, 10**6 + 1))


def test_the_command_line_pauses_and_resumes(capsys: pytest.CaptureFixture[str]) -> None:
    from dplab.cli import main

    run = started()
    assert main(["attach", run.id, "--pause", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"id": run.id, "state": "paused", "steps": run.steps}
    assert main(["attach", run.id, "--pause", "--stop"]) == 2
    assert "attach takes one of --stop, --pause and --resume" in capsys.readouterr().err
    run.request_resume()
    until(lambda: run.state == "running")
    assert main(["attach", run.id, "--stop", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "stopped"
