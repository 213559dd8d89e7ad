"""How a failed run is told: the first failing rank, its own traceback, and only then what it dragged along."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dplab.errors import DplabError, RankFailed, RunError
from dplab.telemetry.rundir import RunDirectory, read_json
from dplab.telemetry.state import read_state

_TAIL_LINES = 20


def failure_of(directory: RunDirectory) -> DplabError:
    """The error of a failed run: RankFailed where a rank failed, RunError where the run itself did."""
    ended = directory.exit()
    if ended is None:
        return RunError(f"run {directory.path} failed: {directory.vanished()}; "
                        f"its logs and events so far are in that directory")
    rank = ended["first"]
    if rank is None:
        return RunError(f"run {directory.path} failed: {ended['reason']}")
    error = read_json(directory.rank(rank) / "error.json")
    end = next(found for found in ended["ranks"] if found["rank"] == rank)
    size = len(ended["ranks"])
    if error is not None:
        head = f"rank {rank} of {size} failed in step {error['step']}: {error['type']}: {error['message']}"
        trace = str(error["traceback"])
    else:
        head = f"rank {rank} of {size} {_how(end)}, last seen at {_standing(directory, rank)}"
        trace = _tail(directory.rank(rank) / "stderr.log")
    peers = [_peer(directory, other) for other in ended["collateral"]]
    told = f"{head}\n\n{trace.rstrip() or '(its stderr.log is empty)'}"
    if peers:
        told += "\n\nEnded because of it:\n" + "\n".join(peers)
    return RankFailed(f"{told}\n\nRun directory: {directory.path}", rank=rank, traceback=trace,
                      collateral=tuple(ended["collateral"]))


def headline(directory: RunDirectory) -> str | None:
    """One line on why the run did not finish; None for one that did or still may."""
    if directory.state() == "failed":
        return str(failure_of(directory)).partition("\n")[0]
    ended = directory.exit()
    return None if ended is None else ended["reason"]


def _how(end: dict[str, Any]) -> str:
    if end["signal"] == "SIGKILL":
        return "was killed by SIGKILL (by somebody, or by the system when memory ran out)"
    if end["signal"] is not None:
        return f"was ended by {end['signal']}"
    return f"ended with exit status {end['status']} before its function returned"


def _standing(directory: RunDirectory, rank: int) -> str:
    state = read_state(directory.rank(rank) / "state")
    return "its start, before it recorded anything" if state is None else str(state)


def _peer(directory: RunDirectory, rank: int) -> str:
    error = read_json(directory.rank(rank) / "error.json")
    if error is None:
        return f"  rank {rank}: stopped at {_standing(directory, rank)}"
    lines = str(error["message"]).splitlines() or [""]
    return f"  rank {rank}: {error['type']}: {lines[0]}"


def _tail(path: Path) -> str:
    if not path.exists():
        return ""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-_TAIL_LINES:])
