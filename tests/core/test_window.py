"""Windows of accumulation, on every strategy: what is summed, what it is divided by, and when."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dplab
from dplab.engine import Engine
from dplab.errors import StateError
from dplab.specs import SHARDINGS, Strategy
from tests.worlds import STRATEGIES, in_threads

EVERY = STRATEGIES


class Scalar(nn.Module):
    """One weight at 1; the gradient of `loss(x)` is x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: float) -> torch.Tensor:
        return self.w * x


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def engine_of(strategy: Strategy | str) -> Engine:
    return dplab.parallelize(Scalar(), sgd, strategy)


def backward(engine: Engine, *values: float) -> None:
    for value in values:
        engine.backward(engine(value))


def grad(engine: Engine) -> float | None:
    value = engine.full_grad("w")
    return None if value is None else value.item()


def weight(engine: Engine) -> float:
    return engine.full_state_dict()["w"].item()


@pytest.mark.parametrize("mode", ["window", "micro_batch"])
@pytest.mark.parametrize("name", EVERY)
def test_h09_three_backwards_and_one_step_sum_all_three(name: str, mode: str, where: Any) -> None:
    def body() -> list[Any]:
        engine = engine_of(Strategy.parse(f"{name}+accumulate_mode={mode}"))
        mine = [[1.0, 2.0, 3.0], [3.0, 4.0, 8.0]][dplab.init().rank]
        backward(engine, *mine)
        first = grad(engine)
        assert engine.step()
        backward(engine, mine[0])
        second = grad(engine)
        engine.zero_grad()
        backward(engine, *mine[:2])
        return [first, second, grad(engine), weight(engine)]

    assert where(2, body) == [[10.5, 2.0, 5.0, 1 - 10.5]] * 2


@pytest.mark.parametrize("zero", ["engine", "optimizer", "optimizer-zeros", "module"])
@pytest.mark.parametrize("name", EVERY)
def test_h09_zero_grad_between_backwards_resets_the_window(name: str, zero: str, where: Any) -> None:
    def body() -> float | None:
        engine = engine_of(name)
        backward(engine, 100.0)
        {"engine": engine.zero_grad, "optimizer": engine.optimizer.zero_grad, "module": engine.module.zero_grad,
         "optimizer-zeros": lambda: engine.optimizer.zero_grad(set_to_none=False)}[zero]()
        backward(engine, 3.0)
        return grad(engine)

    assert where(2, body) == [3.0, 3.0]


@pytest.mark.parametrize("mode", ["window", "micro_batch"])
@pytest.mark.parametrize("name", EVERY)
def test_h11_the_last_window_is_divided_by_its_true_size(name: str, mode: str, where: Any) -> None:
    def body() -> list[float]:
        engine = engine_of(Strategy.parse(f"{name}+accum2+accumulate_mode={mode}"))
        seen, steps = [], []
        for _epoch in range(2):
            for value in (1.0, 2.0, 3.0, 4.0, 5.0):
                before = weight(engine)
                backward(engine, value)
                steps.append(engine.step(last=value == 5.0))
                if steps[-1]:
                    seen.append(before - weight(engine))
        assert steps == [False, True, False, True, True] * 2
        return seen

    assert where(2, body) == [[1.5, 3.5, 5.0] * 2] * 2


@pytest.mark.parametrize("name", EVERY)
def test_inside_a_window_nothing_is_stepped_or_clipped(name: str) -> None:
    def body() -> None:
        engine = engine_of(f"{name}+accum3")
        backward(engine, 7.0)
        assert engine.clip_grad_norm_(1.0) is None
        assert not engine.step()
        assert weight(engine) == 1.0
        backward(engine, 7.0, 7.0)
        norm = engine.clip_grad_norm_(1.0)
        assert norm is not None
        assert norm.item() == 7.0
        assert engine.step()
        assert weight(engine) == pytest.approx(0.0, abs=1e-6)

    in_threads(2, body)


def around_forward(engine: Engine, values: list[float]) -> None:
    with engine.no_sync():
        loss = engine(values[0])
    loss.backward()
    engine(values[1]).backward()


def around_backward(engine: Engine, values: list[float]) -> None:
    loss = engine(values[0])
    with engine.no_sync():
        loss.backward()
    engine(values[1]).backward()


