"""A run without processes: its reader hands out what a test has emitted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dplab.errors import RunError
from dplab.specs import RunSpec
from dplab.telemetry.events import Event
from dplab.telemetry.restarts import Restart


class FakeReader:
    """Hands out the events of its run once; raises what the run was told to raise."""

    problem: str | None = None
    more = False

    def __init__(self, run: FakeRun) -> None:
        self._run = run
        self._taken = 0

    def poll(self, limit: int | None = None) -> list[Event]:
        if self._run.broken:
            raise RunError(self._run.broken)
        fresh = self._run.emitted[self._taken:]
        self._taken += len(fresh)
        return fresh


class FakeRun:
    """State, failure, spec, path, reader and stop of a run."""

    def __init__(self, world_size: int = 2, *, state: str = "running", events: list[Event] | None = None) -> None:
        self.spec = RunSpec(function="tests:none", world_size=world_size, strategy="zero2")
        self.path = Path(f"/nowhere/run-{id(self)}")
        self.state = state
        self.emitted: list[Event] = list(events or [])
        self.broken: str | None = None
        self.failure: str | None = None
        self.stops = 0
        self.asked: list[str] = []
        self.relaunchable = False
        self.restarts: list[Restart] = []

    def reader(self, *, recent: bool = False, partial: bool = False) -> FakeReader:
        return FakeReader(self)

    def request_stop(self) -> None:
        self.stops += 1

    def request_pause(self) -> None:
        self.asked.append("pause")

    def request_resume(self) -> None:
        self.asked.append("resume")

    def request_step(self) -> None:
        self.asked.append("step")

    def request_profile(self) -> None:
        self.asked.append("profile")

    def request_snapshot(self) -> None:
        self.asked.append("snapshot")

    def relaunch(self, strategy: str | None = None) -> FakeRun:
        self.asked.append(f"relaunch {strategy}")
        if not self.relaunchable:
            raise RunError("what the run called is not kept any more")
        self.state = "stopped"
        new = FakeRun(self.spec.world_size)
        new.spec = replace(new.spec, strategy=strategy)
        return new

    def stop(self) -> None:
        self.request_stop()
