"""The user's optimizer over owned runs: groups, schedulers, identity, and which optimizers may be cut."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dplab
from dplab.core import optim
from dplab.core.element_wise import is_element_wise
from dplab.errors import StateError, UsageError
from tests import worlds
from tests.worlds import STRATEGIES, in_threads

OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01, amsgrad=True),
    "adamw-foreach": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True),
    "adamw-fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.01),
    "adadelta": lambda ps: torch.optim.Adadelta(ps),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=0.01),
    "rprop": lambda ps: torch.optim.Rprop(ps, lr=0.01),
    "asgd": lambda ps: torch.optim.ASGD(ps, lr=0.01),
    "adamax": lambda ps: torch.optim.Adamax(ps, lr=0.01),
    "radam": lambda ps: torch.optim.RAdam(ps, lr=0.01),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_element_wise_optimizer_equals_one_process(optimizer: str) -> None:
    model = worlds.build(worlds.Uneven)
    batches = worlds.uneven_batches(5 * 2)
    make = OPTIMIZERS[optimizer]
    expected = worlds.reference(model, batches, per_step=2, optimizer=make)
    for name in ("zero1", "zero3"):
        for state in in_threads(2, worlds.train, model, batches, name, optimizer=make):
            for key, value in state.items():
                torch.testing.assert_close(value, expected[key], rtol=1e-10, atol=1e-10)


class Wide(nn.Module):
    """A weight of more elements than a short run, between ones of fewer."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(24, 3), nn.Linear(3, 500), nn.Linear(500, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts(x).square().mean()


@pytest.mark.parametrize("optimizer", ["adamw-foreach", "adagrad", "nadam"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_runs_that_end_inside_a_parameter_step_as_one_run_does(strategy: str, optimizer: str,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, batches = Wide(), [torch.randn(2, 24) for _ in range(3)]

    def body() -> tuple[int, dict[str, torch.Tensor]]:
        engine = dplab.parallelize(copy.deepcopy(model), OPTIMIZERS[optimizer], strategy)
        for batch in batches:
            engine.backward(engine(batch))
            engine.step()
        return len(engine.optimizer.param_groups[0]["params"]), engine.full_state_dict()

    whole, expected = in_threads(2, body)[0]
    monkeypatch.setattr(optim, "CACHED", 256)
    cut, found = in_threads(2, body)[0]
    assert cut > whole
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("make", [
    pytest.param(lambda ps: torch.optim.Muon([p for p in ps if p.ndim == 2], lr=0.01), id="muon"),
    pytest.param(lambda ps: torch.optim.Adafactor(ps, lr=0.01), id="adafactor")])
def test_an_optimizer_of_whole_matrices_runs_under_ddp_and_is_refused_where_they_are_cut(make: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 8, bias=False)).double()
    made = make(model.parameters())
    assert not is_element_wise(made, made.param_groups[0])
    batches = [(torch.randn(4, 8, dtype=torch.float64),) for _ in range(6)]

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = copy.deepcopy(model)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x).square().mean()

    whole = Loss()
    expected = worlds.reference(whole, batches, per_step=2, optimizer=make)

    def body(name: str) -> dict[str, torch.Tensor]:
        engine = dplab.parallelize(copy.deepcopy(whole), make, name)
        for step in range(3):
            engine.backward(engine(*batches[2 * step + dplab.init().rank]))
            engine.step()
        return engine.full_state_dict()

    for state in in_threads(2, body, "ddp"):
        for key, value in state.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-6, atol=1e-8)
    with pytest.raises(UsageError, match="is not element-wise: it needs whole parameters, and this strategy cuts them"):
        in_threads(2, body, "zero1")


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    with pytest.raises(UsageError, match=r"LBFGS cannot step without a closure, and engine\.step"):
        dplab.parallelize(nn.Linear(2, 2), torch.optim.LBFGS)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", STRATEGIES)
def test_h25_groups_keep_options_order_and_number(name: str, size: int, where: Any) -> None:
    model = worlds.build(worlds.Uneven)
    batches = worlds.uneven_batches(5 * size)

    def make(parameters: Any) -> torch.optim.Optimizer:
        parameters = list(parameters)
        return torch.optim.AdamW([
            {"params": (p for p in parameters if p.ndim < 2), "weight_decay": 0.0, "lr": 0.1},
            {"params": [], "lr": 5.0},
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.5, "tag": "matrices"}], lr=0.01)

    expected = worlds.reference(model, batches, per_step=size, optimizer=make)
    for state in where(size, worlds.train, model, batches, name, optimizer=make):
        for key, value in state.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-10, atol=1e-10)

    def groups() -> list[dict[str, Any]]:
        engine = dplab.parallelize(copy.deepcopy(model), make, name)
        assert isinstance(engine.optimizer, torch.optim.Optimizer)
        return [{key: group[key] for key in ("lr", "weight_decay")} | {"tag": group.get("tag")}
                for group in engine.optimizer.param_groups]

    assert where(size, groups) == [[{"lr": 0.1, "weight_decay": 0.0, "tag": None},
                                         {"lr": 5.0, "weight_decay": 0.01, "tag": None},
                                         {"lr": 0.01, "weight_decay": 0.5, "tag": "matrices"}]] * size


