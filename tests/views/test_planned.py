"""Predictions as charts: sums that agree with the plans, and two steps on one time scale."""

from __future__ import annotations

import pytest

import dplab
from dplab.errors import UsageError
from dplab.planner.hardware import of_machine
from dplab.planner.single import predict
from dplab.telemetry.events import Event
from dplab.views.figures import figure
from dplab.views.picture import picture
from dplab.views.planned import anatomy, memory_bars, overlay
from tests.planner.test_calibrate import known
from tests.views.synthetic import run_events


@pytest.fixture(scope="module")
def plans():
    found = dplab.plan("llama-7b", "16xH100", 2**20).plans
    return {f"{place} {plan}": plan for place, plan in enumerate(found, start=1)}


def test_bars_are_as_high_as_the_plans_say(plans):
    memory, step = memory_bars(plans).marks[0], anatomy(plans).marks[0]
    assert memory.values.sum(axis=0) == pytest.approx([plan.memory.to_dict()["total"] / 1e9 for plan in plans.values()])
    assert step.values.sum(axis=0) == pytest.approx([1e3 * plan.step for plan in plans.values()])
    assert memory.names == step.names == tuple(plans)
    assert all(name in memory_bars(plans).note for name in plans)


def test_what_is_too_much_is_named(plans):
    largest = max(plans, key=lambda name: float(plans[name].memory.total))
    limit = sorted(float(plan.memory.total) for plan in plans.values())[-1] - 1
    assert memory_bars(plans, limit=limit).caption.endswith(f"are allowed, too much: {largest}")
    assert "too much" not in memory_bars(plans, limit=1e12).caption


def test_small_models_are_in_mb():
    plan = predict("tiny-gpt", of_machine(known(memory=1e12)), "ddp")
    small = memory_bars({"ddp": plan})
    assert small.y_label == "MB"
    assert small.marks[0].values.sum() == pytest.approx(float(plan.memory.total) / 1e6)


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_a_predicted_step_lies_over_the_median_measured_one(strategy):
    plan = predict("bench-gpt", of_machine(known()), strategy, micro_batch=4)
    chart = overlay(plan.timeline().events, run_events(2, 5), rank=1)
    mark = chart.marks[0]
    assert mark.names == ("plan", "wire", "run", "wire")
    ends = [float(mark.end[(mark.lane == lane) | (mark.lane == lane + 1)].max()) for lane in (0, 2)]
    assert ends[0] == pytest.approx(1e3 * plan.step, rel=1e-3)
    assert ends[1] == pytest.approx(98)
    assert chart.value == f"{1e3 * plan.step / 100:.2f} x the measured"
    assert "(step 3 of rank 1, the median of 4)" in chart.note
    assert mark.start.min() >= 0
    shown = {role: float((mark.end - mark.start)[(mark.lane == 0) & (mark.kind == place)].sum())
             for place, role in enumerate(mark.roles)}
    # nothing but work and waiting fills the predicted rank's step
    assert shown["forward"] + shown["backward"] + shown["step_optimizer"] + shown["waiting"] == pytest.approx(
        1e3 * plan.step, rel=1e-3)
    assert shown["step_optimizer"] > 0
    picture([chart])
    figure(chart)


def test_the_measured_step_is_the_one_asked_for():
    plan = predict("bench-gpt", of_machine(known()), "ddp", micro_batch=4)
    slower = [event._replace(t1=event.t1 + event.step * 1_000_000) if event.kind == "step" else event
              for event in run_events(1, 6)]
    for quantile, step in ((0.0, 1), (0.25, 2), (0.5, 3), (1.0, 5)):
        assert f"measured {100 + step} ms (step {step + 1} of" in overlay(plan.timeline().events, slower,
                                                                     quantile=quantile).note
    with pytest.raises(UsageError, match=r"overlay\(quantile=25\) is not allowed; it is a number from 0"):
        overlay([], [], quantile=25)


def test_without_a_step_there_are_words():
    plan = predict("bench-gpt", of_machine(known()), "ddp")
    assert overlay(plan.timeline().events, []).words == "no measured step is complete yet"
    assert overlay([], run_events(1, 2)).words == "no predicted step is complete yet"
    assert overlay([Event("forward", "m", 0, 0, 0, 5, {})], []).words == "no predicted step is complete yet"
