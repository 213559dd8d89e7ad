"""Whether a run that failed starts again, with how many ranks; and its directory made ready for that."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dplab.launcher.failure import cause
from dplab.launcher.job import Job
from dplab.launcher.verdict import RankEnd
from dplab.telemetry.files import release, reserve
from dplab.telemetry.restarts import Restart, times, write_restarts


def again(job: Job, verdict: dict[str, Any], ends: Sequence[RankEnd]) -> tuple[Job | None, str | None]:
    """The job as it goes on, or None and, where that needs saying, why not; writes the restart down. OSError."""
    if verdict["state"] != "failed" or job.restart >= job.max_restarts:
        return None, f"it had been restarted {times(job.restart)}" if job.restart else None
    lost = sorted(end.rank for end in ends if end.died) if job.min_ranks is not None else []
    left = job.world_size - len(lost)
    if left < (job.min_ranks or 1):
        return None, (f"it was not restarted: rank{'s' * (len(lost) > 1)} {', '.join(map(str, lost))} of "
                      f"{job.world_size} died, and the {left} that are left are fewer than min_ranks={job.min_ranks}")
    why = cause(job.run, verdict)
    number = job.restart + 1
    for rank in range(job.world_size):
        directory = job.rank_directory(rank)
        (directory / "result.pkl").unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            (directory / "error.json").rename(directory / f"error-{number}.json")
        release(directory / "error.json")
        if rank < left:
            reserve(directory / "error.json")
    made = Restart(number=number, at=time.monotonic_ns(), wall=time.time_ns(), rank=verdict["first"],
                   ranks=job.world_size, world_size=left, why=why)
    write_restarts(job.run.path, [*job.run.restarts(), made])
    return replace(job, world_size=left, launched=job.launched or job.world_size, restart=number), None
