"""The program that every rank runs: what `dplab train` and the notebooks launch, and an example to copy."""

from __future__ import annotations

import os
from itertools import chain, repeat
from typing import Any

import torch

import dplab
from dplab.errors import UsageError
from dplab.workloads import corpora, models
from dplab.workloads.catalog import optimizer_class, workload

TELL_EVERY = 20
"""Steps from one line that rank 0 prints to the next."""


def train(*, model: str = "tiny-gpt", data: str | None = None, steps: int = 200, batch_size: int = 8,
          lr: float = 1e-3, seed: int = 0, optimizer: str = "adamw",
          strategy: dplab.Strategy | str | None = None, lens: bool = False,
          checkpoint_every: int | None = None) -> dict[str, Any]:
    """Trains a workload for `steps` optimizer steps of `batch_size` samples a rank and micro-batch.

    `strategy=None` is the run's own; one with `shares` says itself how many samples each rank takes. `lens` keeps the
    weights of every step for `dplab.compare_runs`. With `checkpoint_every` all state is saved in the run's folder after
    every so many steps, and a restarted run goes on from there; with fewer ranks than were launched these share the
    same samples a step, where they divide. Returns this rank's losses (nats, one a step), memory (bytes by category),
    wire (count and bytes sent by collective) and what was recomputed. UsageError for a name or a path that is not
    known.
    """
    if steps < 1:
        raise UsageError(f"train(steps={steps}) is not allowed; steps is an integer >= 1")
    make_optimizer = getattr(torch.optim, optimizer_class(optimizer))
    world = dplab.init()
    torch.manual_seed(seed)
    net = models.build(model).to(world.device)
    dataset = corpora.dataset(data, images=workload(model).data == "images")
    launched = int(os.environ.get("DPLAB_LAUNCHED_SIZE") or world.size)
    share, rest = divmod(batch_size * launched, world.size)
    engine = dplab.parallelize(net, optimizer=lambda params: make_optimizer(params, lr=lr), strategy=strategy)
    batches = dplab.loader(dataset, engine.strategy.shares or (batch_size if rest else share), seed=seed)
    watch = dplab.Lens(engine) if lens else None
    print(f"rank {world.rank} of {world.size}: {model} under {engine.strategy} on {world.device}, {world.backend}")

    losses: list[float] = []
    kept = None if checkpoint_every is None else Kept(engine, batches, checkpoint_every)
    if kept is not None:
        losses = kept.load()
    window: list[float] = []
    for x, y in chain.from_iterable(repeat(batches)):      # epoch after epoch
        if len(losses) >= steps:
            break
        loss = engine(x, y)
        engine.backward(loss)
        window.append(loss.item())
        if engine.step():
            losses.append(sum(window) / len(window))
            window.clear()
            if len(losses) % TELL_EVERY == 0 and world.rank == 0:
                print(f"step {len(losses)}: loss {losses[-1]:.3f} on this rank")
            if watch is not None:
                watch.record()
            if kept is not None and len(losses) < steps:
                kept.save(losses)
    return {"backend": world.backend, "steps": steps, "losses": losses, "loss_first": losses[0],
            "loss_last": losses[-1], "memory": engine.memory(), "wire": engine.wire(),
            "recomputed": engine.recomputed()}


class Kept:
    """The checkpoints of a run, in its own folder: the engine's state, the data's, and every rank's losses."""

    def __init__(self, engine: dplab.Engine, batches: Any, every: int) -> None:
        folder = os.environ.get("DPLAB_RUN_DIR")
        if folder is None:
            raise UsageError("train(checkpoint_every=...) saves in the folder of a run; start it by dplab.launch")
        if every < 1:
            raise UsageError(f"train(checkpoint_every={every}) is not allowed; it is an integer >= 1, or None")
        self._engine, self._batches, self._every = engine, batches, every
        self._manager = dplab.CheckpointManager(os.path.join(folder, "checkpoints"), keep=2)
        self._losses: list[list[float]] = []

    def load(self) -> list[float]:
        """This rank's losses up to the latest checkpoint; empty where there is none."""
        if not self._manager.load(self._engine, loader=self._batches, losses=self):
            return []
        return list(self._losses[self._engine.world.rank])

    def save(self, losses: list[float]) -> None:
        """After every so many steps; collective."""
        if len(losses) % self._every == 0:
            self._losses = self._engine.mesh.world.gather_objects(losses)
            self._manager.save(self._engine, loader=self._batches, losses=self)

    def state_dict(self) -> list[list[float]]:
        return self._losses

    def load_state_dict(self, state: list[list[float]]) -> None:
        self._losses = state
