"""`doctor`: what this machine can do, or where each rank of a run stands."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dplab.commands.base import Answer, Verbs, count, verb, whole_number
from dplab.errors import DplabError, UsageError

if TYPE_CHECKING:
    from dplab.telemetry.reader import RunReader

_PACKAGES = ("dplab", "torch", "numpy", "psutil", "nvidia-ml-py", "cloudpickle", "jupyterlab", "ipywidgets",
             "anywidget", "plotly", "scikit-learn", "deepspeed")


def add(verbs: Verbs) -> None:
    """Declares the verb."""
    parser = verb(verbs, "doctor", doctor, about="what this machine can do, or where a run stands and what would help",
                  example="dplab doctor RUN")
    parser.add_argument("run_id", nargs="?", metavar="RUN",
                        help="a run's id, the beginning of one, or a directory (default: the machine)")
    parser.add_argument("--races", action="store_true",
                        help="hunt for races: train with random delays everywhere and compare every bit")
    parser.add_argument("--drill", action="store_true",
                        help="let ranks of small runs fail in nine ways, and judge how each run ends")
    parser.add_argument("--seeds", type=whole_number, help="delayed runs a strategy, with --races (default: 5); "
                        "faults, with --drill (default: 9, one of each kind)")


def doctor(args: argparse.Namespace) -> Answer:
    """The machine, one run, a race hunt or a fault drill."""
    if args.drill:
        if args.run_id is not None or args.races:
            raise UsageError("doctor --drill lets runs of its own fail; leave RUN and --races out")
        return _drill(args.seeds or 9)
    if args.races:
        if args.run_id is not None:
            raise UsageError(f"doctor {args.run_id} --races: a hunt trains a model of its own; leave the run out")
        return _races(args.seeds or 5)
    if args.seeds is not None:
        raise UsageError("--seeds is the number of delayed runs of a race hunt, or of faults of a drill; give --races "
                         "or --drill too, or leave it out")
    return _machine() if args.run_id is None else _run(args.run_id)


def _races(seeds: int) -> Answer:
    from dplab.workloads.races import hunt

    lines, found = [], []
    strategies = ("ddp", "zero1", "zero2", "zero3", "zero2+accum2", "zero3+accum2", "zero3+bf16")
    for race in hunt(strategies, seeds=seeds):
        if race.parameter is not None:
            found.append({"strategy": race.strategy, "seed": race.seed, "parameter": race.parameter})
        if race.seed == seeds - 1:
            races = [each for each in found if each["strategy"] == race.strategy]
            told = f"{len(races)} of {count(seeds, 'run')} differ, first in {races[0]['parameter']}" if races else (
                f"{count(seeds, 'run')}, no bit differs")
            lines.append(f"{race.strategy:14}{told}")
    return Answer({"seeds": seeds, "strategies": list(strategies), "races": found}, "\n".join(lines),
                  status=int(bool(found)))


def _drill(seeds: int) -> Answer:
    from dplab.workloads.drill import drill

    rows, lines = [], []
    for outcome in drill(range(seeds)):
        rows.append(outcome.to_dict())
        judged = f"not tried: {outcome.skipped}" if outcome.skipped else "; ".join(outcome.problems) or "good"
        lines.append(f"{judged:8}{outcome.seconds:5.1f} s  {outcome.trial}: {outcome.told}")
        print(lines[-1], file=sys.stderr, flush=True)
    bad = [row for row in rows if row["problems"]]
    lines.append(f"{count(len(rows) - len(bad), 'trial')} of {len(rows)} ended as they must")
    return Answer({"trials": rows}, "\n".join(lines), status=int(bool(bad)))


def _machine() -> Answer:
    import torch
    import torch.distributed as dist

    from dplab.telemetry.rundir import runs_root
    from dplab.telemetry.utilization import sources
    from dplab.wire.world import without_shm

    root = runs_root()
    there = next(path for path in (root, *root.parents) if path.exists())
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    data: dict[str, Any] = {
        "python": platform.python_version(), "platform": platform.platform(), "packages": _versions(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpus": gpus,
        "backends": [name for name, there in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available()),
                                              ("shm", not without_shm())) if there],
        "without_shm": without_shm(),
        "shm_bytes": shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None,
        "runs": str(root), "runs_free_bytes": shutil.disk_usage(there).free,
        "gauges": {name: source.reason or "measurable" for name, source in sources().items()},
    }
    lines = [f"python      {data['python']} on {data['platform']}",
             f"cores       {data['cores']}: ranks beyond that share them",
             f"gpus        {', '.join(gpus) or 'none that torch can use'}",
             f"backends    {', '.join(data['backends'])}" + (f"; no shm: {without_shm()}" if without_shm() else ""),
             "/dev/shm    " + ("absent" if data["shm_bytes"] is None else f"{data['shm_bytes'] / 1e9:.1f} GB"),
             f"runs        {data['runs']}, {data['runs_free_bytes'] / 1e9:.1f} GB free there",
             "gauges      " + "\n            ".join(_by_reason(data["gauges"])),
             "packages    " + ", ".join(f"{name} {version or 'not installed'}"
                                        for name, version in data["packages"].items())]
    return Answer(data, "\n".join(lines))


def _by_reason(gauges: dict[str, str]) -> list[str]:
    """Gauges that share an answer on one line."""
    return [f"{', '.join(name for name, told in gauges.items() if told == reason)}: {reason}"
            for reason in dict.fromkeys(gauges.values())]


def _run(run_id: str) -> Answer:
    from dplab.launcher.run import attach
    from dplab.telemetry.process import Identity
    from dplab.telemetry.rundir import RunDirectory

    run = attach(run_id)
    directory, reader = RunDirectory(run.path), run.reader()
    processes: list[Identity] = (directory.processes() or {"ranks": []})["ranks"]
    ranks, places = [], []
    for rank in reader.ranks:
        process = processes[rank] if rank < len(processes) else None
        lives = process is not None and process.lives()
        told, place = _standing(reader, rank, lives)
        ranks.append({"rank": rank, "lives": lives, "pid": None if process is None else process.pid, **told})
        places.append(f"  rank {rank} ({f'process {process.pid}' if process and lives else 'ended'}): {place}")
    diagnosis = run.diagnose()
    data = {"id": run.id, "state": run.state, "failure": run.failure, "stopped_by": run.stopped_by, "ranks": ranks,
            "run_dir": str(run.path), "diagnosis": diagnosis.to_dict()}
    lines = [f"run {run.id}: {': '.join(filter(None, (run.state, run.failure or run.stopped_by)))}", *places]
    # of a run that failed before there was anything to judge nobody should read that all is well
    judged = diagnosis.findings or data["state"] != "failed"
    return Answer(data, "\n".join([*lines, "", str(diagnosis) if judged else diagnosis.summary]))


def _standing(reader: RunReader, rank: int, lives: bool) -> tuple[dict[str, Any], str]:
    """Where a rank stands, or was last seen if it has ended: as values (`step`: steps that it has ended), in words."""
    try:
        standing = reader.standing(rank)
    except DplabError as error:      # a damaged page of one rank hides no other rank
        return {"note": str(error)}, str(error)
    if standing is None:
        return {}, "has noted nothing yet"
    seconds = max(0.0, (time.monotonic_ns() - standing.time) / 1e9) if lives else None
    told = {"step": standing.step, "phase": standing.phase,
            "bucket": standing.bucket if standing.bucket >= 0 else None, "seconds_ago": seconds}
    return told, f"last seen {standing}" if seconds is None else f"{standing}, for {seconds:.1f} s"


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found
