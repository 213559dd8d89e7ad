"""The whole board from events: live and replayed alike, in words, at any cut."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dplab.telemetry.events import Event
from dplab.telemetry.summary import Summary
from dplab.views.fold import Fold
from tests.views.synthetic import PERIOD, TOKENS, run_events, step_events


def columns(fold):
    series = [fold.loss.series, *fold.steps.series.values(), *fold.memory.series.values()]
    return [one.rows().copy() for one in series]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=20))
def test_it_does_not_matter_how_the_events_are_cut_into_polls(sizes):
    events = run_events(2, 12)
    whole, pieces = Fold(2), Fold(2)
    whole.feed(events)
    start = 0
    for size in [*sizes, len(events)]:
        pieces.feed(events[start:start + size])
        start += size
    assert whole.status() == pieces.status()
    assert whole.summary() == pieces.summary()
    for one, other in zip(columns(whole), columns(pieces), strict=True):
        np.testing.assert_array_equal(one, other)


def test_status_is_that_of_the_synthetic_run():
    fold = Fold(2)
    fold.feed(run_events(2, 10))
    status = fold.status()
    assert (status.steps, status.loss, status.step_ms) == (10, pytest.approx(2.1), pytest.approx(100))
    # 20 batches, from the first step's start to the last one's end
    assert status.tokens_per_s == pytest.approx(20 * TOKENS / ((9 * PERIOD + 100) / 1e3))
    assert status.facts() == (("steps", "10"), ("loss", "2.1"), ("tokens/s", "18,789"))
    assert status.to_dict()["overlap"] == pytest.approx(1 - 16 / 60)


def test_the_board_counts_as_the_command_line_does():
    events = run_events(2, 7)
    fold, summary = Fold(2), Summary().feed(events)
    fold.feed(events)
    assert (fold.status().steps, fold.status().tokens_per_s) == (summary.steps, summary.tokens_per_s)
    images = [Event("data", "loader", 0, 0, 0, 0, {"samples": 8}), Event("step", "train", 0, 0, 0, 10**9, {})]
    fold = Fold(1)
    fold.feed(images)
    assert fold.status().facts()[2] == ("samples/s", "8")


def test_nothing_yet_is_a_status_of_nothing():
    assert set(Fold(2).status().to_dict().values()) == {None}


def test_summary_says_the_board_in_words():
    fold = Fold(2)
    fold.feed(run_events(2, 10))
    assert fold.summary("my run").splitlines() == [
        "my run",
        "  Loss: 3.000 at step 1, 2.100 at step 10",
        "  Throughput: 20,480 tokens/s now, 18,789 over the run",
        "  Step time, rank 0: median 100 ms: forward 30, backward 33, optimizer 15, exposed 16, data 0, "
        "other 6 (all steps)",
        "  Anatomy of a step: the slowest of 2, rank 0 forward 30, backward 33, optimizer 15, exposed sync 16, data 0, "
        "other 6 ms (medians of all steps)",
        "  Gradient synchronisation, step 10: overlap 73 %",
        "  Wire, rank 0: 0.0164 MB sent in a step (reduce_scatter 0.0123, all_gather 0.0041)",
        "  Memory, rank 0: 47 MB in tensors, process peak 300 MB: params 16, grads 8, optimizer 16, buckets 2, "
        "activations 5; dot: peak of 47 MB",
        "  Utilization, rank 0: CPU core 97 %, GPU not measurable here",
        "  Who holds what: the layout is not recorded (yet): dplab.parallelize does it",
        "  Printed by the ranks: nothing printed yet",
        "  Diagnosis: nothing to complain of: no rule found a loss worth a remedy",
        "  18,789 tokens/s over all ranks",
    ]


def test_views_need_no_torch_and_no_display():
    check = ("import sys, dplab.views.figures, dplab.views.fold, dplab.views.svg; "
             "print([name for name in ('torch', 'ipywidgets', 'IPython', 'anywidget') if name in sys.modules])")
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("first", [0, 6])
def test_after_a_restart_with_fewer_ranks_every_panel_goes_on_with_those(first):
    """Rank 1 of two died; rank 0 goes on alone from a step, and nothing waits for rank 1 or is predicted for it."""
    before = [event for step in range(first) for rank in range(2) for event in step_events(rank, step)]
    again = Event("restart", "run", 1, first, 0, 0, {"number": 1, "world_size": 1, "why": "-"})
    fold = Fold(2, "zero2")
    fold.feed([*before, again, *(event for step in range(first, 10) for event in step_events(0, step, sync=False))])
    assert (fold.pace.steps, fold.loss.last_step + 1, fold.sync.step) == (10, 10, 9)
    assert list(fold.throughput.series["step"]) == list(range(1, 11))
    assert fold.wire.predicted(0) is None or not any(fold.wire.predicted(0).values())
    assert not fold.wire.chart(0).alert
