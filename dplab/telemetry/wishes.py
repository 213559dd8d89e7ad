"""What somebody asks of a run while it goes: files in `control/` of its directory, which its ranks look at.

    stop        end (the run directory writes and reads it)
    pause       {"asked": bool, "go": steps}: wait before the next step, but first go on until `go` steps have ended
    profile     {"first": step, "last": step, "memory": bool}: record these steps, counted from 1, with torch's profiler

A pause begins at a step that all ranks agree on (their control message); from then on each looks at the file by
itself. Since a rank waits while `asked` and its own steps have reached `go`, and `go` only ever grows, ranks that look
at different moments still wait, and go on, at the same step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from dplab.errors import RunError
from dplab.telemetry.files import read_json, write_json

PAUSED = "paused"
"""Phase of a rank that waits because somebody asked for it."""


class Pause(NamedTuple):
    """`asked`: wait before the next step; `go`: but not before so many steps have ended."""

    asked: bool = False
    go: int = 0

    def holds(self, steps: int) -> bool:
        """True for a rank that has ended `steps` steps."""
        return self.asked and steps >= self.go


class Capture(NamedTuple):
    """Steps `first` to `last`, counted from 1, both included, are recorded by torch's profiler or memory's snapshot."""

    first: int
    last: int
    memory: bool = False

    @property
    def name(self) -> str:
        """Of the file that each rank leaves in its directory."""
        what = "memory" if self.memory else "profile"
        return f"{what}-{self.first}-{self.last}.{'pickle' if self.memory else 'json'}"


def read_pause(control: Path) -> Pause:
    """The wish as it stands; no pause where there is none, or where the file is damaged: a run must not hang on it."""
    found = _read(control / "pause")
    try:
        return Pause(bool(found["asked"]), int(found["go"])) if found else Pause()
    except (KeyError, TypeError, ValueError):
        return Pause()


def write_pause(control: Path, pause: Pause) -> None:
    """Replaces the wish. RunError where it cannot be written."""
    _write(control / "pause", pause._asdict(), "paused or resumed")


def read_capture(control: Path) -> Capture | None:
    """The steps that are to be recorded; None where there are none, or where the file is damaged."""
    found = _read(control / "profile")
    try:
        return Capture(int(found["first"]), int(found["last"]), bool(found["memory"])) if found else None
    except (KeyError, TypeError, ValueError):
        return None


def write_capture(control: Path, capture: Capture) -> None:
    """Asks for a recording; it replaces one that was asked for before. RunError where it cannot be written."""
    _write(control / "profile", capture._asdict(), "profiled")


def _read(path: Path) -> Any:
    try:
        return read_json(path)
    except RunError:
        return None


def _write(path: Path, value: dict[str, Any], what: str) -> None:
    try:
        write_json(path, value)
    except OSError as error:
        raise RunError(f"run {path.parents[1]} cannot be {what}: {error.strerror} on control/{path.name}; only its "
                       f"owner may, on a disk that is not full") from error
