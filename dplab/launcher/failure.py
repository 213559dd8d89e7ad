"""How a failed run is told: the first failing rank, its own traceback, and only then what it dragged along."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dplab.errors import DplabError, RankFailed, RunError, RunFailed
from dplab.telemetry.files import damaged, read_json
from dplab.telemetry.rundir import DAMAGED, RunDirectory
from dplab.telemetry.state import under_way

_TAIL_LINES = 20
_LINE = 400
"""Characters of the one line that tells a failure; the whole message is in the error."""


def failure_of(directory: RunDirectory) -> DplabError:
    """The error of a failed run: RankFailed where a rank failed, RunFailed where the run itself did."""
    ended = directory.exit()
    if ended is None or ended["first"] is None:
        return RunFailed(f"run {directory.path} failed: {_own_reason(directory)}")
    rank = ended["first"]
    error = _error_of(directory, rank)
    head = cause(directory, ended)
    trace = str(error["traceback"]) if error is not None else _tail(directory.rank(rank) / "stderr.log")
    peers = [_peer(directory, other) for other in ended["collateral"]]
    told = f"{head}\n\n{trace.rstrip() or '(its stderr.log is empty)'}"
    if peers:
        told += "\n\nEnded because of it:\n" + "\n".join(peers)
    if ended["reason"]:
        told += f"\n\nAnd {ended['reason']}."
    returned = [end["rank"] for end in ended["ranks"] if end["how"] == "returned"]
    if returned and error is not None and error["type"].endswith("WireError"):
        told += (f"\n\nNothing failed on ranks {returned}: their function had returned while others still waited for "
                 f"them. Give every rank as many steps (dplab.loader does).")
    return RankFailed(f"{told}\n\nRun directory: {directory.path}", rank=rank, traceback=trace,
                      collateral=tuple(ended["collateral"]))


def cause(directory: RunDirectory, ended: dict[str, Any]) -> str:
    """How the first failing rank ended, in a sentence; `ended`: what stands in exit.json, or will."""
    rank, size = ended["first"], len(ended["ranks"])
    error = _error_of(directory, rank)
    if error is None:
        end = next(found for found in ended["ranks"] if found["rank"] == rank)
        return f"rank {rank} of {size} {_how(end)}, last seen {_standing(directory, rank)}"
    where = under_way(error["step"])
    return f"rank {rank} of {size} failed {where}: {error['type']}: {error['message']}"


def headline(directory: RunDirectory) -> str | None:
    """One line on why the run failed or cannot be read; None for one that did not or still may."""
    state = directory.state()
    if state == DAMAGED:
        return directory.damage()
    if state != "failed":
        return None
    try:
        error = failure_of(directory)
    except RunError as unreadable:
        return str(unreadable)
    line = _own_reason(directory) if isinstance(error, RunFailed) else str(error).partition("\n")[0]
    return line if len(line) <= _LINE else f"{line[:_LINE]}..."


def stop_reason(directory: RunDirectory) -> str | None:
    """One line on why and how the run was stopped; None for one that was not."""
    if directory.state() != "stopped":
        return None
    reason = (directory.exit() or {}).get("reason")
    return None if reason is None else str(reason)


def _own_reason(directory: RunDirectory) -> str:
    ended = directory.exit()
    if ended is None:
        return f"{directory.vanished()}; its logs and events so far are in that directory"
    return str(ended["reason"])


def _error_of(directory: RunDirectory, rank: int) -> dict[str, Any] | None:
    """A rank's error.json, None where it left none."""
    path = directory.rank(rank) / "error.json"
    error = read_json(path)
    if error is None or (isinstance(error, dict) and {"step", "type", "message", "traceback"} <= set(error)):
        return error
    raise damaged(path, "it tells no error")


def _how(end: dict[str, Any]) -> str:
    if end["signal"] == "SIGKILL":
        return "was killed by SIGKILL (by somebody, or by the system when memory ran out)"
    if end["signal"] is not None:
        return f"was ended by {end['signal']}"
    return f"ended with exit status {end['status']} before its function returned"


def _standing(directory: RunDirectory, rank: int) -> str:
    try:
        state = directory.standing(rank)
    except RunError:      # the page only says where; what happened must still be told
        return "at a place that its damaged state page does not tell"
    return "at its start, before it recorded anything" if state is None else str(state)


def _peer(directory: RunDirectory, rank: int) -> str:
    try:
        error = _error_of(directory, rank)
    except RunError:      # of a peer: it must not hide the first cause
        return f"  rank {rank}: its error.json is damaged"
    if error is None:
        return f"  rank {rank}: stopped {_standing(directory, rank)}"
    lines = str(error["message"]).splitlines() or [""]
    return f"  rank {rank}: {error['type']}: {lines[0]}"


def _tail(path: Path) -> str:
    if not path.is_file():
        return ""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-_TAIL_LINES:])
