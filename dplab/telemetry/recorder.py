"""The writing end: a rank's recorder. A span costs one list append; lines leave in whole batches."""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import Any

now = time.monotonic_ns


class Recorder:
    """Takes events and forgets them: what a program outside a run records into. A run's is a `FileRecorder`."""

    step = 0
    """Index of the step under way; the engine moves it on, every event carries it."""

    def span(self, kind: str, name: str, t0: int, t1: int, **attrs: Any) -> None:
        """Records a finished span; times from `now()`."""

    def gauge(self, name: str, **values: Any) -> None:
        """Records values at this moment."""

    def phase(self, phase: str, *, bucket: int = -1) -> None:
        """Notes in the state page where this rank stands (it survives `kill -9`)."""

    def flush(self) -> None:
        """Hands everything recorded so far to the file."""

    def stop_requested(self) -> bool:
        """True once somebody asked this run to end; the engine makes all ranks end at the same step."""
        return False


NULL = Recorder()
_current: ContextVar[Recorder] = ContextVar("recorder", default=NULL)


def current() -> Recorder:
    """This rank's recorder (the thread's, in a thread world)."""
    return _current.get()


def install(recorder: Recorder) -> None:
    """Makes `recorder` this rank's."""
    _current.set(recorder)
