"""The writing end: a rank's recorder. A span costs one list append; lines leave in whole batches."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from dplab.telemetry.wishes import Capture, Pause

now = time.monotonic_ns


_STEP, _FIRST = "step train", ("data ", "forward ")
"""A step's range, and what begins one: a step is known as such only when it ends."""


class Ranges:
    """Spans as another profiler's ranges (NVTX: Nsight Systems shows them by our names), which must be begun when they
    begin. What was begun and never became a span (an exception came between) ends with its step."""

    def __init__(self, start: Callable[[str], Any], end: Callable[[Any], None]) -> None:
        self._start, self._end = start, end
        self._open: dict[int, Any] = {}
        self._step: Any = None

    def open(self, name: str) -> int:
        """Begins a range; the moment, in ns, is its name for `close`. The first batch or forward after a step begins
        the next step's too."""
        if self._step is None and name.startswith(_FIRST):
            self._step = self._start(_STEP)
        moment = now()
        while moment in self._open:
            moment += 1
        self._open[moment] = self._start(name)
        return moment

    def close(self, kind: str, moment: int) -> None:
        """Ends the range that began then, if one did; the end of a step ends whatever began before it did."""
        due = [moment] if kind != "step" else [begun for begun in self._open if begun <= now()]
        for begun in due:
            handle = self._open.pop(begun, None)
            if handle is not None:
                self._end(handle)
        if kind == "step" and self._step is not None:
            self._end(self._step)
            self._step = None


class Recorder:
    """Takes events and forgets them: what a program outside a run records into. A run's is a `FileRecorder`."""

    step = 0
    """Index of the step under way; the engine moves it on, every event carries it."""

    ranges: Ranges | None = None
    """where spans are shown to another profiler while they last; None where there is none"""

    def open(self, kind: str, name: str) -> int:
        """When a span begins: its `t0`. The profiler, if there is one, shows it from here on."""
        return now() if self.ranges is None else self.ranges.open(f"{kind} {name}")

    def span(self, kind: str, name: str, t0: int, t1: int, **attrs: Any) -> None:
        """Records a finished span; times from `now()`, or `open()`."""
        if self.ranges is not None:
            self.ranges.close(kind, t0)

    def gauge(self, name: str, **values: Any) -> None:
        """Records values at this moment."""

    def phase(self, phase: str, *, bucket: int = -1) -> None:
        """Notes in the state page where this rank stands (it survives `kill -9`)."""

    def flush(self) -> None:
        """Hands everything recorded so far to the file."""

    def stop_requested(self) -> bool:
        """True once somebody asked this run to end; the engine makes all ranks end at the same step."""
        return False

    folder: Path | None = None
    """The rank's directory; None for a program outside of a run."""

    def pause(self) -> Pause:
        """Whether somebody asked this run to wait, as it stands at this moment."""
        return Pause()

    def capture(self) -> Capture | None:
        """Which steps somebody asked to be profiled; None where nobody did."""
        return None


NULL = Recorder()
_of_thread: ContextVar[Recorder | None] = ContextVar("recorder", default=None)
_of_process: Recorder = NULL


def current() -> Recorder:
    """This rank's recorder (the thread's, in a thread world)."""
    return _of_thread.get() or _of_process


def install(recorder: Recorder, *, process: bool = False) -> None:
    """Makes `recorder` this rank's: of this thread's context, or of the whole process.

    Threads that torch starts (autograd's, one a device) have a context of their own, so a rank that is a
    process installs its recorder for all of it.
    """
    global _of_process
    if process:
        _of_process = recorder
    else:
        _of_thread.set(recorder)


def _forget() -> None:
    """A process that a rank forks (a DataLoader's worker) is no rank and records nothing."""
    install(NULL, process=True)
    _of_thread.set(None)


os.register_at_fork(after_in_child=_forget)