@pytest.mark.parametrize("before", [True, False], ids=["before-wrap", "after-wrap"])
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.filterwarnings("error")
def test_h26_a_scheduler_acts_on_what_is_stepped(name: str, before: bool, where: Any) -> None:
    def body() -> list[float]:
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        make = lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=1, gamma=0.1)  # noqa: E731
        scheduler = make(optimizer) if before else None
        engine = dplab.parallelize(model, optimizer, name)
        scheduler = scheduler or make(engine.optimizer)
        changes = []
        for _ in range(3):
            start = engine.full_state_dict()["weight"].item()
            engine.backward(engine(torch.ones(1, 1)).sum())
            if engine.step():
                scheduler.step()
            changes.append(start - engine.full_state_dict()["weight"].item())
        return changes

    for changes in where(2, body):
        assert changes == pytest.approx([1.0, 0.1, 0.01], rel=1e-5)


def test_stepping_the_optimizer_itself_points_to_the_engine() -> None:
    engine = dplab.parallelize(nn.Linear(2, 2), torch.optim.SGD, "zero1")
    with pytest.raises(StateError, match=r"SGD.step\(\) was called directly; call engine.step\(\)"):
        engine.optimizer.step()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(engine(torch.ones(1, 2)).sum()).backward()
    with pytest.raises(StateError, match="with a GradScaler: drop it"):
        scaler.step(engine.optimizer)


def test_h28_an_optimizer_on_a_part_keeps_that_part() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    engine = dplab.parallelize(model, torch.optim.SGD(model[1].parameters(), lr=1.0), "zero2")
    before = engine.full_state_dict()
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    after = engine.full_state_dict()
    assert torch.equal(before["0.weight"], after["0.weight"])
    assert not torch.equal(before["1.weight"], after["1.weight"])


def test_h28_bad_optimizers_are_named() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"SGD holds 2 tensors that are no parameters of the model .*shape \(3, 3\)"):
        dplab.parallelize(model, torch.optim.SGD(nn.Linear(3, 3).parameters()))
    with pytest.raises(UsageError, match=r"optimizer is a float; give a torch.optim.Optimizer, or a function"):
        dplab.parallelize(model, 0.1)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"the optimizer function returned a list; it must return"):
        dplab.parallelize(model, list)  # type: ignore[arg-type]
    stepped = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    stepped.step()
    with pytest.raises(UsageError, match="Adam has already stepped; give parallelize a fresh one"):
        dplab.parallelize(model, stepped)


@pytest.mark.parametrize("kind", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_h27_clipping_equals_one_process(name: str, kind: float, size: int, where: Any) -> None:
    model = worlds.build(worlds.Uneven)
    batches = worlds.uneven_batches(size)
    whole = copy.deepcopy(model)
    for batch in batches:
        (whole(*batch) / size).backward()
    expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.05, kind)

    def body() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        engine = dplab.parallelize(copy.deepcopy(model), worlds.adamw, name)
        engine.backward(engine(*batches[dplab.init().rank]))
        norm = engine.clip_grad_norm_(0.05, kind)
        assert norm is not None
        return norm, {n: engine.full_grad(n) for n, _ in engine.module.named_parameters()}

    results = where(size, body)
    for norm, grads in results:
        assert norm.item() == results[0][0].item()
        torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
        for key, parameter in whole.named_parameters():
            torch.testing.assert_close(grads[key], parameter.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("name", STRATEGIES)
def test_h25_gradients_of_zero_leave_one_group_and_decay_the_other(name: str, where: Any) -> None:
    def body() -> list[tuple[torch.Tensor, torch.Tensor]]:
        model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.75)
        flat = [p for p in model.parameters() if p.ndim < 2]
        whole = [p for p in model.parameters() if p.ndim >= 2]
        groups = [{"params": flat, "weight_decay": 0.0, "lr": 0.1}, {"params": whole, "weight_decay": 0.5, "lr": 0.01}]
        engine = dplab.parallelize(model, torch.optim.AdamW(groups), name)
        before = engine.full_state_dict()
        engine.backward(engine(torch.ones(2, 3)).sum() * 0.0)
        assert engine.step()
        after = engine.full_state_dict()
        return [(before[key], after[key]) for key in before]

    for pairs in where(2, body):
        for before, after in pairs:
            assert torch.equal(after, before if before.ndim < 2 else before * (1 - 0.01 * 0.5))


