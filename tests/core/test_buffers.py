"""Running statistics: gradients from local ones, equal on all ranks after a step, by the rule that was asked for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dplab
from dplab.errors import UsageError
from dplab.specs import SHARDINGS
from tests import worlds
from tests.worlds import STRATEGIES, in_processes, in_threads


class Normed(nn.Module):
    """A batch norm, a buffer of the user's in the product, a constant table and one without persistence."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.recompute = recompute
        self.layer, self.norm = nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3)
        self.register_buffer("gain", torch.ones(3))
        self.register_buffer("table", torch.arange(6.0))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        h = checkpoint(self.norm, h, use_reentrant=False) if self.recompute else self.norm(h)
        return (h * self.gain).exp().sum()

    def remember(self, x: torch.Tensor) -> None:
        self.gain.mul_(0.9).add_(x.mean() * 0.1)
        self.calls += 1


def data(rank: int, step: int, turn: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + 10 * step + turn)
    return torch.randn(4, 3, generator=generator, dtype=torch.float64) + rank


def rank_loop(model: Normed, strategy: str, rule: Any, steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two forwards before one backward, as discriminators are trained."""
    model, rank = copy.deepcopy(model), dplab.init().rank
    engine = dplab.parallelize(model, worlds.adamw, strategy, buffers=rule)
    for step in range(steps):
        engine.backward(engine(data(rank, step, 0)) + engine(data(rank, step, 1)))
        model.remember(data(rank, step, 0))
        engine.step()
    return engine.full_state_dict() | {"calls": model.calls.clone()}, engine.wire()


def reference(model: Normed, size: int, rule: str, steps: int) -> list[dict[str, Any]]:
    """One process that keeps a copy of the buffers for every rank."""
    whole = copy.deepcopy(model)
    optimizer = worlds.adamw(whole.parameters())
    mine = [{name: buffer.clone() for name, buffer in whole.named_buffers()} for _ in range(size)]
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(size):
            for name, buffer in whole.named_buffers():
                buffer.data = mine[rank][name]
            ((whole(data(rank, step, 0)) + whole(data(rank, step, 1))) / size).backward()
            whole.gain = whole.gain.clone()
            whole.remember(data(rank, step, 0))
            mine[rank] = {name: buffer.clone() for name, buffer in whole.named_buffers()}
        optimizer.step()
        first = {name: buffer.clone() for name, buffer in mine[0].items()}
        for rank in range(size if rule != "local" else 0):
            mine[rank] = {name: buffer.clone() for name, buffer in first.items()}
    return [whole.state_dict() | buffers for buffers in mine]


@pytest.mark.parametrize("rule", ["rank0", "local"])
@pytest.mark.parametrize(("where", "size"), [(in_threads, 1), (in_threads, 2), (in_threads, 3), (in_processes, 2)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_h15_two_forwards_through_batch_norm(strategy: str, size: int, where: Any, rule: str) -> None:
    model = Normed()
    # what is written after the backward is told to the others a step later
    every = where(size, rank_loop, model, strategy, rule, 1)
    for (state, _), expected in zip(every, reference(model, size, rule, 1), strict=True):
        for key in ("layer.weight", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var",
                    "norm.num_batches_tracked"):
            torch.testing.assert_close(state[key], expected[key], rtol=1e-10, atol=1e-12)
        assert state["norm.num_batches_tracked"] == 2


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("rule", ["rank0", "mean"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", SHARDINGS)
def test_h15_buffers_are_equal_after_every_step_by_the_rule(name: str, size: int, rule: str, recompute: bool) -> None:
    model = Normed(recompute)

    def body() -> list[dict[str, torch.Tensor]]:
        mine, rank = copy.deepcopy(model), dplab.init().rank
        engine = dplab.parallelize(mine, worlds.adamw, name, buffers=rule)
        seen = []
        for step in range(3):
            mine.remember(data(rank, step, 0))
            engine.backward(engine(data(rank, step, 0)))
            before = {key: value.clone() for key, value in mine.named_buffers()}
            engine.step()
            seen.append((before, {key: value.clone() for key, value in mine.named_buffers()}))
        mine.eval()
        with torch.no_grad():
            engine(data(rank, 0, 0))
        return seen

    every = in_threads(size, body)
    for step in range(3):
        for key, value in every[0][step][1].items():
            befores = [seen[step][0][key] for seen in every]
            expected = befores[0] if rule == "rank0" or not value.is_floating_point() else sum(befores) / size
            for seen in every:
                torch.testing.assert_close(seen[step][1][key], expected, rtol=1e-12, atol=1e-14)
                assert torch.equal(seen[step][1][key], value)
        assert not torch.equal(every[0][step][0]["norm.running_mean"], every[1][step][0]["norm.running_mean"])


@pytest.mark.parametrize("name", SHARDINGS)
def test_h15_buffers_that_nobody_writes_never_travel(name: str) -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.register_buffer("mask", torch.ones(64, 64, dtype=torch.bool))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).sum()

    def body() -> list[str]:
        engine = dplab.parallelize(Fixed(), worlds.adamw, name)
        for _ in range(2):
            engine.backward(engine(torch.ones(1, 3)))
            engine.step()
        return list(engine.wire())

    for rows in in_threads(2, body):
        assert "buffers" not in rows


def test_h15_one_message_a_step_carries_all_that_changed() -> None:
    for _, wire in in_threads(2, rank_loop, Normed(), "zero2", "rank0", 3):
        # norm: two of 3 float64 and a counter; gain 3 float64 and calls from the second step on
        assert wire["buffers"]["count"] == 3
        assert wire["buffers"]["bytes"] > 0


def test_a_buffer_that_takes_another_shape_stays_local() -> None:
    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.register_buffer("cache", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.cache = torch.full((2 + dplab.init().rank,), 5.0)
            return self.layer(x).sum()

    def body() -> list[int]:
        engine = dplab.parallelize(Cache(), worlds.adamw, "zero1")
        engine.backward(engine(torch.ones(1, 2)))
        assert engine.step()
        return list(engine.module.cache.shape)

    assert in_threads(2, body) == [[2], [3]]


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(UsageError, match="buffers='average' is not allowed; it is one of rank0, mean, local"):
        dplab.parallelize(Normed(), worlds.adamw, buffers="average")  # type: ignore[arg-type]
