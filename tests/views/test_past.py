"""Going back in a run shows what was shown live at that moment, to the last column."""

from __future__ import annotations

import numpy as np
import pytest

from dplab.views.fold import Fold
from dplab.views.past import Past
from dplab.views.svg import svg
from tests.views.synthetic import MS, step_events


class Reader:
    """Hands out everything at the first poll, as a reader of a recorded run does."""

    made = 0
    more = False

    def __init__(self, events):
        self._events = events
        Reader.made += 1

    def poll(self, limit=None):
        events, self._events = self._events, []
        return list(events)


EVENTS = [event for step in range(20) for rank in range(2) for event in step_events(rank, step)]


def live(steps):
    """The board as it was when step `steps` had just ended everywhere."""
    fold = Fold(2, "zero2")
    for event in EVENTS:
        fold.feed([event])
        if fold.pace.steps == steps:
            break
    return fold


@pytest.mark.parametrize("order", [(1, 5, 20), (20, 5, 6), (7, 7, 1)])
def test_a_step_of_the_past_looks_as_it_did_live(order):
    past = Past(lambda: Reader(EVENTS), lambda: Fold(2, "zero2"))
    for step in order:
        fold, then = past.at(step), live(step)
        assert fold.summary() == then.summary()
        assert svg(fold.grid(1)) == svg(then.grid(1))
        np.testing.assert_array_equal(fold.loss.series.rows(), then.loss.series.rows())


def test_forth_reads_on_and_only_back_reads_anew():
    Reader.made = 0
    past = Past(lambda: Reader(EVENTS), lambda: Fold(2, "zero2"))
    for step in (2, 9, 15):
        past.at(step)
    assert Reader.made == 1
    past.at(3)
    assert Reader.made == 2


def test_a_step_that_has_not_come_is_the_latest():
    past = Past(lambda: Reader(EVENTS), lambda: Fold(2, "zero2"))
    assert past.at(99).pace.steps == 20


def test_what_a_step_tells_just_behind_its_end_belongs_to_it():
    """Engines tell loss and memory of a step when it has ended, and other ranks may be at the next one by then."""
    behind = [event._replace(t0=event.t1 + 2 * MS, t1=event.t1 + 2 * MS)
              if event.kind == "gauge" and event.name in ("loss", "memory") else event for event in EVENTS]
    behind.sort(key=lambda event: event.t1)
    past = Past(lambda: Reader(behind), lambda: Fold(2, "zero2"))
    for step in (1, 7, 20, 7):
        fold = past.at(step)
        assert fold.pace.steps == step
        assert (fold.loss.last_step + 1, len(fold.loss.series)) == (step, step)
        assert fold.memory.chart(1).value


def test_the_first_step_has_ended_when_the_last_rank_has_ended_it():
    fold = Past(lambda: Reader(EVENTS), lambda: Fold(2, "zero2")).at(1)
    assert (fold.throughput.series["step"][-1], fold.sync.step) == (1, 0)
