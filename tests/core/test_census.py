"""Parameters frozen, thawed and added after wrapping; branches and batches that differ between ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dplab
from dplab.errors import StateError, WireError
from dplab.specs import SHARDINGS
from dplab.wire.threads import ThreadTransport
from tests import worlds
from tests.worlds import STRATEGIES, in_processes, in_threads


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


def pair() -> nn.Module:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    return model


def loop(strategy: str, change: Callable[[nn.Module, int], None], prepare: Any = lambda model: None) -> None:
    """One step, the change, another step."""
    model = pair()
    prepare(model)
    engine = dplab.parallelize(model, momentum, strategy)
    rank = dplab.init().rank
    for step in range(2):
        if step == 1:
            change(model, rank)
        engine.backward(engine(torch.tensor([[1.0 + 2 * rank]]).double()).sum())
        engine.step()


def freeze_first(model: nn.Module) -> None:
    model[0].requires_grad_(False)


@pytest.mark.parametrize(("where", "size"), [(in_threads, 1), (in_threads, 2), (in_threads, 3), (in_processes, 2)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_h06_thawing_after_wrapping_is_refused_by_name(strategy: str, size: int, where: Any) -> None:
    with pytest.raises(StateError, match=r"parameter '0\.weight' was frozen when the model was wrapped and requires "
                                         r"a gradient now, on (every rank|rank \d); make the model what it shall be"):
        where(size, loop, strategy, lambda model, rank: model[0].requires_grad_(True) and None, freeze_first)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_h06_thawing_on_one_rank_names_that_rank(strategy: str, size: int) -> None:
    def change(model: nn.Module, rank: int) -> None:
        if rank == 0:
            model[0].requires_grad_(True)

    seen: list[str] = []

    def body() -> None:
        try:
            loop(strategy, change, freeze_first)
        except (StateError, WireError) as error:
            seen.append(str(error))
            raise

    with pytest.raises((StateError, WireError)):
        in_threads(size, body)
    assert len(seen) == size
    # whoever reduces learns it in the control message; ZeRO-3 stops on the rank itself, before it gathers
    where = "on rank 0;" if strategy.startswith("zero3") else "on ranks [0] and not on the others;"
    for text in seen:
        assert "parameter '0.weight' was frozen when the model was wrapped and requires a gradient now" in text
        assert where in text


@pytest.mark.parametrize("strategy", [each for each in STRATEGIES if not each.startswith("zero3")])
def test_h06_freezing_on_one_rank_names_both_sides(strategy: str) -> None:
    def change(model: nn.Module, rank: int) -> None:
        model[0].requires_grad_(rank != 1)

    with pytest.raises(StateError, match=r"parameter '0\.weight' is frozen on ranks \[1\] and requires a gradient on "
                                         r"ranks \[0, 2\]; freeze it on every rank at the same step"):
        in_threads(3, loop, strategy, change)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_h06_frozen_again_nothing_moves_a_weight_and_thawed_it_goes_on(strategy: str, size: int) -> None:
    """Neither momentum nor decay; as one process that skips it."""
    turns = [True, True, False, False, True]

    def body() -> list[float]:
        model, world = pair(), dplab.init()
        engine = dplab.parallelize(model, momentum, strategy)
        seen = []
        for turn, trained in enumerate(turns):
            model[0].requires_grad_(trained)
            engine.backward(engine(torch.tensor([[1.0 + turn + world.rank]]).double()).sum())
            assert (engine.full_grad("0.weight") is not None) == trained
            engine.step()
            seen.append(engine.full_state_dict()["0.weight"].item())
        engine.check_agreement()
        return seen

    model = pair()
    optimizer = momentum(model.parameters())
    expected = []
    for turn, trained in enumerate(turns):
        model[0].requires_grad_(trained)
        optimizer.zero_grad()
        for rank in range(size):
            (model(torch.tensor([[1.0 + turn + rank]]).double()).sum() / size).backward()
        optimizer.step()
        expected.append(model[0].weight.item())
    assert expected[1] == expected[2] == expected[3] != expected[4]
    for seen in in_threads(size, body):
        assert seen == pytest.approx(expected, rel=1e-12)
        assert seen[1] == seen[2] == seen[3]


def append(model: nn.Module, rank: int) -> None:
    model.append(nn.Linear(1, 1).double())


def replace(model: nn.Module, rank: int) -> None:
    model[1] = nn.Linear(1, 1).double()


def reassign(model: nn.Module, rank: int) -> None:
    model[1].weight = nn.Parameter(torch.ones(1, 1).double())


def attach_frozen(model: nn.Module, rank: int) -> None:
    model.append(nn.Linear(1, 1).double().requires_grad_(False))


@pytest.mark.parametrize("change", [append, replace, reassign, attach_frozen])
@pytest.mark.parametrize(("where", "size"), [(in_threads, 1), (in_threads, 2), (in_threads, 3), (in_processes, 2)])
@pytest.mark.parametrize("name", SHARDINGS)
def test_h45_what_is_added_after_wrapping_is_refused_by_name(name: str, size: int, where: Any, change: Any) -> None:
    with pytest.raises(StateError, match=r"parameter '[12]\.\w+' was added after the model was wrapped, on"):
        where(size, loop, name, change)


class Branches(nn.Module):
    """Two layers of the same padded size, so that nothing but their names tells them apart on the wire."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.a, self.b = nn.Linear(2, 3), nn.Linear(2, 5)
        self.double()

    def forward(self, x: torch.Tensor, which: str) -> torch.Tensor:
        return sum(getattr(self, key)(x).sum() for key in which)  # type: ignore[return-value]


