"""Losses that are no numbers and steps that are skipped: on chosen events, and on a run that diverges."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dplab
from dplab.diagnosis import diagnose
from dplab.diagnosis.diagnose import findings
from dplab.diagnosis.facts import NEWEST, gather
from dplab.diagnosis.findings import Finding
from dplab.diagnosis.numbers import SKIPPED
from dplab.telemetry import numerics
from dplab.telemetry.events import Event
from dplab.views.findings import chart
from tests.diagnosis.test_rules import GOOD, step

NAN, INF = math.nan, math.inf
LENS = ("; to see which gradient breaks first make a dplab.Lens(engine) in the program, and ask "
        "dplab.not_finite(run) afterwards")


def events(losses: dict[int, list[float]], overflows: list[int] | None = None) -> list[Event]:
    """Good steps whose losses, and overflows under a loss scale, are chosen: a list by rank, an entry a step."""
    told: list[Event] = []
    scale = 2.0**16
    for index in range(len(losses[0])):
        for rank, mine in losses.items():
            *spans, end = step(rank, index, **GOOD)
            told += [*spans, Event("gauge", "loss", rank, index, end.t1, end.t1, {"value": mine[index]})]
            if overflows is not None:
                scale /= 1 + (rank == 0 and overflows[index])
                told += [Event("gauge", name, rank, index, end.t1, end.t1, {"value": value})
                         for name, value in (("loss_scale", scale), ("overflow", overflows[index]))]
            told.append(end)
    return told


def judged(told: list[Event], strategy: str = "zero2", ranks: int = 2) -> list[Finding]:
    return findings(gather(told, world_size=ranks, strategy=strategy, cores=8))


def test_a_loss_that_is_a_nan_since_some_step() -> None:
    (seen,) = judged(events({0: [5.5, 6.25, 3e8, NAN, NAN, INF, NAN], 1: [5.5, 6.0, 2e8, NAN, NAN, NAN, NAN]}))
    assert (seen.kind, seen.cost, seen.gain) == ("not-finite", 1.0, None)
    assert seen.what == "the loss is NaN since step 4"
    assert seen.evidence == "it was 5.5 in step 1 and 3e+08 in step 3, the last finite one; 4 of 7 steps are lost"
    assert seen.remedy == ("train again from before that step with a lower learning rate or a warm-up, or clipped "
                           "gradients ('zero2+clip_grad_norm=1.0')" + LENS)


def test_the_rank_on_which_it_began_is_named() -> None:
    (seen,) = judged(events({0: [5.0, 5.0, 5.0, NAN], 1: [5.0, 4.0, INF, NAN], 2: [5.0, 5.0, 5.0, NAN]}), ranks=3)
    assert seen.what == "the loss is infinite since step 3 on rank 1"
    assert seen.evidence == "it was 5 in step 1 and 4 in step 2, the last finite one; 2 of 4 steps are lost"
    assert seen.remedy == ("look at the batch of step 3 on rank 1: all ranks have the same weights, so that it comes "
                           "from inputs or targets there, or from a mean over nothing" + LENS)
    (seen,) = judged(events({0: [NAN, NAN], 1: [5.0, NAN], 2: [NAN, NAN]}), ranks=3)
    assert seen.what == "the loss is NaN since step 1 on ranks 0, 2"

    told = events({0: [5.0, NAN], 1: [5.0, NAN]})      # the second rank's step is still on its way
    (seen,) = judged([event for event in told if (event.rank, event.step) != (1, 1)])
    assert seen.what == "the loss is NaN since step 2"


def test_a_loss_that_never_was_a_number_comes_from_what_went_in() -> None:
    (seen,) = judged(events({0: [NAN] * 3, 1: [NAN] * 3}))
    assert seen.what == "the loss is NaN since step 1"
    assert seen.evidence == "no step had a finite loss"
    assert seen.remedy == ("look at the inputs, the targets and the initial weights: the very first forward made no "
                           "number of them" + LENS)


@pytest.mark.parametrize(("strategy", "way"), [
    ("zero2+fp16", "'zero2+bf16', since bf16 has the range of fp32"),
    ("zero1+amp-fp16+clip_grad_norm=1", "'zero1+amp-bf16+clip_grad_norm=1.0', since bf16 has the range of fp32")])
def test_bf16_is_advised_in_place_of_fp16(strategy: str, way: str) -> None:
    (seen,) = judged(events({0: [5.0, NAN], 1: [5.0, NAN]}), strategy)
    assert way in seen.remedy
    assert ("clipped" in seen.remedy) == ("clip" not in strategy)


def test_losses_that_became_numbers_again_are_left_alone() -> None:
    assert judged(events({0: [5.0, NAN, 4.0], 1: [5.0, INF, 4.0]})) == []


def test_what_a_lens_saw_is_told_in_place_of_advice_to_use_one() -> None:
    told = events({0: [5.0, 5.0, NAN], 1: [5.0, 5.0, NAN]})
    for rank, index, name in ((0, 2, "head.weight"), (1, 1, "late.bias"), (1, 1, "later.bias")):
        told.append(Event("log", numerics.NOT_FINITE, rank, index, 10 * index + len(name), 10 * index + len(name),
                          {"parameter": name, "what": "NaN"}))
    (seen,) = judged(told)
    assert seen.evidence.endswith("; the first gradient that broke is that of 'late.bias', NaN on rank 1 in step 2")
    assert "Lens" not in seen.remedy


def test_what_a_restart_made_void_is_forgotten() -> None:
    told = events({0: [5.0, 4.0, NAN, NAN], 1: [5.0, 4.0, NAN, NAN]})
    assert judged(told)
    restart = Event("restart", "run", 0, 2, 4_000_000_000, 4_000_000_000, {"number": 1, "world_size": 1, "why": "-"})
    assert judged([*told, restart]) == []
    again = Event("gauge", "loss", 0, 2, 5_000_000_000, 5_000_000_000, {"value": NAN})
    (seen,) = judged([*told, restart, again])
    assert seen.what == "the loss is NaN since step 3"
    (seen,) = judged([*told, restart._replace(step=3)])      # its checkpoint holds the NaN
    assert seen.what == "the loss is NaN since step 3"


@pytest.mark.parametrize(("strategy", "remedy"), [
    ("zero2+fp16", "'zero2+bf16': bf16 needs no loss scale; or a lower learning rate"),
    ("zero2+amp-fp16", "'zero2+amp-bf16': bf16 needs no loss scale; or a lower learning rate"),
    ("words of a later version", "bf16, which needs no loss scale; or a lower learning rate")])
def test_steps_that_are_skipped_in_a_row(strategy: str, remedy: str) -> None:
    overflows = [1, 0, *[1] * SKIPPED, *[0] * 10]
    (seen,) = judged(events({rank: [5.0] * 20 for rank in range(2)}, overflows), strategy)
    assert (seen.kind, seen.cost, seen.gain) == ("skipped-steps", pytest.approx(9 / 20), pytest.approx(9 / 20))
    assert seen.what == "8 steps in a row were skipped: their gradients overflow fp16"
    assert seen.evidence == ("9 of the newest 20 steps moved no weight; the loss scale is 128 now, of 65536 at the "
                             "start")
    assert seen.remedy == remedy


def test_a_scale_that_finds_its_place_and_skipped_steps_of_long_ago_are_no_finding() -> None:
    few = [*[1] * (SKIPPED - 1), 0, 1, 1, *[0] * 10]
    assert judged(events({0: [5.0] * 20, 1: [5.0] * 20}, few), "zero2+fp16") == []
    long_ago = [*[1] * SKIPPED, *[0] * NEWEST]
    assert judged(events({0: [5.0] * len(long_ago)}, long_ago), "zero2+fp16", ranks=1) == []


def test_it_is_told_before_everything_that_costs_time_and_is_red() -> None:
    told = events({0: [5.0] * 11 + [NAN], 1: [5.0] * 11 + [NAN]})
    slow = [event._replace(attrs={"cpu": 1.0}) if event.name == "utilization" else event for event in told]
    assert [finding.kind for finding in judged(slow)] == ["not-finite", "utilization"]
    told_of = diagnose.judged(gather(told, world_size=2, strategy="zero2", cores=8), "run")
    assert chart(told_of).alert
    assert not chart(replace(told_of, findings=told_of.findings[1:])).alert


def diverges(steps: int, lens: bool) -> None:
    import torch

    import dplab

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    engine = dplab.parallelize(model, lambda params: torch.optim.SGD(params, lr=1e6))
    if lens:
        dplab.Lens(engine)
    for _ in range(steps):
        engine.backward(engine(torch.ones(4, 8)).square().mean())
        engine.step()


@pytest.mark.parametrize("lens", [False, True])
def test_a_run_that_diverges_is_told_of(lens: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DPLAB_RUNS", str(tmp_path / "runs"))
    run = dplab.launch(diverges, world_size=2, args=(12, lens), detach=False)
    run.wait(60)
    expected = None      # the same in one process
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e6)
    for index in range(12):
        loss = model(torch.ones(4, 8)).square().mean()
        if expected is None and not torch.isfinite(loss):
            expected = index + 1
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert expected is not None
    seen = run.diagnose().findings[0]
    assert seen.what in (f"the loss is {what} since step {expected}" for what in ("NaN", "infinite"))
    assert seen.evidence.startswith("it was ")
    if lens:
        first = dplab.not_finite(run)[0]
        assert f"the first gradient that broke is that of {first.parameter!r}, {first.what} on rank" in seen.evidence
    assert ("dplab.Lens(engine)" in seen.remedy) == (not lens)
