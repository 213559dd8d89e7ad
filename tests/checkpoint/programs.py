"""What ranks run in the tests of checkpoints: a model, a few steps, a save or a load between them."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dplab
from tests.worlds import MakeOptimizer, adamw, build, uneven_batches

ROWS = 12
"""Batches of one global step: every world size of 1, 2, 3 and 4 divides them."""

BATCHES = uneven_batches(ROWS * 8, size=2)


class Odd(nn.Module):
    """H33: a (7, 3) weight, a 0-dim scale, a (2,) bias, a tied head; a layer never used, a buffer of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 3)
        self.up = nn.Linear(3, 7)
        self.norm = nn.BatchNorm1d(7)
        self.down = nn.Linear(7, 3)
        self.pair = nn.Linear(3, 2)
        self.back = nn.Linear(2, 3, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.head = nn.Linear(3, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(5))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embed(x).flatten(0, 1)
        h = h + self.down(torch.tanh(self.up(h))) * self.scale + self.back(self.pair(h))
        return nn.functional.cross_entropy(self.head(h), y.flatten())


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    """AdamW that decays matrices only, at another rate."""
    listed = list(parameters)
    return torch.optim.AdamW([{"params": [p for p in listed if p.ndim > 1], "lr": 2e-2},
                              {"params": [p for p in listed if p.ndim < 2], "weight_decay": 0.0}], lr=1e-2)


def train(engine: dplab.Engine, start: int, stop: int, rows: int = ROWS) -> list[float]:
    """Steps [start, stop) of the same global batches at every world size; this rank's losses."""
    world, losses = engine.world, []
    share = rows // world.size
    for step in range(start, stop):
        for index in range(share):
            x, y = BATCHES[step * rows + world.rank * share + index]
            loss = engine(x, y) / share
            engine.backward(loss)
            losses.append(loss.item())
        engine.step()
    return losses


def wrap(model: nn.Module, strategy: str, optimizer: MakeOptimizer = adamw) -> dplab.Engine:
    """A copy of the model in this rank's world."""
    return dplab.parallelize(copy.deepcopy(model), optimizer, strategy)


def moments(engine: dplab.Engine) -> dict[str, torch.Tensor]:
    """This rank's optimizer state, whole, from a checkpoint of one process."""
    return {f"{name}.{what}": value for name, state in optimizer_of(engine).items() for what, value in state.items()}


def optimizer_of(engine: dplab.Engine) -> dict[str, dict[str, Any]]:
    """The optimizer's state by plain name, in a world of one under ddp."""
    found: dict[str, dict[str, Any]] = {}
    for runs in engine._owned.runs:
        for run in runs:
            for slot in run.slots:
                at = run.bucket.layout.slots[slot]
                state = engine.optimizer.state.get(run.parameter, {})
                found[run.bucket.names[slot]] = {
                    what: value[at.start - run.start:at.stop - run.start].view(at.shape)
                    if isinstance(value, torch.Tensor) and value.shape == run.parameter.shape and what != "step"
                    else value for what, value in state.items()}
    return found


def run(model: nn.Module, strategy: str, span: tuple[int, int], *, load: Path | None = None, save: Path | None = None,
        optimizer: MakeOptimizer = adamw, rows: int = ROWS, **options: Any) -> dict[str, torch.Tensor]:
    """Wrap, load, train, save; the full state dict at the end."""
    engine = wrap(model, strategy, optimizer)
    if load is not None:
        assert engine.load(load) == span[0]
    train(engine, *span, rows)
    if save is not None:
        engine.save(save, **options)
    return engine.full_state_dict()


def odd(dtype: torch.dtype = torch.float64) -> nn.Module:
    return build(Odd, dtype)


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Equal names in equal order, equal bits."""
    return list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)


def listing(folder: Path) -> set[str]:
    return set(os.listdir(folder))
