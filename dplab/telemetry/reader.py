"""The reading end: events of a run as they come, the same for a live run, a re-attached one and one long over.

A byte cursor a file; whole lines only, so a torn last line waits until it is whole (or for ever, where its
writer was killed in the middle of it).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from dplab.errors import RunError
from dplab.specs import RunSpec
from dplab.telemetry.events import SCHEMA, Event
from dplab.telemetry.restarts import Restart, continuous, read_restarts
from dplab.telemetry.rundir import RunDirectory, require_run
from dplab.telemetry.state import RankState
from dplab.telemetry.thinning import RECENT_FILES

EVENT_FILES = ("events.jsonl", "utilization.jsonl")
"""Event files of a rank: its own, and what the supervisor sampled about it."""


_HEADER = ("schema", "monotonic", "wall")
"""Whole numbers that every header holds."""


class EventCursor:
    """Reads one event file from where it last stopped."""

    def __init__(self, path: Path, rank: int, *, replaced: bool = False) -> None:
        """`replaced`: the file may be another one from one call to the next."""
        self._replaced = replaced
        self.path = path
        self.rank = rank
        self.header: dict[str, Any] | None = None
        self.problem: str | None = None
        """why nothing more is read of it: a line is no event; None where there is none such"""
        self.more = False
        """whether the last call left something for the next"""
        self._first = b""
        self._offset = 0

    def poll(self, limit: int | None = None) -> list[Event]:
        """Events of the lines that became whole since the last call, up to one that is none (`problem`). `limit`: of so
        many bytes at most. RunError where the file cannot be read, or is another version's."""
        self.more = False
        try:
            if os.stat(self.path).st_size == self._offset and not self._replaced:
                return []
            with open(self.path, "rb") as file:
                if self._replaced and self._first and file.readline() != self._first:
                    self._offset, self.header, self.problem = 0, None, None
                if self.problem is not None:
                    return []
                file.seek(self._offset)
                data = file.read(-1 if limit is None else limit)
                if limit is not None and len(data) == limit:
                    data += file.readline()
                    self.more = True
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise RunError(f"{self.path} cannot be read: {error.strerror}; only the run's owner may") from error
        end = data.rfind(b"\n") + 1
        lines, begin = data[:end].split(b"\n")[:-1], self._offset
        if lines and self.header is None:
            self.header, self._first = self._read_header(lines[0]), lines.pop(0) + b"\n"
            begin += len(self._first)
        events = self._parse(lines, begin)
        self._offset += end
        return events

    def _parse(self, lines: list[bytes], begin: int) -> list[Event]:
        """Events of lines, the first of which begins at that byte."""
        rank = self.rank
        try:
            # One call for all lines is several times faster than one a line.
            events = [Event(kind, name, rank, step, t0, t1, attrs)
                      for kind, name, step, t0, t1, attrs in json.loads(b"[" + b",".join(lines) + b"]")]
            if all(map(_is_event, events)):
                return events
        except (ValueError, TypeError, RecursionError):
            pass  # once more, line by line, to say which one it is
        events = []
        for line in lines:
            try:
                event = Event.from_line(line, rank)
                if not _is_event(event):
                    raise ValueError("a field of another type")
                events.append(event)
                begin += len(line) + 1
            except (ValueError, RecursionError):
                self.problem = (f"{self.path} is damaged behind byte {begin}: {line[:80]!r} is not an event; "
                                f"the lines before it are good, cut the file there to read them")
                break
        return events

    def _read_header(self, line: bytes) -> dict[str, Any]:
        try:
            header = json.loads(line)
        except ValueError:
            header = None
        if not isinstance(header, dict) or not all(isinstance(header.get(name), int) for name in _HEADER):
            raise RunError(f"{self.path} does not start with a header; it is not an event file of a run")
        if header["schema"] != SCHEMA:
            raise RunError(f"{self.path} was written with schema {header['schema']}, this dplab reads schema {SCHEMA}; "
                           f"read it with the dplab that wrote it")
        return header


def _is_event(event: Event) -> bool:
    return (type(event.attrs) is dict and type(event.t1) is int and type(event.t0) is int
            and type(event.step) is int and type(event.name) is str and type(event.kind) is str)


