"""What the page's controls ask for, done by the board's thread; and the functions that do the same in a cell."""

from __future__ import annotations

import pytest

from dplab.errors import RunError, UsageError
from dplab.views.fold import Fold
from dplab.views.svg import svg
from dplab.widgets.board import Board
from tests.views.synthetic import run_events, step_events
from tests.widgets.fake import FakeRun
from tests.widgets.page import Page, until

pytestmark = pytest.mark.usefixtures("comms", "shown")


@pytest.fixture
def run():
    return FakeRun(2, events=run_events(2, 5))


@pytest.fixture
def board(run, comms):
    made = Board(run, live=True, hz=0.5)
    made._ipython_display_()
    yield made
    made.close()


def last(comms):
    """What a page holds that has got every message so far."""
    page = Page()
    for message in comms[0].board_messages():
        page.apply(*message)
    return page


@pytest.mark.parametrize("kind", ["pause", "resume", "step", "profile", "snapshot"])
def test_a_button_asks_the_run_for_the_same_as_its_function(kind, run, board, comms):
    comms[0].say(type=kind)
    until(lambda: last(comms).status.get("done") == 1)
    assert run.asked == [kind]


def test_what_cannot_be_done_is_said_on_the_board_until_the_next_wish(run, board, comms):
    comms[0].say(type="relaunch", strategy="zero3")
    until(lambda: last(comms).status.get("done") == 1)
    assert last(comms).status["problem"] == "what the run called is not kept any more"
    assert board.summary().endswith("what the run called is not kept any more")
    comms[0].say(type="pause")
    until(lambda: last(comms).status.get("done") == 2)
    assert last(comms).status["problem"] is None


@pytest.mark.parametrize("content", [{"type": "rm"}, {"type": "seek", "step": "x"}, {"type": "seek", "step": 99}, {}])
def test_nonsense_from_the_page_does_no_harm(content, run, board, comms):
    comms[0].say(**content)
    comms[0].say(type="pause")
    until(lambda: run.asked == ["pause"])
    assert board.svg()


def test_the_past_is_shown_as_it_was_live_and_the_newest_again(run, board, comms):
    then = Fold(2, "zero2")
    for event in run.emitted:
        then.feed([event])
        if then.pace.steps == 3:
            break
    comms[0].say(type="seek", step=3)
    until(lambda: last(comms).status.get("shown") == 3)
    page = last(comms)
    assert (page.status["steps"], page.status["last"]) == (3, 5)
    assert page.charts["sync"]["title"] == "Gradient synchronisation, step 3"
    assert svg(then.grid(0)) == svg(board._watch.shown.grid(0))
    assert "as after step 3" in board.summary()
    run.emitted += [event for rank in range(2) for event in step_events(rank, 5)]
    comms[0].say(type="seek", step=None)
    until(lambda: last(comms).status.get("shown", 0) is None and last(comms).status["steps"] == 6)
    assert last(comms).charts["sync"]["title"] == "Gradient synchronisation, step 6"


def test_a_slider_that_moves_quickly_is_followed_to_where_it_stands(board):
    board._halt()
    board.closed = True      # no thread: what has gathered is looked at
    for step in (1, 2, 3, 4):
        board._on_message(board, {"type": "seek", "step": step}, [])
    assert list(board._asked) == [("seek", 4)]


@pytest.mark.parametrize("step", [0, 6, 2.5, "3", None])
def test_a_step_that_is_not_there_cannot_be_looked_at(step, board):
    with pytest.raises(UsageError, match=rf"seek\({step!r}\) is not allowed; the run has ended 5 steps: give 1 to 5"):
        board.seek(step)


