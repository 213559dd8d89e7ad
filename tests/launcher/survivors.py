"""Looks for whatever a run may leave behind, and waits for conditions without sleeping blindly."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from dplab.telemetry.rundir import RunDirectory


def poll(condition: Callable[[], bool], what: str, *, limit: float = 20.0) -> None:
    """Waits until `condition` holds; fails with `what` after `limit` seconds."""
    until = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < until, f"not within {limit:g} s: {what}"
        time.sleep(0.02)


def processes(run: Path) -> list[psutil.Process]:
    """Processes of a run that live or are zombies: those of its supervisor's session."""
    found = RunDirectory(run).processes()
    if found is None:
        return []
    session = found["supervisor"].pid
    return [process for process in psutil.process_iter() if _session(process.pid) == session]


def assert_none(run: Path, *, limit: float = 10.0) -> None:
    """Fails if a process of the run is still there after `limit` seconds."""
    poll(lambda: not processes(run), f"no process of {run} is left, there are {processes(run)}", limit=limit)


def rank_pids(run: Path, world_size: int) -> list[int]:
    """Pids of the ranks, once all of them have started and are in their function."""
    directory = RunDirectory(run)

    def started() -> bool:
        known = (directory.processes() or {"ranks": []})["ranks"]      # ranks may be quicker than who writes them down
        return len(known) == world_size and all(
            (directory.rank(rank) / "ready").exists() for rank in range(world_size))

    poll(started, f"{world_size} ranks of {run} are ready, logs: {_logs(run)}", limit=60)
    found = directory.processes()
    assert found is not None
    return [identity.pid for identity in found["ranks"]]


def supervisor_pid(run: Path) -> int:
    found = RunDirectory(run).processes()
    assert found is not None
    return found["supervisor"].pid


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def _logs(run: Path) -> str:
    return "\n".join(path.read_text() for path in run.glob("rank-*/stderr.log"))
