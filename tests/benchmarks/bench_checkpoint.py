"""Saving and loading against torch.save and torch.load on one rank, and against each rank's own torch.save on two.

    python -m tests.benchmarks.bench_checkpoint [-o checkpoint.json] [--millions 18] [--rounds 7]

Weights and Adam's two moments in fp32. The sides take turns; figures are medians of the slowest rank, `ratio` is
ours over torch's, below 1 where ours is faster. torch.save is measured as people call it, and with the sync to disk
that a checkpoint needs before it may replace another one (ours always syncs). Loads come out of the system's cache, on
both sides into memory that training goes on with: weights and state are put in their places, and what other ranks have
loaded of the weights is gathered. `blocks` is how long a save beside training holds the program up: in the call, and
before the optimizer steps next, after a forward and backward of 64 rows.

Seven rounds on two quiet cores: one rank, save / torch.save 1.00 (synced 0.76), load / torch.load 0.78; in bf16 with
masters 1.09 (0.84) and 1.01; two ranks 0.90 (0.71) and 1.14. A save beside training blocks for 20 ms, 0.08 to 0.11 of
one that is waited for, which takes 0.2 s for 216 MB. On busy cores save 0.81 to 1.25 synced and up to 2.03 unsynced,
load 0.89 to 1.46.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dplab
from tests.worlds import ProcessWorld, adamw

WIDTH = 1024


def timed(call: Callable[[], float | None]) -> float:
    """Seconds of a call, or those that it says."""
    began = time.perf_counter()
    said = call()
    return time.perf_counter() - began if said is None else said


def done(_: Any) -> None:
    """Nothing to tell."""


def sides(strategy: str, millions: float, folder: str) -> dict[str, Callable[[], float | None]]:
    """What is measured on a rank, after a step that made the moments."""
    torch.manual_seed(0)
    layers = max(1, round(millions * 1e6 / WIDTH**2))
    engine = dplab.parallelize(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))), adamw, strategy)
    engine.backward(engine(torch.ones(1, WIDTH)).square().mean())
    engine.step()
    own = Path(folder) / f"torch-{engine.world.rank}.pt"
    state = {"model": [bucket.params.stepped for bucket in engine._buckets], "optim": engine.optimizer.state_dict()}
    mine = Path(folder) / "ours"

    def plain(*, sync: bool) -> None:
        with own.open("wb") as file:
            torch.save(state, file)
            if sync:
                file.flush()
                os.fsync(file.fileno())

    def take_in() -> None:
        loaded = torch.load(own, weights_only=True)
        for into, read in zip(state["model"], loaded["model"], strict=True):
            into.copy_(read)
        engine.optimizer.load_state_dict(loaded["optim"])
        for pending in [bucket.params.publish(bucket.index, "init") for bucket in engine._buckets]:
            pending.wait()

    pending: list[Any] = []

    def beside() -> float:
        blocked = timed(lambda: pending.append(engine.save(mine, wait=False)))
        engine.backward(engine(torch.ones(64, WIDTH)).square().mean())
        blocked += timed(engine.checkpoints.settle)
        engine.zero_grad()
        return blocked

    return {"torch.save": lambda: plain(sync=False), "torch.save synced": lambda: plain(sync=True),
            "engine.save": lambda: done(engine.save(mine)), "torch.load": take_in,
            "engine.load": lambda: done(engine.load(mine)), "blocks": beside, "then": lambda: pending.pop().wait()}


def rounds(strategy: str, millions: float, count: int, folder: str) -> dict[str, list[float]]:
    """Seconds by side on this rank, in `count` turns after one that is not counted."""
    measured = sides(strategy, millions, folder)
    taken: dict[str, list[float]] = {name: [] for name in measured}
    for turn in range(count + 1):
        for name, call in measured.items():
            seconds = timed(call)
            if turn:
                taken[name].append(seconds)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output")
    parser.add_argument("--millions", type=float, default=18.0)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    rows = {}
    for label, size, strategy in (("1 rank", 1, "ddp"), ("1 rank", 1, "ddp+bf16"), ("2 ranks", 2, "zero2")):
        folder = tempfile.mkdtemp(prefix="bench-checkpoint-")
        try:
            asked = strategy, given.millions, given.rounds, folder
            every = [rounds(*asked)] if size == 1 else ProcessWorld.of(size).call(rounds, *asked, timeout=600)
        finally:
            shutil.rmtree(folder)
        slowest = {name: [max(values) for values in zip(*(each[name] for each in every), strict=True)]
                   for name in every[0]}
        ratio = {f"{ours} / {theirs}": statistics.median(a / b for a, b in zip(slowest[ours], slowest[theirs],
                                                                              strict=True))
                 for ours, theirs in (("engine.save", "torch.save"), ("engine.save", "torch.save synced"),
                                      ("engine.load", "torch.load"), ("blocks", "engine.save"))}
        told = rows[f"{label}, {strategy}"] = {
            "MB": round(given.millions * 12, 1), "ratio": ratio,
            "seconds": {name: statistics.median(values) for name, values in slowest.items()}}
        print(f"{label}, {strategy}, {told['MB']} MB: " + ", ".join(
            f"{name} {value:.2f} s" for name, value in told["seconds"].items()))
        print("  " + ", ".join(f"{name} = {value:.2f}" for name, value in ratio.items()))
    ProcessWorld.drop_all()
    if given.output:
        Path(given.output).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
