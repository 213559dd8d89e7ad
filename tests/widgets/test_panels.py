"""Panels of a board that stand alone: live, as a picture, in words."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from dplab.errors import UsageError
from dplab.views.fold import GRID
from dplab.views.svg import WIDTH
from dplab.widgets.board import Board
from tests.views.synthetic import run_events, step_events
from tests.widgets.fake import FakeRun
from tests.widgets.page import Page, until

pytestmark = pytest.mark.usefixtures("comms", "shown")
ALL = [key for keys in GRID for key in keys]


@pytest.fixture
def run():
    return FakeRun(2, events=run_events(2, 5))


def keys(page):
    return {name.partition("/")[0] for name in page.charts}


@pytest.mark.parametrize("panels", [["sync"], ["memory", "loss"], ALL])
def test_the_page_gets_these_panels_in_this_order_and_no_other(panels, run, comms):
    board = Board(run, live=True, hz=4, panels=panels)
    board._ipython_display_()
    assert board.spec["grid"] == tuple((panel,) for panel in panels)
    run.emitted += [event for rank in range(2) for event in step_events(rank, 5)]
    page = Page()
    page.apply(board.snapshot["content"], board.snapshot["data"])
    assert keys(page) == set(panels)
    until(lambda: any(content["status"]["steps"] == 6 for content, _ in comms[0].board_messages()))
    for message in comms[0].board_messages():
        page.apply(*message)
    assert keys(page) == set(panels)
    board.close()


@pytest.mark.parametrize("panel", ALL)
def test_every_panel_is_a_picture_by_itself_with_the_runs_state_above(panel, run):
    run.state, run.failure = "failed", "rank 1 of 2 was killed by SIGKILL, and this is a long sentence about it"
    board = Board(run, panels=[panel])
    picture = ElementTree.fromstring(board.svg())
    assert picture.get("viewBox").split()[2] == str(WIDTH)
    said = ["".join(text.itertext()) for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert said[0] == "failed"
    assert run.failure in " ".join(said)
    words = board.summary().splitlines()
    (figure,) = board.figures()
    assert words[1].startswith(f"  {figure.layout.title.text}: ")
    assert (len(words), words[-1].strip()) == (4, run.failure)      # the third: tokens a second


def test_what_stands_above_a_narrow_picture_is_not_wider_than_it(run):
    run.failure, run.state = "why " * 60, "failed"
    for text in ElementTree.fromstring(Board(run, panels=["loss"]).svg()).iter("{http://www.w3.org/2000/svg}text"):
        if float(text.get("y")) < 60 and text.get("text-anchor") is None:
            assert float(text.get("x")) + 6.2 * len("".join(text.itertext())) < WIDTH


@pytest.mark.parametrize("panels", ["loss", ["los"], [], ["loss", 3], 3, True, {"loss": 1}])
def test_a_panel_that_is_not_there(panels, run):
    with pytest.raises(UsageError, match=re.escape(f"panels={panels!r} is not allowed; give some of loss, ")):
        Board(run, panels=panels)
