"""`kill -9` of every party: whatever dies, nothing of the run is left, and its end is told."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import rank_programs
import survivors

import dplab
from dplab.errors import RankFailed, RunError
from dplab.launcher.starter import WARM


@pytest.fixture(autouse=True)
def no_leftovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process of a run, and so no port; nothing in shared memory; nothing in the temporary folder."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    before = set(os.listdir("/dev/shm"))
    yield
    for path in tmp_path.glob("runs/*/pids.json"):
        survivors.assert_none(path.parent)
    survivors.poll(lambda: set(os.listdir("/dev/shm")) <= before, "nothing is left in /dev/shm")
    # Importing torch._dynamo, as every optimizer does, makes torch's compile cache: one folder a user, kept.
    assert not [path for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]


def endless(world_size: int = 2, **options: object) -> tuple[dplab.Run, list[int]]:
    run = dplab.launch(rank_programs.reduce_for_ever, world_size=world_size, detach=False, **options)
    return run, survivors.rank_pids(run.path, world_size)


@pytest.mark.parametrize("warm", [True, False])
def test_kill_a_rank(warm: bool) -> None:
    run, pids = endless(3, warm=warm)
    os.kill(pids[2], signal.SIGKILL)
    with pytest.raises(RankFailed, match="rank 2 of 3 was killed by SIGKILL") as caught:
        run.wait(30)
    assert caught.value.collateral == (0, 1)


@pytest.mark.parametrize("warm", [True, False])
def test_kill_the_supervisor(warm: bool) -> None:
    run, _ = endless(warm=warm)
    pid = survivors.supervisor_pid(run.path)
    os.kill(pid, signal.SIGKILL)
    survivors.assert_none(run.path)
    told = rf"its supervisor \(process {pid}\) vanished without writing the run's end"
    assert dplab.attach(run.path).state == "failed"
    with pytest.raises(RunError, match=told):
        dplab.attach(run.path).wait()
    assert "vanished" in repr(run)
    assert run.stop() == "failed"


def test_kill_the_warm_parent(tmp_path: Path) -> None:
    go_on = tmp_path / "go on"
    run = dplab.launch(rank_programs.wait_for, world_size=2, args=(str(go_on),), warm=True)
    survivors.rank_pids(run.path, 2)
    first = WARM.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    go_on.touch()
    assert run.wait(30) == [0, 1]
    assert dplab.launch(rank_programs.total, world_size=2, detach=False, warm=True).wait(60) == [2, 2]
    assert WARM.pid not in (None, first)


LAUNCHING = """
import sys, time
sys.path.insert(0, {folder!r})
import rank_programs, dplab
if __name__ == "__main__":
    run = dplab.launch(rank_programs.{program}, world_size={world_size}, detach={detach}, kwargs={kwargs})
    print(run.path, flush=True)
    run.wait()
"""


def launching_process(program: str = "reduce_for_ever", *, detach: bool, world_size: int = 2, ready: bool = True,
                      **kwargs: object) -> tuple[subprocess.Popen[str], Path]:
    """A script that launches and waits, in a group of its own; returns once the ranks are in their loops."""
    source = LAUNCHING.format(folder=os.path.dirname(__file__), program=program, world_size=world_size, detach=detach,
                              kwargs=kwargs)
    process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True, process_group=0)
    assert process.stdout is not None
    run = Path(process.stdout.readline().strip())
    if ready:
        survivors.rank_pids(run, world_size)
    return process, run


def test_h38_kill_the_launching_process() -> None:
    process, path = launching_process(detach=False)
    process.kill()
    process.communicate(timeout=60)
    survivors.assert_none(path)
    run = dplab.attach(path)
    assert run.state == "stopped"
    assert run.failure is None
    assert run.stopped_by == "the launching process ended (detach=False)"
    assert run.wait() == [None, None]


def test_a_detached_run_survives_the_launching_process() -> None:
    process, path = launching_process("train_until_stopped", detach=True)
    warm = [child.pid for child in psutil.Process(process.pid).children()]
    process.kill()
    process.communicate(timeout=60)
    survivors.poll(lambda: not any(map(psutil.pid_exists, warm)), "the warm parent has ended")
    run = dplab.attach(path)
    assert run.state == "running"
    seen = len(run.events())
    survivors.poll(lambda: len(run.events()) > seen, "the run goes on")
    assert run.stop(timeout=20) == "stopped"
    assert run.wait() == [None, None]
    ends = {event.rank: event.step for event in run.events() if event.kind == "step"}
    assert ends[0] == ends[1]


@pytest.mark.parametrize(("number", "whom"), [
    (signal.SIGINT, "group"), (signal.SIGINT, "parent"), (signal.SIGTERM, "parent"), (signal.SIGKILL, "parent")])
def test_h38_signal_in_the_middle(number: signal.Signals, whom: str) -> None:
    process, path = launching_process(detach=False, world_size=3, ignore_interrupts=True)
    send = os.killpg if whom == "group" else os.kill
    send(process.pid, number)
    process.communicate(timeout=60)
    survivors.assert_none(path)
    assert dplab.attach(path).state == "stopped"


def test_h38_two_interrupts_at_the_start() -> None:
    process, path = launching_process(detach=False, world_size=3, ready=False)
    for _ in range(2):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    run = dplab.attach(path)
    survivors.poll(lambda: run.state in ("stopped", "failed"), f"the run has ended, it is {run.state}")


def test_interrupting_wait_leaves_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = tmp_path / "go on"
    run = dplab.launch(rank_programs.wait_for, world_size=1, args=(str(go_on),), detach=False)

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("dplab.launcher.run.time.sleep", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run.wait()
    go_on.touch()
    assert run.wait(30) == [0]


def test_children_of_a_rank_end_with_the_run() -> None:
    [pid] = dplab.launch(rank_programs.leave_children, world_size=1, detach=False).wait(30)
    assert not psutil.pid_exists(pid)


def test_stop_that_nobody_heeds() -> None:
    run, _ = endless(2)
    assert run.stop(timeout=0.2) == "stopped"
    assert run.failure is None
    assert run.stopped_by == (
        "stop was asked for; ranks 0, 1 did not end within 0.2 s and had to be ended by a signal, without a result "
        "(a program hears the wish to stop in engine.step())")
    assert run.stopped_by in repr(run)
    assert run.logs(0) == "dplab: rank 0 was told to end (SIGTERM) before its first step was done\n"
    assert run.wait() == [None, None]
    assert run.stop() == "stopped"


def test_supervisor_is_terminated() -> None:
    run, _ = endless(2)
    os.kill(survivors.supervisor_pid(run.path), signal.SIGTERM)
    survivors.poll(lambda: run.state == "stopped", "the run has stopped")
    assert run.stopped_by == "the supervisor received SIGTERM"


@pytest.mark.parametrize("warm", [True, False])
def test_the_run_s_directory_is_removed(warm: bool, tmp_path: Path) -> None:
    """Of ranks that would notice nothing themselves."""
    run = dplab.launch(rank_programs.wait_for, world_size=2, args=(str(tmp_path / "never"),), warm=warm, detach=False)
    pids, supervisor = survivors.rank_pids(run.path, 2), survivors.supervisor_pid(run.path)
    shutil.rmtree(run.path)
    survivors.poll(lambda: not any(map(psutil.pid_exists, [supervisor, *pids])), "supervisor and ranks have ended",
                   limit=10)
    assert not run.path.exists()
    assert run.state == "damaged"
    assert f"{run.path} is not a run directory: it does not exist" in repr(run)
    with pytest.raises(RunError, match="is not a run directory: it does not exist; give a directory"):
        run.wait()
