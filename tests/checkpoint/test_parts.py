"""What is neither weight nor moment: loaders, schedulers, loss scale, generators, buffers, extra state, events."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import dplab
from dplab.errors import UsageError
from dplab.telemetry import recorder
from tests.checkpoint.programs import same
from tests.worlds import in_processes, in_threads


class Noisy(nn.Module):
    """Dropout, running statistics, extra state, a frozen weight, an empty one, a buffer that is not stored."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
        self.fixed = nn.Parameter(torch.ones(5), requires_grad=False)
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.seen = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        h = nn.functional.dropout(self.norm(self.first(x)) * self.fixed, 0.3, training=self.training)
        return nn.functional.cross_entropy(self.last(torch.relu(h)), y)


def noisy(strategy: str, optimizer: Any, start: int, stop: int, load: Path | None,
          save: Path | None) -> tuple[dict[str, Any], list[float], list[float]]:
    """A program with everything that resuming must bring back."""
    world = dplab.init()
    torch.manual_seed(3)
    model = Noisy()
    torch.manual_seed(world.rank)
    random.seed(world.rank)
    numpy.random.seed(world.rank)
    rows = torch.Generator().manual_seed(1)
    data = list(zip(torch.randn(64, 6, generator=rows), torch.randint(0, 3, (64,), generator=rows), strict=True))
    engine = dplab.parallelize(model, optimizer, strategy)
    loader = dplab.loader(data, batch_size=4, seed=2)
    scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, step_size=2, gamma=0.7)
    if load is not None:
        assert engine.load(load, loader=loader, scheduler=scheduler) == start
    losses, drawn, step = [], [], start
    while step < stop:
        for x, y in loader:
            loss = engine(x + random.random() * 0.01, y)
            engine.backward(loss)
            engine.step()
            scheduler.step()
            losses.append(loss.item())
            drawn.append(float(numpy.random.rand()))
            step += 1
            if step == stop:
                break
    if save is not None:
        engine.save(save, loader=loader, scheduler=scheduler)
    return engine.full_state_dict(), losses, drawn


OPTIMIZERS = {"adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2), "nadam": lambda ps: torch.optim.NAdam(ps, lr=1e-2),
              "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
              "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1),
              "amsgrad": lambda ps: torch.optim.Adam(ps, lr=1e-2, amsgrad=True)}


@pytest.mark.parametrize(("strategy", "optimizer"), [
    ("ddp", "nadam"), ("zero1", "sgd"), ("zero2", "adamw"), ("zero3", "amsgrad"), ("zero3", "adagrad"),
    ("zero2+amp-fp16", "adamw"), ("zero1+fp16", "adamw"), ("zero3+bf16+bucket_mb=1e-05", "sgd")])
def test_everything_comes_back_to_the_bit(strategy: str, optimizer: str, tmp_path: Path) -> None:
    make = OPTIMIZERS[optimizer]
    whole = in_processes(2, noisy, strategy, make, 0, 11, None, None)
    first = in_processes(2, noisy, strategy, make, 0, 5, None, tmp_path / "saved")  # in the middle of an epoch of 8
    after = in_processes(2, noisy, strategy, make, 5, 11, tmp_path / "saved", None)
    for rank in range(2):
        assert whole[rank][1] == first[rank][1] + after[rank][1]
        assert whole[rank][2] == first[rank][2] + after[rank][2]
        weights, again = whole[rank][0], after[rank][0]
        assert weights.pop("_extra_state") == again.pop("_extra_state") == {"seen": 11}
        assert same(weights, again)


@pytest.mark.parametrize("rule", ["local", "mean", "rank0"])
def test_statistics_come_back_as_they_are_on_every_rank(rule: Any, tmp_path: Path) -> None:
    def ranks(load: bool) -> torch.Tensor:
        engine = dplab.parallelize(copy.deepcopy(model), OPTIMIZERS["sgd"], "zero2", buffers=rule)
        if load:
            engine.load(tmp_path / "saved")
        else:
            rows = torch.arange(24.0).view(4, 6) * (engine.world.rank + 1)
            engine.backward(engine(rows, torch.zeros(4, dtype=torch.long)))
            engine.step()
            engine.save(tmp_path / "saved")
        return engine.module.norm.running_mean.clone()

    model = Noisy()
    before, after = in_threads(2, ranks, False), in_threads(2, ranks, True)
    assert torch.equal(before[0], before[1]) == (rule != "local")
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("make", [
    lambda ps: torch.optim.Adafactor(ps, lr=0.1),
    pytest.param(lambda ps: torch.optim.Muon([p for p in ps if p.ndim == 2], lr=0.1), marks=pytest.mark.skipif(
        not hasattr(torch.optim, "Muon"), reason="torch is older than Muon"))])
