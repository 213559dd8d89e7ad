"""H33: what was saved goes on as if nothing had happened, on the same ranks to the bit, on others to rounding."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

from dplab.core import optim
from dplab.specs import SHARDINGS
from tests.checkpoint.programs import moments, odd, run, same, train, two_groups, wrap
from tests.worlds import STRATEGIES, Uneven, build, in_threads

NAMES = list(SHARDINGS)


def close(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], rtol: float = 1e-10) -> None:
    assert list(first) == list(second)
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=rtol, atol=rtol, msg=name)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("at", [1, 3])
def test_killed_and_resumed_is_uninterrupted_to_the_bit(strategy: str, at: int, tmp_path: Path) -> None:
    model = build(Uneven, torch.float32)
    whole = in_threads(3, run, model, strategy, (0, 5), rows=3)[0]
    in_threads(3, run, model, strategy, (0, at), rows=3, save=tmp_path / "saved")
    assert same(in_threads(3, run, model, strategy, (at, 5), rows=3, load=tmp_path / "saved")[0], whole)


@pytest.mark.parametrize(("before", "after"), [("zero1", "zero3"), ("zero3", "zero1"), ("ddp", "zero2"),
                                               ("zero2", "ddp")])
def test_runs_that_end_inside_a_parameter_are_stored_once_and_come_back(
        before: str, after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, batches = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24)), torch.randn(4, 3, 24)

    def body(strategy: str, steps: range, load: Path | None, save: Path | None) -> dict[str, torch.Tensor]:
        engine = wrap(model, strategy, lambda params: torch.optim.AdamW(params, lr=0.01))
        if load is not None:
            engine.load(load)
        for step in steps:
            engine.backward(engine(batches[step]).square().mean())
            engine.step()
        if save is not None:
            engine.save(save)
        return engine.full_state_dict()

    whole = in_threads(2, body, "ddp", range(4), None, None)[0]
    monkeypatch.setattr(optim, "CACHED", 256)
    in_threads(2, body, before, range(2), None, tmp_path / "half")
    monkeypatch.setattr(optim, "CACHED", 384)
    found = in_threads(2, body, after, range(2, 4), tmp_path / "half", None)[0]
    assert same(found, whole)


@functools.cache
def uninterrupted() -> dict[str, torch.Tensor]:
    return in_threads(1, run, odd(), "ddp", (0, 4), optimizer=two_groups)[0]


class Line(nn.Module):
    """Two 0-dim parameters and no others."""

    def __init__(self) -> None:
        super().__init__()
        self.slope, self.height = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.slope * x + self.height


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD, torch.optim.AdamW])
def test_numbers_and_moments_of_0_dim_parameters_are_told_apart(
        kind: type[torch.optim.Optimizer], strategy: str, tmp_path: Path) -> None:
    def body(resumed: bool) -> dict[str, torch.Tensor]:
        engine = wrap(Line(), strategy, kind)
        for step in range(4):
            if step == 2 and resumed:
                engine.save(tmp_path / "line")
                engine = wrap(Line(), strategy, kind)
                engine.load(tmp_path / "line")
            engine.backward(engine(torch.arange(3.0) + step).square().mean())
            engine.step()
        return engine.full_state_dict()

    assert same(in_threads(2, body, True)[0], in_threads(2, body, False)[0])


@pytest.mark.parametrize(("before", "after"), list(itertools.product(NAMES, NAMES)))
def test_h33_every_strategy_into_every_other_on_more_and_fewer_ranks(before: str, after: str, tmp_path: Path) -> None:
    model, whole = odd(), uninterrupted()
    in_threads(2, run, model, before, (0, 2), save=tmp_path / "two", optimizer=two_groups)
    three = in_threads(3, run, model, f"{after}+bucket_mb=1e-05", (2, 4), load=tmp_path / "two", optimizer=two_groups)
    one = in_threads(1, run, model, after, (2, 4), load=tmp_path / "two", optimizer=two_groups)
    close(three[0], whole)
    close(one[0], whole)


@pytest.mark.parametrize("names", [("zero2", "zero3", "ddp", "zero1"), ("zero3", "ddp", "zero1", "zero2")])
def test_h33_chain_of_2_3_4_1_with_moments_element_by_element(names: tuple[str, ...], tmp_path: Path) -> None:
    model, place = odd(), None
    for turn, (size, strategy) in enumerate(zip((2, 3, 4, 1), names, strict=True)):
        last, place = place, tmp_path / str(turn)
        in_threads(size, run, model, strategy, (turn, turn + 1), load=last, save=place, optimizer=two_groups)

    def state(load: Path | None, span: tuple[int, int]) -> dict[str, torch.Tensor]:
        engine = wrap(model, "ddp", two_groups)
        if load is not None:
            engine.load(load)
        train(engine, *span)
        return moments(engine)

    close(in_threads(1, state, place, (0, 0))[0], in_threads(1, state, None, (0, 4))[0])
