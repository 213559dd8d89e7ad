"""Steps recorded by torch's own instruments on request: a profiler trace, or a snapshot of CUDA's memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dplab.telemetry.recorder import Recorder, now
from dplab.telemetry.wishes import Capture

_ENTRIES = 100_000
"""Allocations and frees that a memory snapshot remembers."""


class Captures:
    """The recordings of one rank, one after the other. A recording that fails is told in the log, and no step fails."""

    def __init__(self, recorder: Recorder, device: torch.device) -> None:
        self._recorder, self._device = recorder, device
        self._asked: Capture | None = None
        self._under_way: Any = None

    def ended(self, step: int) -> None:
        """A step has ended and `step`, counted from 1, comes next: writes the recording that was to go so far."""
        folder = self._recorder.folder
        if folder is not None and self._under_way is not None and self._asked is not None and step > self._asked.last:
            self._end(folder)

    def begins(self, step: int) -> None:
        """`step` begins: starts the recording that is asked for."""
        folder = self._recorder.folder
        if folder is None:
            return
        asked = self._recorder.capture()
        if asked is None or asked == self._asked or step < asked.first:
            return
        if self._under_way is not None:
            self._end(folder)
        self._asked = asked
        if step <= asked.last:
            self._begin(asked)
        else:
            self._say(f"{_steps(asked)} are over and were not recorded; ask for later ones")

    def close(self) -> None:
        """The program ends: what is under way is written with the steps that there were."""
        folder = self._recorder.folder
        if self._under_way is not None and folder is not None:
            self._end(folder)

    def _begin(self, asked: Capture) -> None:
        try:
            if asked.memory:
                if self._device.type != "cuda":
                    self._say("memory snapshot: not measurable here, it is of CUDA's allocator")
                    return
                torch.cuda.memory._record_memory_history(max_entries=_ENTRIES)
                self._under_way = asked
            else:
                # started in the thread that trains: autograd's threads are recorded with it
                self._under_way = torch.profiler.profile()
                self._under_way.start()
        except RuntimeError as error:      # another profiler is at work in this process
            self._under_way = None
            self._say(f"{_steps(asked)} are not recorded: {error}")
            return
        self._say(f"recording {_steps(asked)}")

    def _end(self, folder: Path) -> None:
        asked, under_way, self._under_way = self._asked, self._under_way, None
        assert asked is not None
        path, partial = folder / asked.name, folder / f".{asked.name}"
        began = self._recorder.open("pause", "capture")
        try:
            if asked.memory:
                torch.cuda.memory._dump_snapshot(str(partial))  # type: ignore[no-untyped-call]
                torch.cuda.memory._record_memory_history(enabled=None)
            else:
                under_way.stop()
                under_way.export_chrome_trace(str(partial))
            partial.rename(path)
            self._say(f"{_steps(asked)} are recorded in {path}")
        except (RuntimeError, OSError) as error:
            partial.unlink(missing_ok=True)
            self._say(f"{path.name} could not be written: {error}")
        self._recorder.span("pause", "capture", began, now())

    def _say(self, text: str) -> None:
        moment = now()
        self._recorder.span("log", "capture", moment, moment, text=text)
        self._recorder.flush()


def _steps(asked: Capture) -> str:
    return f"steps {asked.first} to {asked.last}"
