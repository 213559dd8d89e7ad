"""A rank's recorder: appends to a list, and hands whole lines to `events.jsonl` a few times a second.

Cost where training runs: one tuple and one list append a span. A daemon thread encodes and writes what has
gathered, so that a long step, or one that hangs, is on disk without the rank's help. `flush` does the same at
once: at a step's end, before a barrier, when an exception goes up. Lines that were written survive `kill -9` of
the rank (they are the kernel's then); nothing is ever fsynced.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from dplab.telemetry.event_file import EventFile, Record
from dplab.telemetry.recorder import Recorder
from dplab.telemetry.state import StatePage
from dplab.telemetry.thinning import RecentFiles, Thinning
from dplab.telemetry.wishes import Capture, Pause, read_capture, read_pause

FLUSH_SECONDS = 0.2


class FileRecorder(Recorder):
    """Records into the directory of one rank: events.jsonl, the recent spans (`thinning`) and the state page.

    `directory`: the rank's (`rank-<r>`); its parent is the run's. An error of the writing thread (a full disk)
    is raised by the next `flush`, in the rank, so that it ends the run and tells why.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self._events: list[Record] = []
        self._append = self._events.append
        self._file = EventFile(directory / "events.jsonl", rank)
        self._recent, self._thinning = RecentFiles(directory, rank), Thinning()
        self._state = StatePage(directory / "state")
        self.folder = directory
        self._control = directory.parent / "control"
        self._stop = self._control / "stop"
        self._wishes = {name: self._control / name for name in ("pause", "profile")}
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._flush_often, name="dplab-recorder", daemon=True)
        self._thread.start()
        reference = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _detach(reference()))

    def span(self, kind: str, name: str, t0: int, t1: int, **attrs: Any) -> None:
        if self.ranges is not None:
            self.ranges.close(kind, t0)
        self._append((kind, name, self.step, t0, t1, attrs))

    def gauge(self, name: str, **values: Any) -> None:
        now = time.monotonic_ns()
        self._append(("gauge", name, self.step, now, now, values))

    def phase(self, phase: str, *, bucket: int = -1) -> None:
        self._state.write(self.step, phase, bucket)

    def flush(self) -> None:
        """Writes what was recorded so far; RunError if that, or an earlier write of the thread, failed."""
        with self._lock:
            if self._error is not None:
                raise self._error
            self._write()

    def stop_requested(self) -> bool:
        return _there(self._stop)

    def pause(self) -> Pause:
        return read_pause(self._control) if _there(self._wishes["pause"]) else Pause()

    def capture(self) -> Capture | None:
        return read_capture(self._control) if _there(self._wishes["profile"]) else None

    def close(self) -> None:
        """Ends the thread, writes the rest and closes the file."""
        self._closing.set()
        self._thread.join()
        try:
            self.flush()
        finally:
            self._recent.close()
            self._file.close()

    def _write(self) -> None:
        # Appending goes on in other threads meanwhile: take a count, copy, delete, each atomic on a list.
        count = len(self._events)
        if count:
            records = self._events[:count]
            del self._events[:count]
            kept, recent = self._thinning.part(records)
            try:
                self._recent.write(recent)      # first: who sees a step finds its spans
            finally:
                self._file.write(kept)

    def _flush_often(self) -> None:
        while not self._closing.wait(FLUSH_SECONDS):
            with self._lock:
                try:
                    self._write()
                except Exception as error:  # also a value that is no JSON: raised where the rank flushes
                    self._error = error
                    return

    def _detach(self) -> None:
        self._append = _ignore
        self._events.clear()
        self._lock = threading.Lock()  # the copied one may be held by the thread that did not come along
        self._state.detach()


def _there(path: Path) -> bool:
    try:
        os.stat(path)
    except OSError:
        return False
    return True


def _detach(recorder: FileRecorder | None) -> None:
    if recorder is not None:
        recorder._detach()


def _ignore(record: Record) -> None:
    """Stands in for the list's append in a process that is no rank."""
