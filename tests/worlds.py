"""Worlds for tests: ranks as threads, ranks as processes that stay alive, and the one-process reference.

Everything a rank does is written once, as a function of the world; where it runs is the test's choice.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import dplab
from dplab.wire import threads

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


class Uneven(nn.Module):
    """Shapes that no world size divides, a 0-dim scale, a tied pair, a module used twice, a list of units."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 7)) for _ in range(3))
        self.norm = nn.LayerNorm(7)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = h + block(h) * self.scale
        h = self.norm(h + self.blocks[0](h))
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def uneven_batches(count: int, size: int = 4, length: int = 5) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [tuple(torch.randint(0, 11, (size, length), generator=generator) for _ in range(2)) for _ in range(count)]


def build(kind: type[nn.Module], dtype: torch.dtype = torch.float64, seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return kind().to(dtype)


def reference(model: nn.Module, batches: Sequence[Any], *, per_step: int, optimizer: MakeOptimizer = adamw,
              clip: float | None = None) -> dict[str, torch.Tensor]:
    """One process, plain torch: every step averages `per_step` batches (ranks x window)."""
    model = copy.deepcopy(model)
    opt = optimizer(model.parameters())
    for start in range(0, len(batches), per_step):
        opt.zero_grad()
        for batch in batches[start:start + per_step]:
            (model(*batch) / per_step).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def train(model: nn.Module, batches: Sequence[Any], strategy: Any, *, optimizer: MakeOptimizer = adamw,
          **kwargs: Any) -> dict[str, torch.Tensor]:
    """What every rank runs: batches dealt out rank by rank, window by window, as `reference` averages them."""
    model = copy.deepcopy(model)
    world = dplab.init()
    engine = dplab.parallelize(model, optimizer, strategy, **kwargs)
    window = engine.strategy.accumulate
    per_step = world.size * window
    for start in range(0, len(batches), per_step):
        for index in range(window):
            x, y = batches[start + world.rank * window + index]
            engine.backward(engine(x, y))
        assert engine.step()
    engine.check_agreement()
    return engine.full_state_dict()


def in_threads(size: int, fn: Callable[..., Any], *args: Any, timeout: float = 30.0, **kwargs: Any) -> list[Any]:
    """`fn` on every rank of a thread world."""
    return threads.run(lambda: fn(*args, **kwargs), size, timeout=timeout)
