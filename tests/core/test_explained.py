"""What `dplab.explain` predicts is what the wire then counts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import dplab
from dplab.specs import SHARDINGS
from tests.worlds import in_threads


class Layers(nn.Module):
    """Only units, each needed again in backward: no root, and no padding, since 128 x 128 divides by every world."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 384, bias=False) if i % 2 == 0 else nn.Linear(384, 128, bias=False)
                                    for i in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().square().mean()


def counted(strategy: str) -> dict[str, Any]:
    engine = dplab.parallelize(Layers(), torch.optim.AdamW, strategy)

    def step() -> None:
        for _ in range(engine.strategy.accumulate):
            engine.backward(engine(torch.ones(2, 128, requires_grad=True)))
        engine.step()

    step()
    before = engine.wire()
    step()
    return {name: row["bytes"] - before.get(name, {"bytes": 0})["bytes"] for name, row in engine.wire().items()}


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("name", "precision", "window"), [
    *itertools.product(SHARDINGS, ["", "+bf16"], ["", "+accum2", "+accum2+accumulate_mode=window"])])
def test_explain_predicts_what_is_counted(name: str, precision: str, window: str, size: int) -> None:
    strategy = name + precision + window
    told = dplab.explain(strategy, Layers(), size)
    for sent in in_threads(size, counted, strategy):
        assert {key: sent.get(key, 0) for key in told.bytes_sent} == told.bytes_sent