@pytest.mark.parametrize("name", STRATEGIES)
def test_h25_a_group_added_later_is_stepped_from_then_on(name: str, where: Any) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()

    def train(model: nn.Sequential, made: Any, turn: Callable[[int], None]) -> None:
        for step in range(4):
            if step == 2:
                made.add_param_group({"params": model[0].parameters(), "lr": 0.01, "weight_decay": 0.5})
            turn(step)

    def batch(step: int, rank: int) -> torch.Tensor:
        return torch.randn(4, 3, generator=torch.Generator().manual_seed(7 * step + rank)).double()

    def body() -> dict[str, torch.Tensor]:
        model = copy.deepcopy(plain)
        engine = dplab.parallelize(model, torch.optim.AdamW(model[1].parameters(), lr=0.1), name)

        def turn(step: int) -> None:
            engine.backward(engine(batch(step, dplab.init().rank)).square().mean())
            assert engine.step()

        train(model, engine.optimizer, turn)
        assert [group["lr"] for group in engine.optimizer.param_groups] == [0.1, 0.01]
        with pytest.raises(UsageError, match=r"a parameter of shape \(4, 3\) is in another group already"):
            engine.optimizer.add_param_group({"params": [model[0].weight]})
        with pytest.raises(UsageError, match=r"a parameter of shape \(2,\) was not trained when the model was wrapped"):
            engine.optimizer.add_param_group({"params": nn.Parameter(torch.ones(2))})
        return engine.full_state_dict()

    states = where(2, body)
    reference = copy.deepcopy(plain)
    made = torch.optim.AdamW(reference[1].parameters(), lr=0.1)

    def turn(step: int) -> None:
        made.zero_grad()
        reference.zero_grad()
        for rank in range(2):
            (reference(batch(step, rank)).square().mean() / 2).backward()
        made.step()

    train(reference, made, turn)
    for state in states:
        for key, value in reference.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.filterwarnings("error")
def test_h26_a_scheduler_goes_on_after_the_optimizers_state_was_loaded(name: str, where: Any) -> None:
    """OneCycleLR turns rate and momentum of two groups; load_state_dict puts other group objects in their place."""
    torch.manual_seed(0)
    plain = nn.Linear(3, 2).double()

    def optimizer(model: nn.Linear) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.01}], lr=0.1, momentum=0.9)

    def cycle(made: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(made, max_lr=[0.5, 0.05], total_steps=8)

    def batch(step: int, rank: int) -> torch.Tensor:
        return torch.randn(4, 3, generator=torch.Generator().manual_seed(7 * step + rank)).double()

    def body() -> dict[str, torch.Tensor]:
        model = copy.deepcopy(plain)
        engine = dplab.parallelize(model, optimizer(model), name)
        scheduler = cycle(engine.optimizer)
        for step in range(6):
            if step == 3:
                kept = copy.deepcopy(engine.optimizer.state_dict())
                engine.optimizer.load_state_dict(kept)
            engine.backward(engine(batch(step, dplab.init().rank)).square().mean())
            assert engine.step()
            scheduler.step()
        return engine.full_state_dict()

    states = where(2, body)
    reference = copy.deepcopy(plain)
    made = optimizer(reference)
    scheduler = cycle(made)
    for step in range(6):
        made.zero_grad()
        for rank in range(2):
            (reference(batch(step, rank)).square().mean() / 2).backward()
        made.step()
        scheduler.step()
    for state in states:
        for key, value in reference.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", STRATEGIES)
def test_h28_an_optimizer_made_before_the_wrap_steps_the_wrapped_model(name: str, where: Any) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()

    def batch(step: int, rank: int) -> torch.Tensor:
        return torch.randn(4, 3, generator=torch.Generator().manual_seed(7 * step + rank)).double()

    def body() -> dict[str, torch.Tensor]:
        model = copy.deepcopy(plain)
        engine = dplab.parallelize(model, torch.optim.Adam(model.parameters(), lr=0.1), name)
        for step in range(3):
            engine.backward(engine(batch(step, dplab.init().rank)).square().mean())
            assert engine.step()
        return engine.full_state_dict()

    states = where(2, body)
    reference = copy.deepcopy(plain)
    made = torch.optim.Adam(reference.parameters(), lr=0.1)
    for step in range(3):
        made.zero_grad()
        for rank in range(2):
            (reference(batch(step, rank)).square().mean() / 2).backward()
        made.step()
    for state in states:
        for key, value in reference.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-10, atol=1e-12)
            assert not torch.equal(value, plain.state_dict()[key])


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_h28_an_optimizer_made_after_the_wrap_has_nothing_to_step_and_is_told(name: str) -> None:
    def body() -> str:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        engine = dplab.parallelize(model, torch.optim.SGD, name)
        engine(torch.ones(1, 3))
        late = torch.optim.Adam(model.parameters())
        engine(torch.ones(1, 3)).sum().backward()
        try:
            late.step()
        except StateError as error:
            return str(error)
        return "nothing was refused"

    for told in in_threads(2, body):
        assert "the averaged gradient of parameter" in told or "is used outside its unit" in told
