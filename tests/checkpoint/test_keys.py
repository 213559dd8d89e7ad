"""H36: names are the plain model's, in its order, whatever has been wrapped around it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import dplab
from tests.checkpoint.programs import same
from tests.worlds import adamw, in_threads


class Inner(nn.Module):
    """Real names that look like a wrapper's."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(4, 4)
        self.zebra = nn.ModuleDict({"module": nn.Linear(4, 4)})
        self.alpha = nn.Linear(4, 4)
        self.register_buffer("mask", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.alpha(self.zebra["module"](self.module(x))) * self.mask


class Outer(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        inner: Any = Inner()
        for wrap in how.split("+") if how != "plain" else ():
            inner = checkpoint_wrapper(inner) if wrap == "checkpoint" else torch.compile(inner, backend="eager")
        self.inner = inner
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(x)).sum()


HOW = ["plain", "checkpoint", "compile", "checkpoint+compile", "compile+checkpoint"]


def saved(how: str, strategy: str, place: Path) -> dict[str, torch.Tensor]:
    engine = dplab.parallelize(Outer(how), adamw, strategy)
    with torch.random.fork_rng():
        engine.backward(engine.module.last(torch.ones(2, 4)).sum() if "compile" in how else engine(torch.ones(2, 4)))
    engine.step()
    engine.save(place)
    return engine.full_state_dict()


def loaded(how: str, strategy: str, place: Path) -> dict[str, torch.Tensor]:
    engine = dplab.parallelize(Outer(how), adamw, strategy)
    engine.load(place)
    return engine.full_state_dict()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_h36_keys_are_the_plain_models_in_order_through_every_wrapping(how: str, strategy: str, tmp_path: Path) -> None:
    values = in_threads(2, saved, how, strategy, tmp_path / "saved")[0]
    dcp_to_torch_save(tmp_path / "saved", tmp_path / "one.pt")
    plain, found = Outer("plain"), torch.load(tmp_path / "one.pt", weights_only=True)
    assert list(found["model"]) == list(plain.state_dict())
    plain.load_state_dict(found["model"])
    assert same(dict(plain.state_dict()), values)
    assert set(found["optim"]["state"]) <= set(dict(plain.named_parameters()))
    assert "last.weight" in found["optim"]["state"]
    assert found["optim"]["param_groups"][0]["params"] == list(dict(plain.named_parameters()))
    assert same(in_threads(3, loaded, "plain", strategy, tmp_path / "saved")[0], values)


@pytest.mark.parametrize("how", HOW[1:])
def test_h36_a_plain_checkpoint_loads_into_every_wrapping(how: str, tmp_path: Path) -> None:
    values = in_threads(1, saved, "plain", "ddp", tmp_path / "saved")[0]
    assert same(in_threads(2, loaded, how, "zero3", tmp_path / "saved")[0], values)
