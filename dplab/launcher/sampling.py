"""What the supervisor samples about its ranks, about twice a second, beside their own events."""

from __future__ import annotations

import time

from dplab.errors import RunError
from dplab.launcher.job import Job
from dplab.telemetry import utilization
from dplab.telemetry.event_file import EventFile

SECONDS = 0.5


class Sampling:
    """Writes `utilization.jsonl` of each rank; what stops it (a full disk) becomes a note, never the run's end."""

    def __init__(self, job: Job, pids: list[int]) -> None:
        self.notes: list[str] = []
        self._job = job
        self._pids = pids
        self._due = time.monotonic() + SECONDS / 5  # a short run has its gauges too
        self._ranks: list[tuple[EventFile, utilization.Sampler]] | None = None

    def sample_if_due(self) -> None:
        """Takes and writes the gauges of all ranks where it is time to."""
        now = time.monotonic()
        if now < self._due or self.notes:
            return
        self._due = now + SECONDS
        try:
            if self._ranks is None:
                self._ranks = self._open()
            for rank, (file, sampler) in enumerate(self._ranks):
                state = self._job.run.standing(rank)
                step, when = (state.step if state else 0), time.monotonic_ns()
                file.write([("gauge", name, step, when, when, dict(values))
                            for name, values in sampler.sample().items()])
        except (RunError, OSError) as error:
            self.notes.append(f"utilization is missing from here on: {error}")

    def close(self) -> None:
        """Takes no more of them."""
        for file, _ in self._ranks or ():
            file.close()
        self._ranks = []

    def _open(self) -> list[tuple[EventFile, utilization.Sampler]]:
        gpus = utilization.Gpus()  # after the last fork: NVML's handles stay out of the ranks
        visible = utilization.visible_gpus(self._job.environ, len(gpus))
        sources = utilization.describe(utilization.sources(gpus))
        return [(EventFile(self._job.rank_directory(rank) / "utilization.jsonl", rank, sources=sources),
                 utilization.Sampler(pid, rank, gpus, visible)) for rank, pid in enumerate(self._pids)]
