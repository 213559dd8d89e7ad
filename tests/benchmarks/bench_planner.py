"""Predicted against measured on this machine: step and memory of small GPTs under each strategy.

    python -m tests.benchmarks.bench_planner [-o planner.json] [--quick] [--steps 30] [--backend shm] [--stored]

Calibrates (unless --stored), then trains each model under each strategy on two ranks and puts the median step, and
the memory of rank 0 (its ledger, and the most that was gathered at a time), beside what was predicted before it ran.
The first steps are left out. On a busy machine steps are slowed by others: `quiet` is the low quarter of the steps,
which is what the calibration measures, and the load stands above the table. Asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

import dplab
from dplab.planner import machine
from dplab.planner.hardware import of_machine
from dplab.planner.single import predict
from dplab.telemetry.events import Event

MODELS, STRATEGIES = ("bench-gpt", "tiny-gpt"), ("ddp", "zero1", "zero2", "zero3")
WARM_UP = 3


def measured(model: str, strategy: str, *, steps: int, batch: int, backend: str) -> dict[str, float]:
    """Milliseconds of a step and MB of rank 0."""
    run = dplab.launch("dplab.workloads.train:train", world_size=2, strategy=strategy, backend=backend, detach=False,
                       label="planner", kwargs={"model": model, "steps": steps + WARM_UP, "batch_size": batch})
    held = run.wait()[0]["memory"]
    taken = [event.t1 - event.t0 for event in run.events() if event.kind == "step" and event.step >= WARM_UP]
    return {"step_ms": float(np.median(taken)) / 1e6, "quiet_ms": float(np.quantile(taken, 0.25)) / 1e6,
            "memory_mb": (sum(held.values()) - held["gathered"] + most_gathered(run.events())) / 1e6}


def most_gathered(events: Iterable[Event]) -> int:
    """The largest sum of bytes that rank 0 held gathered at a time; the ledger after a step knows only what is left."""
    changes = sorted((event.t1, event.attrs["bytes"] * (1 if event.kind == "unshard" else -1)) for event in events
                     if event.kind in ("unshard", "reshard") and event.rank == 0)
    return max(accumulate((change for _, change in changes), initial=0))


def table(made: machine.Machine, *, steps: int, batch: int, backend: str) -> list[dict[str, Any]]:
    """One row a model and strategy."""
    rows = []
    for model in MODELS:
        for strategy in STRATEGIES:
            plan = predict(model, of_machine(made, 2, backend), strategy, micro_batch=batch)
            told = {"step_ms": plan.step * 1e3, "memory_mb": float(plan.memory.allocated) / 1e6}
            real = measured(model, strategy, steps=steps, batch=batch, backend=backend)
            rows.append({"model": model, "strategy": strategy, "predicted": told, "measured": real, "ratio": {
                "step": told["step_ms"] / real["step_ms"], "quiet": told["step_ms"] / real["quiet_ms"],
                "memory": told["memory_mb"] / real["memory_mb"]}})
            print(line(rows[-1]), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    told, real, ratio = row["predicted"], row["measured"], row["ratio"]
    return (f"{row['model']:10} {row['strategy']:6} {told['step_ms']:9.1f} {real['step_ms']:9.1f} "
            f"{real['quiet_ms']:9.1f} {ratio['step']:6.2f} {ratio['quiet']:6.2f}   {told['memory_mb']:9.1f} "
            f"{real['memory_mb']:9.1f} {ratio['memory']:6.2f}")


HEADER = (f"{'model':10} {'':6} {'predicted':>9} {'measured':>9} {'quiet':>9} {'ratio':>6} {'quiet':>6}   "
          f"{'predicted':>9} {'measured':>9} {'ratio':>6}\n{'':17} {'ms':>9} {'ms':>9} {'ms':>9} {'':6} {'':6}   "
          f"{'MB':>9} {'MB':>9}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--stored", action="store_true", help="take the calibration that is there")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--backend")
    options = parser.parse_args()
    made = machine.load() if options.stored else dplab.calibrate(quick=options.quick, keep=False)
    print(made, f"\nload average now {os.getloadavg()[0]:.1f} on {made.cores} cores\n\n{HEADER}", sep="")
    rows = table(made, steps=options.steps, batch=options.batch, backend=options.backend or made.backend)
    if options.output:
        options.output.write_text(json.dumps({"machine": made.to_dict(), "load_average": os.getloadavg(),
                                              "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
