"""The synchronisation timeline of the synthetic step, bar by bar, and its overlap by hand."""

from __future__ import annotations

import pytest

from dplab.telemetry.events import Event
from dplab.views.fold import Fold
from dplab.views.sync import DEFINITION, ROLES, SyncPanel
from tests.views.synthetic import MS, START, run_events, step_events


def bars_of(lanes, lane):
    """(role, row, start, end) of a lane's bars, in ms."""
    return sorted((lanes.roles[int(kind)], int(row), start, end) for at, row, start, end, kind in
                  zip(lanes.lane, lanes.row, lanes.start, lanes.end, lanes.kind, strict=True) if at == lane)


def lanes_of(events, world_size=2):
    fold = Fold(world_size)
    fold.feed(events)
    return fold.sync.chart().marks[0]


def test_a_lane_of_work_and_a_lane_of_the_wire_for_each_rank():
    lanes = lanes_of(run_events(2, 3))
    assert lanes.names == ("rank 0", "wire", "rank 1", "wire")
    for rank in range(2):
        assert bars_of(lanes, 2 * rank) == [
            ("backward", 0, 33, 66), ("forward", 0, 1, 31), ("step_optimizer", 0, 78, 93),
            ("waiting", 0, 66, 78), ("waiting", 0, 94, 98)]
        assert bars_of(lanes, 2 * rank + 1) == [
            ("exposed", 0, 66, 78), ("exposed", 0, 94, 98), ("gather", 0, 86, 98), ("reduce", 0, 40, 56),
            ("reduce", 0, 62, 78), ("reduce", 1, 52, 68), ("waiting", 1, 50, 52)]


def test_a_rank_computes_nothing_where_it_waits():
    """Whatever is exposed: bars of one rank's lane lie apart, and waiting is as long as the step's exposed time."""
    collectives = [("grads", 35, 40, 5), ("grads", 38, 45, 6), ("params", 10, 20, 4), ("control", 90, 99, 9)]
    events = [event for event in step_events(0, 0, sync=False) if event.kind != "step"]
    base = START
    events += [Event("collective", "all_reduce", 0, 0, base + t0 * MS, base + t1 * MS,
                     {"purpose": purpose, "bucket": 0, "bytes": 1, "exposed": exposed * MS})
               for purpose, t0, t1, exposed in collectives]
    events.append(Event("step", "train", 0, 0, base, base + 100 * MS, {}))
    bars = sorted((start, end, role) for role, _, start, end in bars_of(lanes_of(events, 1), 0))
    assert bars == [(1, 16, "forward"), (16, 20, "waiting"), (20, 31, "forward"), (33, 35, "backward"),
                    (35, 45, "waiting"), (45, 78, "backward"), (78, 90, "step_optimizer"), (90, 99, "waiting")]


def test_every_bar_says_what_it_is():
    lanes = lanes_of(run_events(2, 1))
    assert len(lanes.texts) == len(lanes.lane)
    assert "rank 1, reduce_scatter, bucket 2: 16.00 ms" in lanes.texts
    assert "rank 0, reduce_scatter, bucket 2, exposed: 12.00 ms" in lanes.texts
    assert "rank 0, backward: 33.00 ms" in lanes.texts
    assert "rank 0, waiting for the wire: 12.00 ms" in lanes.texts
    assert "rank 0, reduce_scatter, bucket 1, filled but not sent: 2.00 ms" in lanes.texts


def test_overlap_is_one_minus_exposed_over_total():
    fold = Fold(2)
    fold.feed(run_events(2, 2))
    assert fold.sync.overlap() == pytest.approx(1 - (12 + 4) / (16 + 16 + 16 + 12))
    assert fold.sync.chart().note == f"overlap 73 %; {DEFINITION}"


def test_a_step_in_which_nothing_was_sent_has_no_overlap():
    fold = Fold(1)
    fold.feed(step_events(0, 0, sync=False))
    assert fold.sync.overlap() is None
    assert fold.sync.chart().note == fold.sync.chart().value == "nothing was sent"


def test_the_newest_step_that_every_rank_has_finished_is_shown():
    fold = Fold(2)
    fold.feed(run_events(2, 5))
    for step in (5, 6, 7):
        fold.feed(step_events(0, step))
    assert fold.sync.step == 4
    fold.feed(step_events(1, 5))
    assert fold.sync.step == 5


def test_ranks_that_are_read_one_after_the_other_still_meet():
    fold = Fold(2)
    for rank in range(2):
        for step in range(30):
            fold.feed(step_events(rank, step))
    assert fold.sync.step == 29


def test_a_world_too_large_for_a_screen_shows_its_first_ranks():
    fold = Fold(64)
    fold.feed(run_events(64, 1))
    lanes = fold.sync.chart().marks[0]
    assert len(lanes.names) == 32
    assert fold.sync.step == 0


def test_steps_that_wait_for_other_ranks_are_bounded():
    panel = SyncPanel(2)
    fold = Fold(2)
    fold.sync = panel
    for step in range(500):
        fold.feed(step_events(0, step))
    assert max(len(steps) for steps in panel._steps.values()) <= 32


def test_roles_of_the_lanes_have_colours():
    from dplab.views.theme import ROLES as THEME

    assert set(ROLES) <= set(THEME)
