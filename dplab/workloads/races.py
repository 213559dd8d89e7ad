"""The race hunt: the same training with nothing overlapped, and again with random delays everywhere.

Every difference of a single bit is a race: some value was read before it was there, or written while
somebody still read it. Ranks are threads, so a hunt takes seconds and needs nothing but this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import dplab
from dplab.engine import Engine
from dplab.errors import UsageError
from dplab.specs import SHARDINGS, Strategy
from dplab.wire import threads
from dplab.wire.chain import TwoLevel
from dplab.wire.late import Late, Prompt

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Race:
    """Where a delayed run differs from the one without overlap; `parameter` is None where none does."""

    strategy: str
    seed: int
    parameter: str | None


class Chain(nn.Module):
    """Blocks of uneven shapes, one used twice, a tied head, a parameter that only even steps use."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, 24)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 37), nn.GELU(), nn.Linear(37, 24)) for _ in range(4))
        self.sometimes = nn.Linear(24, 24)
        self.head = nn.Linear(24, 29, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        h = self.embed(x)
        for block in [*self.blocks, self.blocks[1]]:
            h = h + block(h)
        if step % 2 == 0:
            h = h + self.sometimes(h)
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), x.flatten())


def hunt(strategies: Sequence[str] = tuple(SHARDINGS), *, seeds: int = 5, world_size: int = 3,
         steps: int = 4, model: Callable[[], nn.Module] = Chain) -> Iterator[Race]:
    """Trains under every strategy without overlap, then `seeds` times with random delays; yields what it found.

    `model` builds a module whose forward takes (tokens below 29 of shape (3, 5), step) and returns a loss.
    """
    if seeds < 1 or world_size < 1 or steps < 1:
        raise UsageError(f"hunt(seeds={seeds}, world_size={world_size}, steps={steps}): each is an integer >= 1")
    torch.manual_seed(0)
    initial = model().state_dict()
    for text in strategies:
        strategy = Strategy.parse(text)

        def run(seed: int | None, strategy: Strategy = strategy) -> list[State]:
            return threads.run(lambda: _train(model, initial, strategy, steps, seed), world_size)

        expected = run(None)[0]
        for seed in range(seeds):
            yield Race(str(strategy), seed, _difference(run(seed), expected))


def _train(model: Callable[[], nn.Module], initial: State, strategy: Strategy, steps: int, seed: int | None) -> State:
    world = dplab.init()
    net = model()
    net.load_state_dict(initial)
    engine = dplab.parallelize(net, lambda ps: torch.optim.AdamW(ps, lr=1e-2), strategy)
    _disturb(engine, None if seed is None else 1000 * seed + world.rank)
    generator = torch.Generator().manual_seed(world.rank)
    for step in range(steps):
        for _ in range(strategy.accumulate):
            engine.backward(engine(torch.randint(0, 29, (3, 5), generator=generator), step))
        engine.step()
    engine.check_agreement()
    return engine.full_state_dict()


def _disturb(engine: Engine, seed: int | None) -> None:
    replicate = engine.mesh.replicate
    levels = (replicate.inside, replicate.across) if isinstance(replicate, TwoLevel) else ()
    for axis in (engine.mesh.shard, replicate, *levels):
        axis.transport = Prompt(axis.transport) if seed is None else Late(axis.transport, seed)
    if seed is None:
        return
    late = Late(engine.mesh.shard.transport, seed)

    def dawdle(_parameter: Any) -> None:
        late.pause()

    for parameter in engine.module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(dawdle)  # type: ignore[no-untyped-call]


def _difference(states: Sequence[State], expected: State) -> str | None:
    for state in states:
        for name, value in state.items():
            if not torch.equal(value, expected[name]):
                return name
    return None
