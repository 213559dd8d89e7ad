"""What a micro-batch counts for: by its place in the window, and by its samples."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dplab
from tests import worlds
from tests.core.test_window import EVERY, backward, engine_of, weight
from tests.worlds import STRATEGIES, in_processes


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("name", EVERY)
def test_h07_the_last_micro_batch_is_reduced_with_the_first(name: str, window: int, where: Any) -> None:
    values = [[1.0, 4.0, 6.0], [2.0, 7.0, 9.0]]

    def body() -> list[float]:
        engine = engine_of(f"{name}+accum{window}")
        moved = []
        for _ in range(3):
            before = weight(engine)
            backward(engine, *values[dplab.init().rank][:window])
            assert engine.step()
            moved.append(before - weight(engine))
        return moved

    # above 1 the average runs over the window too
    expected = sum(sum(mine[:window]) for mine in values) / (2 * window)
    for moved in where(2, body):
        assert moved == pytest.approx([expected] * 3, rel=1e-5)


@pytest.mark.parametrize("splits", [[(1, 3)] * 5, [(4, 0)] * 5, [(2, 2, 5)] * 5,
                                    [(1, 3), (3, 1), (0, 4), (2, 2), (4, 0)]])
@pytest.mark.parametrize("name", EVERY)
def test_h13_batches_of_different_sizes_weigh_by_their_samples(
        name: str, splits: list[tuple[int, ...]], where: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    adam = lambda ps: torch.optim.Adam(ps, lr=0.1)  # noqa: E731

    def samples(step: int) -> torch.Tensor:
        return torch.randn(sum(splits[step]), 3, generator=torch.Generator().manual_seed(step)).double()

    def body() -> dict[str, torch.Tensor]:
        engine = dplab.parallelize(copy.deepcopy(model), adam, f"{name}+clip_grad_norm=0.5")
        for step, split in enumerate(splits):
            mine = samples(step).split(list(split))[dplab.init().rank]
            engine.backward(engine(mine).square().sum(), weight=len(mine))
            assert engine.step()
        return engine.full_state_dict()

    states = where(len(splits[0]), body)
    optimizer = adam(model.parameters())
    for step in range(len(splits)):
        optimizer.zero_grad()
        batch = samples(step)
        (model(batch).square().sum() / len(batch)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    for state in states:
        for key, value in model.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-10, atol=1e-12)


class Dropped(nn.Module):
    """Two blocks with dropout, one checkpoint inside another."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.recompute = recompute
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)) for _ in range(2))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def run(part: Any, h: torch.Tensor) -> torch.Tensor:
            return checkpoint(part, h, use_reentrant=False) if self.recompute else part(h)

        return run(lambda h: run(self.blocks[1], run(self.blocks[0], h)), x).square().mean()


def dropped(recompute: bool, name: str) -> tuple[list[torch.Tensor], torch.Tensor, dict[str, torch.Tensor]]:
    engine = dplab.parallelize(Dropped(recompute), worlds.adamw, name)
    torch.manual_seed(100 + dplab.init().rank)
    grads = []
    for _ in range(2):
        engine.backward(engine(torch.ones(4, 16).double()))
        grads += [engine.full_grad(f"blocks.{i}.0.weight") for i in range(2)]
        engine.step()
    return grads, torch.get_rng_state(), engine.full_state_dict()


@pytest.mark.parametrize("name", STRATEGIES)
def test_h32_recomputation_drops_the_same_and_draws_nothing_more(name: str) -> None:
    plain, again = (in_processes(2, dropped, recompute, name) for recompute in (False, True))
    for (grads, state, weights), (grads2, state2, weights2) in zip(plain, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(grads, grads2, strict=True))
        assert torch.equal(state, state2)
        assert all(torch.equal(weights[key], weights2[key]) for key in weights)
    assert not torch.equal(plain[0][1], plain[1][1])
