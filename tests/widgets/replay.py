"""A run that plays the synthetic events in real time: a picture that moves, without processes."""

from __future__ import annotations

import time

from dplab.telemetry.events import Event
from tests.views import synthetic
from tests.widgets.fake import FakeRun


class ReplayRun(FakeRun):
    """`steps` steps at `PERIOD` ms each, from the moment it is made; then it is finished, or stopped before."""

    def __init__(self, *, world_size: int = 2, steps: int = 400) -> None:
        self._began = time.monotonic()
        self._events = sorted(synthetic.run_events(world_size, steps), key=lambda event: event.t1)
        super().__init__(world_size)

    @property
    def emitted(self) -> list[Event]:
        now = synthetic.START + int((time.monotonic() - self._began) * 1e9)
        if self.stops:
            now = min(now, self._stopped)
        return [event for event in self._events if event.t1 <= now]

    @emitted.setter
    def emitted(self, events: list[Event]) -> None:
        pass

    @property
    def state(self) -> str:
        if self.stops:
            return "stopped"
        return "finished" if len(self.emitted) == len(self._events) else "running"

    @state.setter
    def state(self, value: str) -> None:
        pass

    def request_stop(self) -> None:
        self._stopped = synthetic.START + int((time.monotonic() - self._began) * 1e9)
        super().request_stop()
