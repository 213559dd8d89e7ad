"""The program that every rank runs: what `dplab train` and the notebooks launch, and an example to copy."""

from __future__ import annotations

from itertools import chain, repeat
from typing import Any

import torch

import dplab
from dplab.errors import UsageError
from dplab.workloads import corpora, models
from dplab.workloads.catalog import optimizer_class, workload


def train(*, model: str = "tiny-gpt", data: str | None = None, steps: int = 200, batch_size: int = 8,
          lr: float = 1e-3, seed: int = 0, optimizer: str = "adamw",
          strategy: dplab.Strategy | str | None = None, lens: bool = False) -> dict[str, Any]:
    """Trains a workload for `steps` optimizer steps of `batch_size` samples a rank and micro-batch.

    `strategy=None` is the run's own. `lens` keeps the weights of every step for `dplab.compare_runs`. Returns
    this rank's losses (nats, one a step), memory (bytes by category) and wire (count and bytes sent by
    collective). UsageError for a name or a path that is not known.
    """
    if steps < 1:
        raise UsageError(f"train(steps={steps}) is not allowed; steps is an integer >= 1")
    make_optimizer = getattr(torch.optim, optimizer_class(optimizer))
    world = dplab.init()
    torch.manual_seed(seed)
    net = models.build(model).to(world.device)
    dataset = corpora.dataset(data, images=workload(model).data == "images")
    batches = dplab.loader(dataset, batch_size=batch_size, seed=seed)
    engine = dplab.parallelize(net, optimizer=lambda params: make_optimizer(params, lr=lr), strategy=strategy)
    watch = dplab.Lens(engine) if lens else None

    losses: list[float] = []
    window: list[float] = []
    for x, y in chain.from_iterable(repeat(batches)):      # epoch after epoch
        loss = engine(x, y)
        engine.backward(loss)
        window.append(loss.item())
        if engine.step():
            losses.append(sum(window) / len(window))
            window.clear()
            if watch is not None:
                watch.record()
        if len(losses) == steps:
            break
    return {"backend": world.backend, "steps": steps, "losses": losses, "loss_first": losses[0],
            "loss_last": losses[-1], "memory": engine.memory(), "wire": engine.wire()}
