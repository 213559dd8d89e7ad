"""The parity table: strategy x world x accumulation, against one float64 process and against each other."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

import dplab
from dplab.specs import SHARDINGS, Strategy
from tests import worlds

STEPS = 5
MODES = ("window", "micro_batch")


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", SHARDINGS)
def test_h01_equals_one_process(name: str, accumulate: int, size: int) -> None:
    model = worlds.build(worlds.Uneven)
    batches = worlds.uneven_batches(STEPS * size * accumulate)
    expected = worlds.reference(model, batches, per_step=size * accumulate)
    strategy = Strategy(sharding=name, accumulate=accumulate, bucket_mb=0.0005)
    for state in worlds.in_threads(size, worlds.train, model, batches, strategy):
        assert list(state) == list(expected)
        for key, value in state.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("mode", "accumulate"), [(MODES[0], 1), *itertools.product(MODES, [3])])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_strategies_agree_to_the_bit(size: int, accumulate: int, mode: str) -> None:
    model = worlds.build(worlds.Uneven, torch.float32)
    batches = worlds.uneven_batches(STEPS * size * accumulate)
    states = []
    for name, bucket_mb in itertools.product(SHARDINGS, (0.0005, None)):
        strategy = Strategy(sharding=name, accumulate=accumulate, accumulate_mode=mode, bucket_mb=bucket_mb,
                            clip_grad_norm=0.5)
        states += worlds.in_threads(size, worlds.train, model, batches, strategy)
    for state in states[1:]:
        for key, value in state.items():
            assert torch.equal(value, states[0][key]), key


@pytest.mark.parametrize("accumulate", [1, 3])
def test_strategies_agree_to_the_bit_over_gloo(accumulate: int) -> None:
    model = worlds.build(worlds.Uneven, torch.float32)
    batches = worlds.uneven_batches(STEPS * 2 * accumulate)
    states = []
    for name, mode in itertools.product(SHARDINGS, ["window"]):
        strategy = Strategy(sharding=name, accumulate=accumulate, accumulate_mode=mode, bucket_mb=0.0005)
        states += worlds.in_processes(2, worlds.train, model, batches, strategy)
    states += worlds.in_threads(2, worlds.train, model, batches, strategy)
    for state in states[1:]:
        for key, value in state.items():
            assert torch.equal(value, states[0][key]), key


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("name", SHARDINGS)
def test_equals_one_process_over_gloo(name: str, size: int) -> None:
    model = worlds.build(worlds.Uneven)
    batches = worlds.uneven_batches(STEPS * size)
    expected = worlds.reference(model, batches, per_step=size)
    for state in worlds.in_processes(size, worlds.train, model, batches, Strategy(sharding=name, bucket_mb=0.0005)):
        for key, value in state.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-10, atol=1e-10)


def fsdp2(model: torch.nn.Module, batches: list[worlds.Batch]) -> dict[str, torch.Tensor]:
    from torch.distributed.fsdp import fully_shard

    world = dplab.init()
    model = copy.deepcopy(model)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = worlds.adamw(model.parameters())
    for start in range(0, len(batches), world.size):
        optimizer.zero_grad()
        model(*batches[start + world.rank]).backward()
        optimizer.step()
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("size", [2, 3])
def test_zero3_equals_fsdp2(size: int) -> None:
    model = worlds.build(worlds.Even)
    batches = worlds.uneven_batches(STEPS * size)
    theirs = worlds.in_processes(size, fsdp2, model, batches)[0]
    for state in worlds.in_processes(size, worlds.train, model, batches, "zero3"):
        for key, value in state.items():
            torch.testing.assert_close(value, theirs[key], rtol=1e-10, atol=1e-10)
