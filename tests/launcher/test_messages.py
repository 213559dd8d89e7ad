"""What is told when the machinery itself cannot go on."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import rank_programs
import survivors

import dplab
from dplab.errors import RunError, UsageError
from dplab.launcher import launch as launching
from dplab.launcher import starter, supervisor, warm
from dplab.launcher.job import Job
from dplab.launcher.run import Run
from dplab.specs import RunSpec
from dplab.telemetry import files
from dplab.telemetry.process import Identity
from dplab.telemetry.rundir import RunDirectory


@pytest.fixture
def job(tmp_path: Path) -> Job:
    directory = RunDirectory(tmp_path / "run")
    directory.create({"spec": RunSpec(function="m:f", world_size=1).to_dict(), "created": 0}, 1)
    return Job(directory=str(directory.path), world_size=1, threads=1, strategy=None, backend=None, cwd="/",
               environ={"A": "\udcff"}, sys_path=[], launcher=Identity(1, 2.0, "boot"), function="m:f")


def test_a_job_survives_its_pipe(job: Job) -> None:
    assert Job.from_json(job.to_json()) == job
    assert "\n" not in job.to_json()


def test_no_interpreter(monkeypatch: pytest.MonkeyPatch, runs_folder: Path) -> None:
    monkeypatch.setattr(sys, "executable", "/absent/python")
    for warm_ in (True, False):
        monkeypatch.setattr(starter, "WARM", starter.WarmParent())
        with pytest.raises(RunError, match=r"no process can be started from '/absent/python': No such file or "
                                           r"directory; sys\.executable must name the interpreter"):
            dplab.launch(rank_programs.place, warm=warm_)
    assert not list(runs_folder.iterdir())


def test_a_disk_that_fills_between_the_start_and_its_record(monkeypatch: pytest.MonkeyPatch, runs_folder: Path) -> None:
    def start(job: Job, **options: Any) -> None:
        (job.run.path / "starter.json").unlink()
        (job.run.path / "starter.json").mkdir()

    monkeypatch.setattr(launching, "start_run", start)
    with pytest.raises(RunError, match=r"the run cannot be started in \S+: Is a directory; free space there, or set"):
        dplab.launch(rank_programs.place)
    assert not list(runs_folder.iterdir())


def test_processes_that_end_at_once(monkeypatch: pytest.MonkeyPatch, job: Job) -> None:
    monkeypatch.setattr(starter, "Identity", SimpleNamespace(of=lambda pid: None))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    parent = starter.WarmParent()
    with pytest.raises(RunError, match="the warm parent of runs ends as soon as it is started; launch with warm=False"):
        parent.submit(job)
    with pytest.raises(RunError, match="the run's supervisor ended as soon as it was started, with status 1; try"):
        starter.start_run(job, warm=False)


def test_no_process_for_the_supervisor(monkeypatch: pytest.MonkeyPatch, job: Job) -> None:
    def no_fork() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", no_fork)
    warm.start(job)
    with pytest.raises(RunError, match="failed: no process could be started for it: Resource temporarily unavailable; "
                                       "end others, or raise the limit"):
        Run(job.run).wait()


def test_whatever_a_fork_raises_it_never_goes_on_as_its_parent(monkeypatch: pytest.MonkeyPatch, job: Job) -> None:
    """Neither a rank as a supervisor, nor a supervisor as a warm parent."""
    def unwind(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    pids, fork = [], os.fork

    def remember() -> int:
        pids.append(fork())
        return pids[-1]

    monkeypatch.setattr(os, "fork", remember)
    monkeypatch.setattr("dplab.launcher.worker.main", unwind)
    monkeypatch.setattr("dplab.launcher.supervisor.main", unwind)
    supervisor.fork_rank(job, 0)
    warm.start(job)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [1, 1]


def test_a_supervisor_that_cannot_write(monkeypatch: pytest.MonkeyPatch) -> None:
    real = launching.start_run

    def start(job: Job, **options: Any) -> Identity:
        (job.run.path / "pids.json").mkdir()  # in the way of the supervisor's first file
        return real(job, **options)

    monkeypatch.setattr(launching, "start_run", start)
    run = dplab.launch(rank_programs.place, detach=False)
    survivors.poll(lambda: (run.path / "exit.json").exists(), "the supervisor has written the end", limit=60)
    (run.path / "pids.json").rmdir()
    with pytest.raises(RunError, match=r"failed: its supervisor could not go on: \[Errno 21\] Is a directory: .*; free "
                                       r"what is short there and launch again"):
        run.wait(60)
    assert "Traceback" in (run.path / "supervisor.log").read_text()


def test_a_run_that_cannot_be_stopped(monkeypatch: pytest.MonkeyPatch, job: Job) -> None:
    monkeypatch.setattr(RunDirectory, "state", lambda self: "running")
    monkeypatch.setattr("dplab.launcher.run._END_SECONDS", 0.0)
    with pytest.raises(RunError, match=r"run run is still running 0 s after it was asked to stop; see \S+\.log"):
        Run(job.run).stop(timeout=0)
    (job.run.path / "control" / "stop").unlink()
    (job.run.path / "control").rmdir()
    with pytest.raises(RunError, match="cannot be asked to stop: No such file or directory on control/stop; only its"):
        Run(job.run).stop(timeout=0)


def test_a_file_that_may_not_be_read(monkeypatch: pytest.MonkeyPatch, job: Job) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files, "open", refuse, raising=False)
    with pytest.raises(RunError, match=r"run\.json cannot be read: Permission denied; only the run's owner may"):
        job.run.info()


def test_timeline_without_the_lab_extra(monkeypatch: pytest.MonkeyPatch, job: Job) -> None:
    for name in [name for name in sys.modules if name == "plotly" or name.startswith("plotly.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.delitem(sys.modules, "dplab.views.figures", raising=False)
    with pytest.raises(UsageError, match=r"the timeline needs plotly\S*, which is not installed; install"):
        Run(job.run).timeline()
