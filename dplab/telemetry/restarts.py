"""Restarts of a run: their record in the run directory, and which events each of them made void.

A run goes on from its last checkpoint, so the steps behind that are trained again: what was recorded of them before is
no part of the run any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dplab.telemetry.events import Event
from dplab.telemetry.files import damaged, read_json, write_json

FILE = "restarts.json"
_STANDING = ("log", "checkpoint", "restart")
"""Kinds of events that happened whatever became of their step."""


@dataclass(frozen=True, kw_only=True)
class Restart:
    """One restart. `at` in monotonic ns of the host, `wall` in ns since the epoch; `rank` failed first, of `ranks`;
    `world_size` ranks went on; `why` in a sentence."""

    number: int
    at: int
    wall: int
    rank: int | None
    ranks: int
    world_size: int
    why: str

    def event(self, step: int) -> Event:
        """It in the stream of events: `step` is the first that was trained again."""
        return Event("restart", "run", self.rank or 0, step, self.at, self.at,
                     {"number": self.number, "world_size": self.world_size, "why": self.why})


def read_restarts(run: Path) -> list[Restart]:
    """A run's restarts, in order; RunError where their file is damaged."""
    found = read_json(run / FILE)
    try:
        told = [Restart(**values) for values in found or ()]
    except TypeError as error:
        raise damaged(run / FILE, "it tells no restarts") from error
    if not all(_whole(each) for each in told):
        raise damaged(run / FILE, "it tells no restarts")
    return told


def _whole(told: Restart) -> bool:
    numbers = (told.number, told.at, told.wall, told.ranks, told.world_size, told.rank or 0)
    return all(type(each) is int and each >= 0 for each in numbers) and (
        1 <= told.world_size <= told.ranks and isinstance(told.why, str))


def times(count: int) -> str:
    """`once`, `2 times`."""
    return "once" if count == 1 else f"{count} times"


def write_restarts(run: Path, restarts: Sequence[Restart]) -> None:
    """Writes them whole; OSError."""
    write_json(run / FILE, [asdict(restart) for restart in restarts])


def continuous(events: list[Event], pending: list[Restart]) -> list[Event]:
    """`events` in order of time, without those that a restart made void, and with the restarts among them.

    A restart of `pending` is told, and taken from there, once the first step behind it has come.
    """
    for restart in list(pending):
        later: Any = [event.step for event in events if event.kind == "step" and event.t0 >= restart.at]
        if later:
            step = min(later)
            events = [event for event in events if event.t1 >= restart.at or event.step < step
                      or event.kind in _STANDING or event.name in ("utilization", "process")]
            events.append(restart.event(step))
            pending.remove(restart)
    events.sort(key=lambda event: event.t1)
    return events
