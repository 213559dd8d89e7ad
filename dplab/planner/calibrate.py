"""`dplab.calibrate`: measures this machine on real ranks, for predictions of it and for whoever asks what it can do."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import psutil

from dplab.errors import UsageError
from dplab.planner import compute, configs, machine
from dplab.planner.machine import Curve, Machine, Pace
from dplab.planner.recipes import RECIPES
from dplab.planner.split import Split

RANKS = 2
QUICK_SECONDS, FULL_SECONDS = 0.05, 1.2
"""Seconds for one figure."""
MICRO_BATCHES = (1, 8)
"""Samples of the two passes that a pace goes through."""
_LEAST = 1e-6
"""Seconds of a pass at the least, where noise says less."""
_PROGRAM = "dplab.workloads.gauges:measure"
_QUARTER = 0.25
"""The quantile that stands for a figure: a process that took a core for a while adds to some repetitions, never takes
away, so that the low quarter is what the machine does when it is left alone."""


def calibrate(*, quick: bool = False, backends: Sequence[str] | None = None, keep: bool = True) -> Machine:
    """Measures products, copies, passes of the benchmark GPT, AdamW, collectives and their price to compute.

    On two ranks, each backend in a run of its own: about two minutes on a quiet machine, with `quick` about a quarter
    of a minute and more noise. `backends`: of gloo and shm; None: those that there are here. `keep` stores it where
    `plan(cluster="this-machine")` finds it. Raises UsageError for another backend or value.
    """
    for name, value in (("quick", quick), ("keep", keep)):
        if not isinstance(value, bool):
            raise UsageError(f"calibrate({name}={value!r}) is not allowed; {name} is True or False")
    chosen = _backends(backends)
    began = time.time()
    load = _others_load()
    told = [_measured(backend, quick=quick, whole=index == 0) for index, backend in enumerate(chosen)]
    made = assemble(told, load=load, date=datetime.fromtimestamp(began, UTC).isoformat(timespec="seconds"))
    if keep:
        machine.store(made)
    return made


def _backends(given: Sequence[str] | None) -> list[str]:
    there = ["shm", "gloo"] if sys.platform.startswith("linux") and platform.machine() == "x86_64" else ["gloo"]
    if given is None:
        return there
    names = [given] if isinstance(given, str) else list(given)
    wrong = [name for name in names if name not in there]
    if wrong or not names:
        raise UsageError(f"calibrate(backends={given!r}) is not allowed; it measures {' and '.join(there)} here")
    return list(dict.fromkeys(names))


def _measured(backend: str, *, quick: bool, whole: bool) -> dict[str, Any]:
    """Rank 0's figures of one run."""
    import dplab

    run = dplab.launch(_PROGRAM, world_size=RANKS, backend=backend, detach=False, label="calibration", kwargs={
        "budget": QUICK_SECONDS if quick else FULL_SECONDS, "least": 3 if quick else 5,
        "micro_batches": MICRO_BATCHES if whole else None})
    try:
        figures: dict[str, Any] = run.wait()[0]
    except BaseException:
        run.stop()
        raise
    return figures


def _others_load() -> float:
    """Cores' worth of work that others do now, and the ranks' own to come."""
    return float(RANKS + psutil.cpu_percent(interval=0.3) / 100 * (os.cpu_count() or 1))


def assemble(told: Sequence[dict[str, Any]], *, load: float, date: str) -> Machine:
    """A machine from the figures of its runs, the first of which measured more than the wire."""
    first = told[0]
    gemm: dict[str, Curve] = {name: [[float(row["flops"]), figure(row["seconds"])] for row in rows]
                              for name, rows in first["gemm"].items()}
    copy = first["copy"]["bytes"] / figure(first["copy"]["seconds"])
    small, large = ((row["parameters"], figure(row["seconds"])) for row in first["optimizer"])
    paces, saved = _paces(first["units"], gemm, copy)
    return Machine(
        date=date, torch=first["torch"], cpu=machine.cpu_model(), cores=os.cpu_count() or 1,
        memory=float(psutil.virtual_memory().total), ranks=first["ranks"], threads=first["threads"], load=load,
        spread=spread(first), gemm=gemm, copy=copy, paces=paces, saved=saved, optimizer=Pace.through([small, large]),
        wire={run["backend"]: {name: _rising([[float(row["bytes"]), figure(row["seconds"])] for row in rows])
                               for name, rows in run["wire"].items()} for run in told},
        contention={run["backend"]: machine.share_lost(**run["overlap"]) for run in told})


def _paces(units: dict[str, Any], gemm: dict[str, Any], copy: float) -> tuple[dict[str, Pace], float]:
    """Paces of the benchmark GPT's layer and of what stands around its layers, each through two micro-batches; and the
    bytes that a layer saves for a sample, the input that the layer before it made counted once."""
    profile, program = configs.model("bench-gpt"), RECIPES["dplab"]
    points: dict[str, list[tuple[float, float]]] = {}
    for micro_batch in sorted({row["micro_batch"] for row in units["passes"]}):
        shallow, deep = sorted((row for row in units["passes"] if row["micro_batch"] == micro_batch),
                               key=lambda row: int(row["layers"]))
        alone = compute.alone(profile, Split(micro_batch=micro_batch), program, gemm=gemm, copy=copy)
        for way in ("forward", "backward"):
            layer = max(_LEAST, (figure(deep[way]) - figure(shallow[way])) / (deep["layers"] - shallow["layers"]))
            ends = max(_LEAST, figure(shallow[way]) - shallow["layers"] * layer)
            for unit, taken in (("layer", layer), ("ends", ends)):
                points.setdefault(f"{unit}_{way}", []).append((float(alone[f"{unit}_{way}"]), taken))
    boundary = 4 * profile.sequence * profile.hidden
    return {name: Pace.through(two) for name, two in points.items()}, units["saved_bytes"] + boundary


def figure(seconds: Sequence[float]) -> float:
    """The one number that stands for repetitions."""
    return float(np.quantile(seconds, _QUARTER))


def _rising(curve: list[list[float]]) -> list[list[float]]:
    """More bytes never take less time: noise below that is levelled."""
    seconds = np.maximum.accumulate([point[1] for point in curve])
    return [[size, float(value)] for (size, _), value in zip(curve, seconds, strict=True)]


def spread(told: dict[str, Any]) -> float:
    """Median over figures of how far the middle half of their repetitions spreads, as a share of the figure."""
    shares = [float(np.subtract(*np.quantile(values, [0.75, 0.25]))) / figure(values) for values in _lists(told)]
    return float(np.median(shares))


def _lists(value: Any) -> Iterator[list[float]]:
    """Every list of seconds in figures."""
    if isinstance(value, dict):
        for part in value.values():
            yield from _lists(part)
    elif isinstance(value, list):
        if value and isinstance(value[0], float):
            yield value
        else:
            for part in value:
                yield from _lists(part)
