"""Between two steps: where a rank does what somebody asked of the run. It pauses, records steps, ends.

All ranks come here at the same step and have agreed, through the control message, on whether they pause or end.
"""

from __future__ import annotations

import time

import torch

from dplab.core.capture import Captures
from dplab.errors import RunStopped
from dplab.telemetry.recorder import Ranges, Recorder, now
from dplab.telemetry.wishes import PAUSED

LOOK_SECONDS = 0.02
"""How often a paused rank looks whether it may go on."""


class Boundary:
    """One rank's; `captures` are the recordings of this rank."""

    def __init__(self, recorder: Recorder, device: torch.device) -> None:
        self.recorder = recorder
        self.captures = Captures(recorder, device)
        if device.type == "cuda" and recorder.ranges is None:
            recorder.ranges = Ranges(torch.cuda.nvtx.range_start, torch.cuda.nvtx.range_end)

    def cross(self, *, stop: bool, pause: bool) -> None:
        """Returns when the next step may begin. What the rank waited is a pause, which no step counts.

        Raises RunStopped, on all ranks, where the run is to end.
        """
        self.captures.ended(self.recorder.step + 1)
        if pause and not stop:
            began = self.recorder.open("pause", "asked")
            stop = self._wait()
            self.recorder.span("pause", "asked", began, now())
        if stop:
            self.captures.close()
            self.recorder.flush()
            raise RunStopped(f"the run was asked to stop; it ended after step {self.recorder.step}")
        self.captures.begins(self.recorder.step + 1)

    def _wait(self) -> bool:
        """Waits while the pause holds; True where the run was asked to stop meanwhile.

        Who has seen the pause released has gone on, and ends at the next step that all agree on. So a stop counts here
        only where the pause still holds after it was seen: then no rank has gone on, and none will.
        """
        recorder, steps = self.recorder, self.recorder.step
        if not recorder.pause().holds(steps):
            return False
        recorder.phase(PAUSED)
        recorder.flush()
        while recorder.pause().holds(steps):
            if recorder.stop_requested() and recorder.pause().holds(steps):
                return True
            time.sleep(LOOK_SECONDS)
        recorder.phase("resumed")
        return False
