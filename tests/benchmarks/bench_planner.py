"""Predicted against measured on this machine: step and memory of small GPTs under each strategy.

    python -m tests.benchmarks.bench_planner [-o planner.json] [--rounds 6] [--steps 20] [--backend shm] [--stored]

In each round it calibrates quickly, then trains each model under each strategy on two ranks, and puts what was
predicted before beside the median step and the memory of rank 0 (its ledger, and the most that was gathered at a time):
a machine that drifts from minute to minute drifts for both sides alike. The table holds medians over rounds; a ratio is
the median of the rounds' ratios, with the lowest and the highest. `--stored` takes the calibration that is there. The
first steps are left out, the load stands above the table. Asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
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
    return {"step_ms": float(np.median(taken)) / 1e6,
            "memory_mb": (sum(held.values()) - held["gathered"] + most_gathered(run.events())) / 1e6}


def most_gathered(events: Iterable[Event]) -> int:
    """The largest sum of bytes that rank 0 held gathered at a time; the ledger after a step knows only what is left."""
    changes = sorted((event.t1, event.attrs["bytes"] * (1 if event.kind == "unshard" else -1)) for event in events
                     if event.kind in ("unshard", "reshard") and event.rank == 0)
    return max(accumulate((change for _, change in changes), initial=0))


def one_round(made: machine.Machine, *, steps: int, batch: int, backend: str) -> dict[tuple[str, str], Any]:
    """Predicted and measured by model and strategy."""
    rows = {}
    for model in MODELS:
        for strategy in STRATEGIES:
            plan = predict(model, of_machine(made, 2, backend), strategy, micro_batch=batch)
            told = {"step_ms": plan.step * 1e3, "memory_mb": float(plan.memory.allocated) / 1e6}
            rows[model, strategy] = {"predicted": told, "measured": measured(
                model, strategy, steps=steps, batch=batch, backend=backend)}
    return rows


def table(rounds: list[dict[tuple[str, str], Any]]) -> list[dict[str, Any]]:
    """One row a model and strategy: medians over rounds, and [lowest, median, highest] of the rounds' ratios."""
    rows = []
    for model, strategy in rounds[0]:
        row: dict[str, Any] = {"model": model, "strategy": strategy, "predicted": {}, "measured": {}, "ratio": {}}
        for name in ("step_ms", "memory_mb"):
            told, real = (np.array([each[model, strategy][side][name] for each in rounds])
                          for side in ("predicted", "measured"))
            row["predicted"][name], row["measured"][name] = float(np.median(told)), float(np.median(real))
            row["ratio"][name] = [float(pick(told / real)) for pick in (np.min, np.median, np.max)]
        rows.append(row)
    return rows


def line(row: dict[str, Any]) -> str:
    told, real, ratio = row["predicted"], row["measured"], row["ratio"]
    low, middle, high = ratio["step_ms"]
    return (f"{row['model']:10} {row['strategy']:6} {told['step_ms']:9.1f} {real['step_ms']:9.1f} {middle:6.2f} "
            f"[{low:.2f}, {high:.2f}]   {told['memory_mb']:9.1f} {real['memory_mb']:9.1f} "
            f"{ratio['memory_mb'][1]:6.2f}")


HEADER = (f"{'model':10} {'':6} {'predicted':>9} {'measured':>9} {'ratio':>6} {'':12}   {'predicted':>9} "
          f"{'measured':>9} {'ratio':>6}\n{'':17} {'ms':>9} {'ms':>9} {'':6} {'':12}   {'MB':>9} {'MB':>9}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--stored", action="store_true", help="take the calibration that is there")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--backend")
    options = parser.parse_args()
    rounds = []
    for _ in range(options.rounds):
        made = machine.load() if options.stored else dplab.calibrate(
            quick=True, backends=options.backend, keep=False)
        rounds.append(one_round(made, steps=options.steps, batch=options.batch,
                                backend=options.backend or made.backend))
        print(f"round {len(rounds)} of {options.rounds}", file=sys.stderr, flush=True)
    rows = table(rounds)
    print(made, f"\nload average now {os.getloadavg()[0]:.1f} on {made.cores} cores\n\n{HEADER}", sep="")
    print(*map(line, rows), sep="\n")
    if options.output:
        options.output.write_text(json.dumps({"machine": made.to_dict(), "load_average": os.getloadavg(),
                                              "rounds": options.rounds, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