@pytest.mark.parametrize(("where", "size"), [(in_threads, 2), (in_threads, 3), (in_processes, 2)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_h04_ranks_in_different_branches_equal_one_process(strategy: str, size: int, where: Any) -> None:
    model = Branches()
    turns = ["ab", "ba", ("ab", "ab")]

    def which(step: int, rank: int) -> str:
        return turns[step][rank % 2]

    def body() -> dict[str, torch.Tensor]:
        rank = dplab.init().rank
        # ZeRO-3 gathers both layers with the root, whichever is used
        engine = dplab.parallelize(copy.deepcopy(model), worlds.adamw, strategy, units=[])
        for step in range(3):
            engine.backward(engine(torch.full((1, 2), 1.0 + rank).double(), which(step, rank)))
            engine.step()
        engine.check_agreement()
        return engine.full_state_dict()

    states = where(size, body)
    optimizer = worlds.adamw(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(size):
            (model(torch.full((1, 2), 1.0 + rank).double(), which(step, rank)) / size).backward()
        optimizer.step()
    for state in states:
        for key, value in model.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("size", [2, 3])
def test_h04_units_that_only_some_ranks_run_are_named_by_both(size: int) -> None:
    def body() -> None:
        engine = dplab.parallelize(Branches(), worlds.adamw, "zero3", units=["a", "b"])
        engine.backward(engine(torch.ones(1, 2).double(), "ab"[dplab.init().rank % 2]))
        engine.step()

    with pytest.raises(WireError, match=r"in step 1, after 0 .* rank \d calls all_gather of \d+ float64 for "
                                        r"([ab])\..* where rank \d calls all_gather of \d+ float64 for (?!\1)[ab]\."):
        in_threads(size, body)


def one_unit_each() -> None:
    engine = dplab.parallelize(Branches(), worlds.adamw, "zero3", units=["a", "b"])
    engine.backward(engine(torch.ones(1, 2).double(), "ab"[dplab.init().rank]))


def test_h04_where_calls_have_no_words_the_control_message_tells_units_of_one_size_apart(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """As over nccl, whose calls of one size meet whatever they are for."""
    monkeypatch.setattr(ThreadTransport, "label", property(lambda _: "", lambda *_: None))
    with pytest.raises(WireError, match=r"rank 0 issued all_gather of 256 float64 for a\..* where rank 1 issued "
                                        r"all_gather of 256 float64 for b\..*; every rank must run the same units"):
        in_threads(2, one_unit_each)


def test_h04_over_gloo_units_of_one_size_are_told_apart_where_they_meet() -> None:
    with pytest.raises(WireError, match=r"rank \d calls all_gather of 256 float64 for ([ab])\..* where rank \d calls "
                                        r"all_gather of 256 float64 for (?!\1)[ab]\."):
        in_processes(2, one_unit_each)


@pytest.mark.parametrize("counts", [(2, 3), (1, 2, 4), (0, 1)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_h12_a_rank_with_fewer_batches_is_named_to_those_that_wait(strategy: str, counts: tuple[int, ...]) -> None:
    seen: dict[int, str] = {}

    def body() -> None:
        world = dplab.init()
        engine = dplab.parallelize(pair(), momentum, strategy)
        try:
            for _ in range(counts[world.rank]):
                engine.backward(engine(torch.ones(1, 1).double()).sum())
                engine.step()
        except WireError as error:
            seen[world.rank] = str(error)
            raise

    with pytest.raises(WireError, match=rf"in step {counts[0] + 1}, after {counts[0]} that every rank ended: rank 0 "
                                        rf"left: it has ended while others still wait for it; give every rank as"):
        in_threads(len(counts), body)
    assert set(seen) == set(range(1, len(counts)))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", SHARDINGS)
def test_h12_the_loader_deals_equal_numbers_of_batches(name: str, size: int) -> None:
    def body() -> int:
        engine = dplab.parallelize(pair(), momentum, name)
        steps = 0
        for batch in dplab.loader(range(5 * size + 1), batch_size=2):
            engine.backward(engine(batch.double()[:, None]).sum())
            steps += engine.step()
        return steps

    assert in_threads(size, body) == [2] * size
