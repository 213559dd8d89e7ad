"""Loss, step and memory panels against values computed from the events directly."""

from __future__ import annotations

import numpy as np
import pytest

from dplab.telemetry.events import CATEGORIES, Event
from dplab.views.fold import Fold
from dplab.views.panels import LossPanel, robust_top
from dplab.views.records import Line, StackedArea, Text
from tests.views import synthetic
from tests.views.synthetic import MB, MEMORY, MS, START, run_events, step_events


def folded(events, world_size=2):
    fold = Fold(world_size)
    fold.feed(events)
    return fold


def test_loss_is_the_mean_over_ranks_of_every_step():
    fold = folded(run_events(2, 30))
    assert fold.loss.series["step"].tolist() == list(range(1, 31))
    expected = [np.mean([synthetic.loss(step, rank) for rank in range(2)]) for step in range(30)]
    np.testing.assert_allclose(fold.loss.series["loss"], expected, rtol=1e-12)
    assert fold.loss.chart().y_label == ""           # whose unit only the program knows


def test_smoothed_loss_is_the_weighted_mean_written_out():
    fold = folded(run_events(2, 6))
    losses = fold.loss.series["loss"]
    weights = 0.9 ** np.arange(5, -1, -1)
    assert fold.loss.series["smooth"][-1] == pytest.approx((weights * losses).sum() / weights.sum(), rel=1e-12)


def test_a_step_that_a_rank_has_not_told_its_loss_of_is_not_shown_yet():
    events = run_events(2, 3)
    last = next(event for event in reversed(events) if event.name == "loss")
    fold = folded([event for event in events if event is not last])
    assert fold.loss.series["step"].tolist() == [1, 2]


def test_a_rank_that_never_tells_its_loss_holds_nobody_back():
    fold = folded([event for event in run_events(2, 5) if not (event.name == "loss" and event.rank == 1)])
    assert fold.loss.series["step"].tolist() == [1, 2, 3, 4]


def test_losses_of_micro_batches_are_averaged():
    gauges = [Event("gauge", "loss", 0, 0, 1, 1, {"value": value}) for value in (1.0, 2.0, 6.0)]
    fold = folded([*gauges, Event("step", "train", 0, 0, 0, 2, {})], world_size=1)
    assert fold.loss.series["loss"].tolist() == [3.0]


def test_a_loss_that_is_no_number_is_shown_and_spoils_nothing_after_it():
    values = [2.0, float("nan"), 1.0]
    fold = folded([event for step, value in enumerate(values) for event in (
        Event("gauge", "loss", 0, step, step, step, {"value": value}),
        Event("step", "train", 0, step, step, step + 1, {}))], world_size=1)
    assert np.isnan(fold.loss.series["loss"][1])
    assert np.isfinite(fold.loss.series["smooth"][2])


def test_step_times_are_those_of_the_synthetic_run():
    fold = folded(run_events(2, 10))
    assert fold.steps.medians() == pytest.approx({
        "forward": 30, "backward": 33, "step_optimizer": 15, "exposed": 16, "data": 0, "other_time": 6, "total": 100})
    (area,) = fold.steps.chart(1).marks
    assert isinstance(area, StackedArea)
    np.testing.assert_allclose(area.ys.sum(axis=0), 100)


def test_memory_stack_holds_the_gauges_by_category():
    fold = folded(run_events(2, 10))
    area, peak = fold.memory.chart(1).marks
    assert area.roles == tuple(name for name in CATEGORIES if MEMORY.get(name))
    np.testing.assert_allclose(area.ys[:, -1], [MEMORY[name] / MB for name in area.roles])
    assert (peak.role, peak.y.tolist()) == ("peak", [47])
    assert fold.memory.latest(1)["process"] == 300
    assert fold.memory.peak[1] == sum(MEMORY[name] for name in CATEGORIES if name in MEMORY)


def test_private_memory_of_the_process_may_come_as_a_gauge_of_its_own():
    fold = folded([Event("gauge", "process", 0, 0, 1, 1, {"private": 77 * MB}),
                   Event("gauge", "memory", 0, 0, 2, 2, {"params": MB})], world_size=1)
    assert fold.memory.latest(0) == {"params": 1, "process": 77, "total": 1}


def test_what_cannot_be_measured_is_said_not_left_blank():
    fold = folded(run_events(1, 5), world_size=1)
    assert fold.utilization.chart(0).note == "CPU core 97 %, GPU not measurable here"


@pytest.mark.parametrize(("key", "text"), [
    ("loss", "no loss yet: it appears after the first step"),
    ("steps", "no finished step on rank 0 yet"),
    ("sync", "no step is complete on every rank yet"),
    ("wire", "no finished step on rank 0 yet"),
    ("memory", "no memory gauge of rank 0 yet"),
    ("utilization", "utilization of rank 0 is not measured yet"),
    ("anatomy", "no finished step yet"),
    ("ownership", "the layout is not recorded (yet): dplab.parallelize does it"),
    ("logs", "nothing printed yet"),
])
def test_an_empty_panel_says_what_is_missing(key, text):
    chart = next(chart for chart in folded([]).charts() if chart.key == key)
    (mark,) = chart.marks
    assert isinstance(mark, Text)
    assert mark.text == text


def test_a_panel_of_a_long_run_stays_small_and_keeps_the_whole_run():
    fold = folded(run_events(1, 5000), world_size=1)
    raw = fold.loss.chart().marks[0]
    assert isinstance(raw, Line)
    assert len(raw.x) <= 1024
    assert raw.x[0] <= 1
    assert raw.x[-1] == 5000


def test_a_slow_first_step_does_not_flatten_the_scale():
    assert robust_top(np.array([3000.0] + [100.0] * 50)) == pytest.approx(1.15 * 130)
    assert robust_top(np.array([120.0] + [100.0] * 50)) == pytest.approx(1.15 * 120)


def test_memory_and_utilization_start_at_their_first_gauge():
    late = [event._replace(t0=event.t0 + 2_000 * MS, t1=event.t1 + 2_000 * MS) for event in run_events(1, 5)]
    fold = Fold(1)
    fold.feed([Event("log", "start", 0, 0, START, START, {}), *late])
    memory, utilization = fold.rank_charts(0)[2:]
    assert memory.x_range == utilization.x_range
    assert memory.x_range[0] == memory.marks[0].x[0] > 2


@pytest.mark.parametrize("attrs", [{}, {"loss": 0.3}, {"value": "0.3"}, {"value": [1, 2]}, {"value": None}])
def test_a_loss_that_a_program_records_in_its_own_way_is_left_out(attrs):
    panel = LossPanel(1)
    for event in [Event("gauge", "loss", 0, 0, 0, 0, attrs), *step_events(0, 0), *step_events(0, 1)]:
        panel.feed(event)
    assert list(panel.series["step"]) == [1, 2]