def test_an_optimizer_that_needs_whole_parameters_goes_on_under_ddp(make: Any, tmp_path: Path) -> None:
    def ranks(start: int, stop: int, load: bool) -> dict[str, torch.Tensor]:
        engine = dplab.parallelize(copy.deepcopy(model), make, "ddp")
        if load:
            engine.load(tmp_path / "saved")
        for step in range(start, stop):
            engine.backward(engine(torch.full((2, 6), step + 1.0)).square().mean())
            engine.step()
        engine.save(tmp_path / f"{stop}")
        if not load and stop == 2:
            engine.save(tmp_path / "saved")
        return engine.full_state_dict()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3), nn.Linear(3, 1))
    whole = in_threads(1, ranks, 0, 4, False)[0]
    in_threads(2, ranks, 0, 2, False)
    for size in (1, 2):
        found = in_threads(size, ranks, 2, 4, True)[0]
        for name, value in whole.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_the_loss_scale_comes_back(tmp_path: Path) -> None:
    def ranks(load: bool) -> tuple[float, int]:
        engine = dplab.parallelize(nn.Linear(3, 3), OPTIMIZERS["sgd"], "zero2+amp-fp16")
        scaler = engine._reduction.scaler
        if load:
            engine.load(tmp_path / "saved")
        else:
            scaler.scale, scaler.good = 128.0, 77
            engine.save(tmp_path / "saved")
        return scaler.scale, scaler.good

    in_threads(2, ranks, False)
    assert in_threads(3, ranks, True) == [(128.0, 77)] * 3


@pytest.mark.parametrize("size", [1, 3])
def test_statistics_and_empty_and_frozen_ones_come_over_to_other_world_sizes(size: int, tmp_path: Path) -> None:
    def ranks(load: bool) -> dict[str, torch.Tensor]:
        engine = dplab.parallelize(copy.deepcopy(model), OPTIMIZERS["adamw"], "zero3" if load else "zero2",
                                   buffers="mean")
        if load:
            engine.load(tmp_path / "saved")
        else:
            engine.backward(engine(torch.randn(4, 6), torch.zeros(4, dtype=torch.long)))
            engine.step()
            engine.save(tmp_path / "saved")
        return engine.full_state_dict()

    model = Noisy()
    before = in_threads(1, ranks, False)[0]
    model = Noisy()
    after = in_threads(size, ranks, True)[0]
    assert before.pop("_extra_state") == after.pop("_extra_state")
    assert same(before, after)
    assert before["norm.num_batches_tracked"] == 1


def test_parameters_that_have_moved_unequally_often_keep_their_own_counters(tmp_path: Path) -> None:
    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

        def forward(self, which: int) -> torch.Tensor:
            return self.parts[which](torch.ones(2, 3)).square().sum()

    def ranks(turns: list[int], load: Path | None, save: Path | None) -> dict[str, torch.Tensor]:
        engine = dplab.parallelize(model, OPTIMIZERS["adamw"], strategy)
        if load is not None:
            engine.load(load)
        for which in turns:
            engine.backward(engine(which))
            engine.step()
        if save is not None:
            engine.save(save)
        return engine.full_state_dict()

    torch.manual_seed(0)
    start = Fork()
    for strategy in ("zero2", "zero3", "ddp"):
        model = copy.deepcopy(start)
        in_threads(1, ranks, [0, 0, 2], None, tmp_path / strategy)
        model = copy.deepcopy(start)
        found = in_threads(1, ranks, [1, 0, 2], tmp_path / strategy, None)[0]
        model = copy.deepcopy(start)
        assert same(found, in_threads(1, ranks, [0, 0, 2, 1, 0, 2], None, None)[0])


def test_what_cannot_be_stored_safely_is_refused_by_name(tmp_path: Path) -> None:
    class Part:
        def state_dict(self) -> Any:
            return {"rate": lambda: 3}

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError

    def ranks() -> str:
        engine = dplab.parallelize(nn.Linear(3, 3), OPTIMIZERS["sgd"])
        with pytest.raises(UsageError) as caught:
            engine.save(tmp_path / "saved", mine=Part())
        return str(caught.value)

    assert in_threads(2, ranks)[1].startswith("'dplab.parts.mine' holds a dict that cannot be stored safely")
    assert not list(tmp_path.iterdir())


def test_saves_and_loads_are_events(tmp_path: Path) -> None:
    class Listener(recorder.Recorder):
        def __init__(self) -> None:
            self.spans: list[tuple[str, str, int]] = []

        def span(self, kind: str, name: str, t0: int, t1: int, **attrs: Any) -> None:
            if kind == "checkpoint":
                assert t0 <= t1
                self.spans.append((kind, name, attrs["bytes"]))

    def ranks() -> list[tuple[str, str, int]]:
        mine = Listener()
        recorder.install(mine)
        engine = dplab.parallelize(nn.Linear(64, 64), OPTIMIZERS["sgd"], "zero2")
        engine.save(tmp_path / "saved")
        engine.save(tmp_path / "beside", wait=False).wait()
        engine.load(tmp_path / "saved")
        engine.save(tmp_path / "weights.safetensors")
        return mine.spans

    spans = in_threads(2, ranks)[0]
    assert [name for _, name, _ in spans] == ["save", "snapshot", "save", "load", "save"]
    assert all(nbytes >= 64 * 32 * 4 for _, _, nbytes in spans)