def around_both(engine: Engine, values: list[float]) -> None:
    with engine.no_sync():
        engine(values[0]).backward()
    engine(values[1]).backward()


def forwards_first(engine: Engine, values: list[float]) -> None:
    first, second = engine(values[0]), engine(values[1])
    with engine.no_sync():
        first.backward()
    second.backward()


def only_no_sync(engine: Engine, values: list[float]) -> None:
    with engine.no_sync():
        around_both(engine, values)


@pytest.mark.parametrize("loop", [around_forward, around_backward, around_both, forwards_first, only_no_sync])
@pytest.mark.parametrize("name", EVERY)
def test_h08_no_sync_gives_the_sum_wherever_it_stands(name: str, loop: Callable[..., None], where: Any) -> None:
    def body() -> list[float]:
        engine = engine_of(name)
        moved = []
        for _ in range(3):
            before = weight(engine)
            loop(engine, [[1.0, 4.0], [2.0, 7.0]][dplab.init().rank])
            assert engine.step()
            moved.append(before - weight(engine))
        return moved

    assert where(2, body) == [[7.0] * 3] * 2


def test_h08_an_exception_inside_no_sync_restores_it() -> None:
    def body() -> float | None:
        engine = engine_of("zero2")
        with contextlib.suppress(KeyError), engine.no_sync():
            raise KeyError
        backward(engine, 1.0 + dplab.init().rank)
        return grad(engine)

    assert in_threads(2, body) == [1.5, 1.5]


@pytest.mark.parametrize("name", [*SHARDINGS])
def test_h07_replicated_strategies_reduce_once_a_window(name: str) -> None:
    def body() -> int:
        engine = engine_of(f"{name}+accum3+accumulate_mode=window")
        backward(engine, 1.0, 2.0, 3.0)
        engine.step()
        return sum(engine.wire().get(key, {"count": 0})["count"] for key in ("all_reduce", "reduce_scatter"))

    buckets = in_threads(2, lambda: len(engine_of(name)._buckets))
    assert in_threads(2, body) == buckets


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("name", EVERY)
def test_h10_tokens_weigh_the_same_wherever_they_are(name: str, window: int, where: Any) -> None:
    # (tokens, value of each); rank 1 ends with a micro-batch without tokens
    batches = [[(3, 1.0), (1, 5.0), (4, 2.0)], [(2, 2.0), (6, 3.0), (0, 9.0)]]

    def body() -> list[float]:
        engine = engine_of(f"{name}+accum{window}")
        seen = []
        mine = batches[dplab.init().rank]
        for start in range(0, 3, window):
            for tokens, value in mine[start:start + window]:
                engine.backward(engine(tokens * value), weight=tokens)
            before = weight(engine)
            engine.step(last=True)
            seen.append(before - weight(engine))
        return seen

    expected = [7 / 5, 23 / 7, 8 / 4] if window == 1 else [30 / 12, 8 / 4]
    for seen in where(2, body):
        assert seen == pytest.approx(expected, rel=1e-6)


def test_weights_must_be_given_by_all_or_none() -> None:
    def body() -> None:
        engine = engine_of("zero2")
        engine.backward(engine(1.0), weight=3 if dplab.init().rank else None)

    with pytest.raises(StateError, match="with a weight and without one in the same window; give every micro-batch"):
        in_threads(2, body)


def test_h10_weights_that_add_up_to_nothing_are_refused() -> None:
    def body() -> None:
        engine = engine_of("ddp")
        engine.backward(engine(1.0), weight=0)

    with pytest.raises(StateError, match=r"add up to 0.0 over all ranks; they must be above 0"):
        in_threads(2, body)


def test_ranks_with_different_numbers_of_backwards_are_told() -> None:
    def body() -> None:
        engine = engine_of("zero1+accum4")
        backward(engine, *[1.0] * (2 + dplab.init().rank))
        engine.step(last=True)

    with pytest.raises(StateError, match=r"ran \d backwards in this window and another rank a different number"):
        in_threads(2, body)


@pytest.mark.parametrize("name", EVERY)
def test_a_rank_whose_loss_reaches_nothing_takes_part(name: str) -> None:
    def body() -> tuple[float | None, bool, float]:
        engine = engine_of(name)
        loss = engine(4.0)  # every rank runs the forward: ZeRO-3 gathers in it
        engine.backward(loss if dplab.init().rank else torch.zeros(()))
        seen = grad(engine)
        return seen, engine.step(), weight(engine)

    assert in_threads(2, body) == [(2.0, True, -1.0)] * 2


