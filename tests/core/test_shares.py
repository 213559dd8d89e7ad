"""Ranks with unequal batches: every sample counts alike, as in one float64 process that has them all."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import dplab
from dplab.errors import StateError, UsageError
from dplab.workloads.loader import loader
from tests import worlds

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
SHARES = (3, 1, 2)
X = torch.randn(24, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.randn(24, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


torch.manual_seed(2)
NET = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)).double()


def loss_of(model: Any, rows: slice) -> torch.Tensor:
    """The mean over a batch, as everybody writes it."""
    return (model(X[rows]) - Y[rows]).square().mean()


def one_process(samples: int) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(NET)
    optimizer = worlds.adamw(model.parameters())
    for start in range(0, len(X), samples):
        optimizer.zero_grad()
        loss_of(model, slice(start, start + samples)).backward()
        optimizer.step()
    return model.state_dict()


def shared(name: str, window: int) -> dict[str, torch.Tensor]:
    engine = dplab.parallelize(copy.deepcopy(NET), worlds.adamw,
                               f"{name}+accum{window}+shares={':'.join(map(str, SHARES))}")
    rank, total = dplab.init().rank, sum(SHARES)
    for start in range(0, len(X), total):
        first = start + sum(SHARES[:rank])
        engine.backward(loss_of(engine, slice(first, first + SHARES[rank])))
        engine.step()
    engine.check_agreement()
    return engine.full_state_dict()


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_sample_counts_alike(name: str, window: int, where: Any) -> None:
    expected = one_process(sum(SHARES) * window)
    for got in where(3, shared, name, window):
        for key, value in expected.items():
            torch.testing.assert_close(got[key], value, rtol=1e-12, atol=1e-12)


def test_strategies_agree_to_the_bit() -> None:
    first, *others = [worlds.in_threads(3, shared, name, 1)[0] for name in STRATEGIES]
    for other in others:
        assert all(torch.equal(first[key], value) for key, value in other.items())


def test_a_plain_backward_is_refused() -> None:
    def body() -> None:
        engine = dplab.parallelize(copy.deepcopy(NET), worlds.adamw, "zero2+shares=1:1")
        loss_of(engine, slice(0, 1)).backward()

    with pytest.raises(StateError, match=r"under a strategy with shares, which weigh each rank's loss; call engine"):
        worlds.in_threads(2, body)


def test_other_numbers_of_ranks_are_refused() -> None:
    with pytest.raises(UsageError, match=r"has shares for 3 ranks, and the world has 2"):
        worlds.in_threads(2, shared, "zero2", 1)
    with pytest.raises(UsageError, match=r"has shares for 2 ranks, and the world has 3"):
        dplab.launch(print, world_size=3, strategy="ddp+shares=1:2")


def test_a_loader_deals_unequal_batches_and_every_sample_once() -> None:
    def body() -> list[list[int]]:
        batches = loader(list(range(20)), SHARES, seed=4)
        assert len(batches) == 3
        assert batches.batch_size == SHARES[dplab.init().rank]
        return [batch.tolist() for batch in batches]

    ranks = worlds.in_threads(3, body)
    assert [[len(batch) for batch in mine] for mine in ranks] == [[3] * 3, [1] * 3, [2] * 3]
    seen = [sample for mine in ranks for batch in mine for sample in batch]
    assert len(set(seen)) == len(seen) == 18


@pytest.mark.parametrize(("sizes", "more", "message"), [
    ((1, 2), {}, r"batch_size=\(1, 2\) is for 2 ranks, and the world has 1"),
    ((0,), {}, r"batch_size=\(0,\) is not allowed")])
def test_sizes_that_cannot_be(sizes: tuple[int, ...], more: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        loader([1, 2, 3], sizes, **more)


def test_unequal_batches_are_for_training() -> None:
    def body() -> None:
        loader([1, 2, 3], (2, 1), shuffle=False)

    with pytest.raises(UsageError, match=r"differs between ranks, which is for training; where nothing is left out"):
        worlds.in_threads(2, body)
