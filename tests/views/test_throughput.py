"""Tokens a second at each step, against the synthetic run's own numbers."""

from __future__ import annotations

import pytest

from dplab.telemetry.events import Event
from dplab.views.fold import Fold
from tests.views.synthetic import MS, TOKENS, run_events

EACH = 2 * TOKENS / 0.1                              # two ranks, a step of 100 ms


def fold(events, ranks=2):
    made = Fold(ranks)
    made.feed(events)
    return made


def chart(made):
    return made.throughput.chart(made.pace)


def test_every_step_has_the_rate_of_all_ranks():
    made = fold(run_events(2, 5))
    assert made.throughput.series["step"].tolist() == [1, 2, 3, 4, 5]
    assert made.throughput.series["rate"].tolist() == pytest.approx([EACH] * 5)
    assert made.throughput.series["smooth"].tolist() == pytest.approx([EACH] * 5)
    assert chart(made).value == "20,480 tokens/s now, 18,963 over the run"      # 10 ms between two steps
    assert "Throughput: 20,480 tokens/s now, 18,963 over the run" in made.summary()


def test_the_last_steps_count_by_the_time_that_they_took_and_a_pause_does_not():
    def step(number, ms, pause=0):
        start = number * 1000 * MS
        yield Event("data", "loader", 0, number, start, start, {"samples": 4, "tokens": 400})
        if pause:
            yield Event("pause", "asked", 0, number, start, start + pause * MS, {})
        yield Event("step", "train", 0, number, start, start + (ms + pause) * MS, {})

    made = fold([*step(0, 100), *step(1, 300, pause=500)], ranks=1)
    assert made.throughput.series["rate"].tolist() == pytest.approx([4000, 400 / 0.3])
    assert made.throughput.series["smooth"][-1] == pytest.approx((0.9 * 400 + 400) / (0.9 * 0.1 + 0.3))


def test_without_batches_steps_are_counted_and_images_are_samples():
    bare = fold([event for event in run_events(2, 3) if event.kind != "data"])
    assert chart(bare).value == "10 steps/s now"
    images = fold([event._replace(attrs={"samples": 8}) if event.kind == "data" else event
                   for event in run_events(2, 3)])
    assert chart(images).value.startswith("160 samples/s now")


def test_a_step_that_a_rank_has_not_ended_waits_and_those_that_never_end_are_bounded():
    made = fold([event for event in run_events(2, 600) if event.rank == 0 or event.step < 3])
    assert made.throughput.series["step"].tolist() == [1, 2, 3]
    assert len(made.throughput._took) <= 256
    assert chart(fold([])).words == "no step has ended on every rank yet"


def test_an_earlier_run_lies_below_as_far_as_this_one_has_come():
    made, before = fold(run_events(2, 3)), fold(run_events(2, 9))
    lines = made.throughput.chart(made.pace, before.throughput).marks
    assert [line.role for line in lines] == ["earlier", "rate", "rate_smooth"]
    assert lines[0].x.tolist() == [1, 2, 3]
