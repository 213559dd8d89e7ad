"""The board's wire format: whatever is lost, a page that applies messages holds the fold's columns or knows better."""

from __future__ import annotations

import copy
import json
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dplab.telemetry.events import Event
from dplab.views.feed import Feed
from dplab.views.fold import Fold
from dplab.views.records import Lanes, Line, Log, StackedArea
from tests.views.synthetic import run_events, step_events
from tests.widgets.page import Page


def assert_same(page, fold):
    """Every chart of the fold is on the page: words, scales, marks and columns."""
    for chart in (chart for rank in range(fold.world_size) for chart in fold.charts(rank)):
        said = page.charts[chart.name]
        assert (said["title"], said["value"], said["caption"]) == (chart.title, chart.value, chart.caption)
        assert (said["legend"], said["x"], said["y"]) == (chart.legend, chart.x_range, chart.y_range)
        assert len(said["marks"]) == len(chart.marks)
        for place, (told, mark) in enumerate(zip(said["marks"], chart.marks, strict=True)):
            columns = page.columns.get(f"{chart.name}#{place}")
            if isinstance(mark, Line):
                assert (told["kind"], told["role"]) == ("line", mark.role)
                np.testing.assert_array_equal(columns, np.array([mark.x, mark.y], dtype=np.float32))
            elif isinstance(mark, StackedArea):
                assert (told["kind"], told["roles"]) == ("area", mark.roles)
                np.testing.assert_array_equal(columns, np.array([mark.x, *mark.ys], dtype=np.float32))
            elif isinstance(mark, Lanes):
                assert (told["names"], told["texts"]) == (mark.names, mark.texts)
                np.testing.assert_array_equal(columns[2], mark.start.astype(np.float32))
            elif isinstance(mark, Log):
                assert told["lines"] == mark.lines


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_deltas_add_up_to_the_fold(sizes):
    fold, page = Fold(2), Page()
    feed, step = Feed(), 0
    for size in sizes:
        for _ in range(size):
            for rank in range(2):
                fold.feed(step_events(rank, step))
            step += 1
        page.apply(*feed.message(fold, {}))
        assert page.whole
        assert_same(page, fold)


def test_deltas_go_on_across_a_thinning():
    fold, page = Fold(1), Page()
    feed = Feed()
    for step in range(2500):
        fold.feed(step_events(0, step))
        if step % 7 == 0:
            page.apply(*feed.message(fold, {}))
    page.apply(*feed.message(fold, {}))
    assert fold.loss.series.generation > 0
    assert page.whole
    assert_same(page, fold)


def test_a_lost_message_is_noticed_and_a_keyframe_heals_it():
    fold, page = Fold(2), Page()
    feed = Feed()
    fold.feed(run_events(2, 3))
    page.apply(*feed.message(fold, {}, keyframe=True))
    for step in (3, 4):
        for rank in range(2):
            fold.feed(step_events(rank, step))
        message = feed.message(fold, {})
        if step == 4:  # the one before is lost
            page.apply(*message)
    assert not page.whole
    page.apply(*feed.message(fold, {}, keyframe=True))
    assert page.whole
    assert_same(page, fold)


def test_what_did_not_change_is_not_sent():
    fold = Fold(2)
    fold.feed(run_events(2, 50))
    feed = Feed()
    feed.message(fold, {})
    content, data = feed.message(fold, {"state": "running"})
    assert (content["parts"], content["charts"], data) == ([], {}, b"")
    assert content["status"]["state"] == "running"


def test_a_message_is_small_however_long_the_run():
    fold = Fold(2)
    fold.feed(run_events(2, 5000))
    feed = Feed()
    content, data = feed.message(fold, {}, keyframe=True)
    assert len(data) + len(json.dumps(content)) < 150_000
    for rank in range(2):
        fold.feed(step_events(rank, 5000))
    content, data = feed.message(fold, {})
    assert len(data) + len(json.dumps(content)) < 5_000


def test_messages_are_numbered_and_stamped():
    fold, feed = Fold(1), Feed()
    before = time.time() * 1000
    numbers = [feed.message(fold, {})[0] for _ in range(3)]
    assert [content["seq"] for content in numbers] == [1, 2, 3]
    assert before <= numbers[0]["sent"] <= numbers[-1]["sent"] <= time.time() * 1000


@pytest.mark.parametrize("steps", [0, 1])
def test_an_empty_board_is_a_message_too(steps):
    fold = Fold(2)
    fold.feed(run_events(2, steps))
    content, data = Feed().message(fold, {}, keyframe=True)
    page = Page()
    page.apply(json.loads(json.dumps(content)), data)
    assert page.status["steps"] == (None if steps == 0 else 1)


def test_what_is_drawn_once_is_sent_once_and_again_when_another_run_stood_there_meanwhile():
    layout = {"shard": [0, 2], "sharding": {"params": "replicated", "grads": "sharded", "optim": "sharded"},
              "buckets": [{"slots": [["a.weight", 256]], "itemsize": 4, "trainable": True}]}
    folds = [Fold(1), Fold(1)]
    for elements, fold in zip((256, 512), folds, strict=True):
        layout["buckets"][0]["slots"][0][1] = elements
        fold.feed([Event("gauge", "layout", 0, 0, 1, 1, copy.deepcopy(layout))])
    feed, page = Feed(), Page()

    def ends(fold):
        content, data = feed.message(fold, {})
        page.apply(content, data)
        told = any(part["id"].startswith("ownership") for part in content["parts"])
        return told, page.charts["ownership/reduce"]["x"][1], float(page.columns["ownership/reduce#0"][3].max())

    assert [ends(folds[number]) for number in (0, 0, 1, 1, 0)] == [
        (told, pytest.approx(end), pytest.approx(end, rel=1e-6)) for told, end in (
            (True, 256e-6), (False, 256e-6), (True, 512e-6), (False, 512e-6), (True, 256e-6))]
    folds[0].feed([Event("gauge", "layout", 0, 0, 1, 1, layout)])      # another layout, such as after a restart
    assert ends(folds[0]) == (True, pytest.approx(512e-6), pytest.approx(512e-6, rel=1e-6))


def test_the_rank_that_is_looked_at_comes_with_every_message_and_the_others_with_every_fourth():
    fold, feed, page = Fold(3), Feed(), Page()
    fold.feed(run_events(3, 4))
    told = []
    for step in range(4, 13):
        content, data = feed.message(fold, {}, keyframe=step == 4, rank=1)
        page.apply(content, data)
        told.append([rank for rank in range(3) if f"steps/{rank}" in content["charts"]])
        fold.feed([event for rank in range(3) for event in step_events(rank, step)])
    assert told == [[0, 1, 2], [1], [1], [0, 1, 2], [1], [1], [1], [0, 1, 2], [1]]
    assert page.whole
    page.apply(*feed.message(fold, {}))
    assert_same(page, fold)
