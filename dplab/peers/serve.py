"""The rank's side of a kept process world: makes a block of steps when it is told to, waits otherwise.

It waits in a read of a pipe, so that the world whose turn it is has the machine for itself.
"""

from __future__ import annotations

import importlib
import json
import os
import time
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch

import dplab
from dplab.peers.base import Setup, Trainer
from dplab.peers.catalog import ANSWERS, TURNS, system
from dplab.telemetry.recorder import current, now
from dplab.workloads import corpora, models
from dplab.workloads.catalog import optimizer_class, workload


def serve(name: str, *, model: str, data: str | None, batch_size: int, lr: float, seed: int,
          optimizer: str) -> dict[str, Any]:
    """What every rank of a kept world runs. Returns the trainer's memory and wire."""
    chosen = system(name)
    stock = chosen.rival and not os.environ.get("DPLAB_BACKEND") and not torch.accelerator.is_available()
    world = dplab.init(backend="gloo" if stock else None)
    torch.manual_seed(seed)
    setup = Setup(model=models.build(model).to(world.device), lr=lr, world=world, strategy=chosen.strategy,
                  optimizer=getattr(torch.optim, optimizer_class(optimizer)))
    dataset = corpora.dataset(data, images=workload(model).data == "images")
    batches = chain.from_iterable(repeat(dplab.loader(dataset, batch_size=batch_size, seed=seed)))
    trainer: Trainer = importlib.import_module(f"dplab.peers.{chosen.module}").start(setup)

    directory = Path(os.environ["DPLAB_RUN_DIR"]) / f"rank-{world.rank}"
    for pipe in (ANSWERS, TURNS):      # the one that the other side looks for comes last
        os.mkfifo(directory / pipe, 0o600)
    with open(directory / TURNS) as turns, open(directory / ANSWERS, "w", buffering=1) as answers:
        waiting = now()
        for line in turns:
            current().span("pause", "turn", waiting, now())      # the others' turns are no time of a step of ours
            if int(line) == 0:
                break
            answers.write(json.dumps(_block(trainer, batches, int(line))) + "\n")
            waiting = now()
    return {"backend": world.backend, "memory": trainer.memory(), "wire": trainer.wire()}


def _block(trainer: Trainer, batches: Any, steps: int) -> dict[str, Any]:
    """Seconds of the whole block (batches included), losses, and tokens or samples of this rank."""
    losses, tokens = [], 0
    begin = time.perf_counter()
    for _ in range(steps):
        x, y = next(batches)
        losses.append(trainer.step(x, y).item())
        tokens += y.numel()
    return {"seconds": time.perf_counter() - begin, "losses": losses, "tokens": tokens}
