"""Where a run stands that does not move: which rank misses which collective, for how long, in which line."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from dplab.diagnosis.findings import HANG, Finding
from dplab.errors import RunError
from dplab.telemetry.process import Identity
from dplab.telemetry.rundir import ENDED, RunDirectory
from dplab.telemetry.state import RankState

STILL_SECONDS = 5.0
"""No rank has noted anything for so long: it hangs, or every rank computes for that long at a time."""
STACK = "stack.txt"
"""Where a rank writes its stacks when it gets SIGUSR1."""
_STACK_SECONDS = 1.0
_LINES = 8
Stacks = dict[tuple[int, tuple[int, int]], str | None]
"""The stack of a rank by (rank, (step, sequence)) of the place where it stands."""


def hang(directory: RunDirectory, world_size: int, state: str, stacks: Stacks | None = None) -> Finding | None:
    """The finding, or None where a run in that state rests, or some rank has moved within `STILL_SECONDS`.

    All ranks note the same things in the same order, so the rank that has noted least is the one that is missed. It
    is asked for its stack; `stacks` remembers that from look to look, so that it is asked once where it stands.
    """
    if state in (*ENDED, "paused"):
        return None
    ranks, now = range(world_size), time.monotonic_ns()
    pages = {rank: _page(directory, rank) for rank in ranks}
    standing = [page for page in pages.values() if page is not None]
    if not standing or now - max(page.time for page in standing) < STILL_SECONDS * 1e9:
        return None
    seconds = (now - max(page.time for page in standing)) / 1e9
    far = {rank: (-1, 0) if page is None else (page.step, page.sequence) for rank, page in pages.items()}
    missing = [rank for rank in ranks if far[rank] == min(far.values())]
    others = [rank for rank in ranks if rank not in missing]
    who = f"ranks {others} wait for {missing}" if others else "all ranks stand at the same place"
    remembered, place = {} if stacks is None else stacks, (missing[0], far[missing[0]])
    if place not in remembered:
        remembered.clear()
        remembered[place] = _stack(directory, missing[0])
    stack = remembered[place]
    evidence = "; ".join(f"rank {rank}: {pages[rank] or 'has noted nothing yet'}" for rank in ranks)
    return Finding(kind=HANG, cost=1.0, what=f"nothing has moved for {seconds:.0f} s: {who}",
                   evidence=evidence if stack is None else f"{evidence}; rank {missing[0]} is at\n{stack}",
                   remedy="look at that line: every rank must run the same steps and units; a program that computes "
                          "for so long at a time does not hang")


def _page(directory: RunDirectory, rank: int) -> RankState | None:
    try:
        return directory.standing(rank)
    except RunError:      # a damaged page of one rank hides no other rank
        return None


def _stack(directory: RunDirectory, rank: int) -> str | None:
    """The rank's own Python stack, innermost call first; None where it does not answer."""
    processes: list[Identity] = (directory.processes() or {"ranks": []})["ranks"]
    path = directory.rank(rank) / STACK
    if rank >= len(processes) or not processes[rank].lives() or not path.exists():
        return None
    before = path.stat().st_size
    try:
        os.kill(processes[rank].pid, signal.SIGUSR1)
    except (ProcessLookupError, PermissionError):
        return None
    return _written(path, before)


def _written(path: Path, before: int) -> str | None:
    limit = time.monotonic() + _STACK_SECONDS
    text = ""
    while time.monotonic() < limit and not text.endswith("\n\n"):
        time.sleep(0.02)
        told = path.read_bytes()[before:].decode(errors="replace")
        if told and told == text:
            break
        text = told
    own = text.partition("Current thread")[2] or text
    lines = [line.strip() for line in own.splitlines() if line.strip().startswith("File")]
    return "\n".join(f"      {line}" for line in lines[:_LINES]) or None