@pytest.mark.parametrize("name", EVERY)
def test_with_plain_backward_such_a_rank_takes_part_in_step(name: str) -> None:
    def body() -> tuple[bool, float]:
        engine = engine_of(name)
        loss = engine(4.0)
        if dplab.init().rank:
            loss.backward()
        return engine.step(), weight(engine)

    assert in_threads(2, body) == [(True, -1.0)] * 2


@pytest.mark.parametrize("name", EVERY)
def test_h03_none_is_not_zero(name: str, where: Any) -> None:
    """What moved nowhere is not stepped: no decay, no momentum; what moved on one rank is, everywhere."""

    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(3, 3, bias=False) for _ in range(3))

        def forward(self, x: torch.Tensor, which: str) -> torch.Tensor:
            return getattr(self, which)(x).sum()

    def body() -> list[bool]:
        torch.manual_seed(0)
        engine = dplab.parallelize(
            Branch(), lambda ps: torch.optim.AdamW(ps, lr=0.1, weight_decay=0.5), name, units=[])
        moved = []
        before = engine.full_state_dict()
        for step in range(3):
            which = "a" if step == 0 else "ab"[dplab.init().rank]
            engine.backward(engine(torch.ones(2, 3), which))
            grads = [engine.full_grad(f"{key}.weight") is not None for key in "abc"]
            engine.step()
            after = engine.full_state_dict()
            moved.append([not torch.equal(before[f"{key}.weight"], after[f"{key}.weight"]) for key in "abc"])
            assert moved[-1] == grads
            before = after
        engine.check_agreement()
        return moved

    expected = [[True, False, False], [True, True, False], [True, True, False]]
    assert where(2, body) == [expected] * 2


@pytest.mark.parametrize("name", EVERY)
def test_splitting_a_run_keeps_its_state(name: str) -> None:
    """A parameter that starts, pauses and goes on equals one process to the end."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
            return (self.a(x) + (self.b(x) if both else 0)).square().mean()

    turns = [True, True, False, True, False, False, True]
    adam = lambda ps: torch.optim.AdamW(ps, lr=0.1, weight_decay=0.5)  # noqa: E731

    def inputs(step: int) -> torch.Tensor:
        return torch.randn(4, 5, generator=torch.Generator().manual_seed(step)).double()

    torch.manual_seed(0)
    model = Two().double()

    def body() -> dict[str, torch.Tensor]:
        engine = dplab.parallelize(copy.deepcopy(model), adam, name, units=[])
        for step, both in enumerate(turns):
            engine.backward(engine(inputs(step), both))
            engine.step()
        return engine.full_state_dict()

    states = in_threads(3, body)
    optimizer = adam(model.parameters())
    for step, both in enumerate(turns):
        optimizer.zero_grad()
        model(inputs(step), both).backward()
        optimizer.step()
    for state in states:
        for key, value in model.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("plain", [True, False], ids=["loss.backward", "engine.backward"])
@pytest.mark.parametrize("name", SHARDINGS)
def test_a_backward_that_raised_leaves_nothing_behind(name: str, plain: bool) -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

        def forward(self, x: torch.Tensor, fail: bool) -> torch.Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
                if fail and layer is self.layers[1]:
                    x.register_hook(lambda _grad: 1 / 0)
            return x.sum()

    torch.manual_seed(0)
    model = Deep()

    def body(fail: bool) -> dict[str, torch.Tensor]:
        engine = dplab.parallelize(copy.deepcopy(model), sgd, f"{name}+bucket_mb=0.0001")
        for step in range(3):
            if fail and step == 1:
                loss = engine(torch.ones(1, 3), True)
                with pytest.raises(ZeroDivisionError):
                    loss.backward() if plain else engine.backward(loss)
            engine.backward(engine(torch.full((1, 3), float(step)), False))
            assert engine.step()
        return engine.full_state_dict()

    expected = in_threads(2, body, False)[0]
    for state in in_threads(2, body, True):
        for key, value in state.items():
            assert torch.equal(value, expected[key]), key