class RunReader:
    """Reads a run directory; any number of readers, in any process, at any time.

    `path`: a run's directory. `recent`: also the spans of the last few hundred steps of a long run, of which only some
    stay (`thinning`). `partial`: what can be read is handed out, and `problem` says what cannot. RunError where it is
    not a run.
    """

    def __init__(self, path: str | os.PathLike[str], *, recent: bool = False, partial: bool = False) -> None:
        self._partial = partial
        self.problem: str | None = None
        """why some of the run cannot be read, as the last `poll` found; None where all can"""
        self._files = (*EVENT_FILES, *(RECENT_FILES if recent else ()))      # those last: spans may be ahead of a step
        self.directory: RunDirectory = require_run(Path(path))
        self._spec = self.directory.spec
        self._cursors: dict[tuple[int, str], EventCursor] = {}
        self._restarts = 0
        self._pending: list[Restart] = []
        self._held: list[Event] = []
        self.more = False
        """whether the last `poll` left something for the next"""

    @property
    def path(self) -> Path:
        """The run's directory."""
        return self.directory.path

    @property
    def spec(self) -> RunSpec:
        """What `launch` was asked for."""
        return self._spec

    @property
    def state(self) -> str:
        """starting, running, stopping; finished, failed, stopped, damaged."""
        return self.directory.state()

    @property
    def ranks(self) -> list[int]:
        """Ranks that have a directory by now, in order."""
        return sorted(int(path.name[5:]) for path in self.path.glob("rank-*") if path.name[5:].isdigit())

    def poll(self, limit: int | None = None) -> list[Event]:
        """Events of all ranks that are new since the last call, by the time at which they ended.

        `limit`: of so many bytes a file at most, as far as all ranks' go; `more` says whether to call again. So whoever
        folds them needs little memory, however long the run.

        Of a run that was restarted one continuous run: steps that were trained again count as they were the last
        time, as far as they come in one call. An event `restart` says from which step on; who has kept earlier ones
        drops them from there.
        """
        self.problem = None
        events, self._held = self._held, []
        ends: list[int] = []
        restarts = read_restarts(self.path)
        self._pending += restarts[self._restarts:]
        self._restarts = len(restarts)
        for rank in self.ranks:
            for name in self._files:
                key = (rank, name)
                if key not in self._cursors:
                    self._cursors[key] = EventCursor(self.directory.rank(rank) / name, rank,
                                                     replaced=name in RECENT_FILES)
                found = self._read(self._cursors[key], limit)
                events += found
                if self._cursors[key].more:
                    ends.append(found[-1].t1 if found else -1)
        if self.problem is not None and not self._partial:
            raise RunError(self.problem)
        self.more = bool(ends)
        if ends:
            self._held = [event for event in events if event.t1 > min(ends)]
            events = [event for event in events if event.t1 <= min(ends)]
        return continuous(events, self._pending)

    def _read(self, cursor: EventCursor, limit: int | None) -> list[Event]:
        """One file's new events; what is wrong with it is noted, so that it hides no other file's."""
        try:
            events, problem = cursor.poll(limit), cursor.problem
        except RunError as error:
            events, problem = [], str(error)
        self.problem = self.problem or problem
        return events

    def header(self, rank: int, *, file: str = "events.jsonl") -> dict[str, Any] | None:
        """A rank's header line: `monotonic` and `wall` are one moment in ns, `host`, `pid`; None before it is there.

        With `file="utilization.jsonl"`: the supervisor's, whose `sources` say what can be measured where it runs.
        """
        cursor = self._cursors.get((rank, file))
        if cursor is None or cursor.header is None:
            cursor = EventCursor(self.directory.rank(rank) / file, rank)
            cursor.poll()
        return cursor.header

    def wall_clock(self, event: Event) -> float:
        """Seconds since the epoch at which an event ended; of a rank whose header is there."""
        header = self.header(event.rank)
        if header is None:
            raise RunError(f"rank {event.rank} of {self.path} has no header yet, so its clock has no anchor")
        return float(header["wall"] + event.t1 - header["monotonic"]) / 1e9

    def standing(self, rank: int) -> RankState | None:
        """Where a rank stands, or stood last: its state page."""
        return self.directory.standing(rank)
