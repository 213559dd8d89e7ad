"""The parity table: strategy x world x accumulation, against one float64 process and against each other."""

from __future__ import annotations

import itertools

import pytest
import torch

from dplab.specs import SHARDINGS, Strategy
from tests import worlds

STEPS = 5
MODES = ("window", "micro_batch")


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", SHARDINGS)
def test_equals_one_process(name: str, accumulate: int, size: int) -> None:
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