def test_relaunched_the_board_follows_the_new_run_beside_the_old(run, board, comms):
    run.relaunchable = True
    comms[0].say(type="relaunch", strategy="zero3")
    until(lambda: last(comms).status.get("done") == 1)
    assert run.asked == ["relaunch zero3"]
    new = board.run
    assert (new.spec.strategy, run.state) == ("zero3", "stopped")
    assert not board.frozen
    new.emitted += run_events(2, 2)
    board._ticker.wake.set()
    until(lambda: last(comms).status["steps"] == 2)
    page = last(comms)
    assert ("strategy", "zero3") in page.status["facts"]
    assert page.charts["anatomy"]["marks"][0]["names"] == ("rank 0", "rank 1", "earlier")
    assert page.charts["wire/0"]["marks"][0]["names"] == ("sent", "theory", "earlier")
    assert [mark["role"] for mark in page.charts["loss"]["marks"]] == ["earlier", "loss", "loss_smooth"]
    assert page.columns["loss#0"].shape[1] == 2      # as far as this run has come
    assert (page.status["path"], page.status["compared"]) == (str(new.path), str(run.path))


def test_another_run_beside_this_one_and_none_again(run, board, comms):
    other = FakeRun(2, state="finished", events=run_events(2, 9))
    board.compare(other)
    assert board._watch.fold.loss.series["step"].tolist() == list(range(1, 6))
    names = [chart.marks[0].names for chart in board._watch.fold.charts() if chart.key == "anatomy"]
    assert names == [("rank 0", "rank 1", "earlier")]
    assert board._watch.status()["compared"] == str(other.path)
    board.compare(None)
    assert board._watch.status()["compared"] == ""
    assert [chart.marks[0].names for chart in board._watch.fold.charts() if chart.key == "anatomy"] == [
        ("rank 0", "rank 1")]
    with pytest.raises(RunError, match="/nowhere/else is not a run directory"):
        board.compare("/nowhere/else")


def test_a_run_that_is_over_is_replayed_with_a_slider_and_frozen_on_request(run, comms, shown):
    run.state = "finished"
    board = Board(run, live=True, replay=True, hz=4)
    board._ipython_display_()
    assert "application/vnd.jupyter.widget-view+json" in shown[-1][0]
    comms[0].say(type="seek", step=2)
    until(lambda: last(comms).status.get("shown") == 2)
    assert not board.frozen
    board.freeze()
    until(lambda: comms[0].messages[-1][0] == "comm_close")
    assert set(shown[-1][0]) == {"text/plain", "image/svg+xml"}
    assert "finished, as after step 2" in shown[-1][0]["text/plain"]


def test_a_run_that_ends_while_its_past_is_looked_at_stays_until_the_newest_is(run, board, comms, shown):
    comms[0].say(type="seek", step=2)
    until(lambda: last(comms).status.get("shown") == 2)
    run.state = "finished"
    comms[0].say(type="hello")
    until(lambda: last(comms).status["state"] == "finished")
    assert not board.frozen
    comms[0].say(type="seek", step=None)
    until(lambda: "finished" in shown[-1][0]["text/plain"])
    assert board.frozen


def test_runs_to_compare_with_are_the_newest_others(tmp_path):
    from dplab.launcher.run import attach
    from dplab.launcher.watch import Watch
    from dplab.specs import RunSpec
    from dplab.telemetry.rundir import RunDirectory

    def make(number):
        RunDirectory(tmp_path / f"run-{number:02}").create({
            "spec": RunSpec(function="m:f", world_size=1, label=f"no {number}").to_dict(), "created": number * 10**9,
            "versions": {}}, 1)

    for number in range(20):
        make(number)
    (tmp_path / "run-18" / "run.json").write_text("{")      # damaged: not offered
    watch = Watch(attach(tmp_path / "run-19"))
    others = watch.status()["others"]
    assert [text.split(",")[0] for _, text in others] == [f"no {number}" for number in range(17, 5, -1)]
    assert others[0][0] == str(tmp_path / "run-17")
    make(20)      # launched while this one is looked at
    assert watch.status()["others"][0][0] == str(tmp_path / "run-20")
