"""The life of a board without a browser: what it sends, when its thread ends, what it leaves behind."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref

import pytest

from dplab.errors import RunError, UsageError
from dplab.launcher.watch import Watch
from dplab.telemetry.restarts import Restart
from dplab.widgets.board import Board
from tests.views.synthetic import run_events, step_events
from tests.widgets.fake import FakeRun
from tests.widgets.page import Page, until

pytestmark = pytest.mark.usefixtures("comms", "shown")


def board_threads():
    return [thread for thread in threading.enumerate() if thread.name == "dplab-board"]


@pytest.fixture(autouse=True)
def no_thread_of_before():
    """A board that a test has closed ends its thread soon after."""
    until(lambda: not board_threads())


@pytest.fixture
def run():
    return FakeRun(2, events=run_events(2, 5))


def test_first_snapshot_is_there_before_anything_is_sent(run, comms):
    Board(run, live=True)
    kind, data, buffers = comms[0].messages[0]
    assert kind == "comm_open"
    state = data["state"]
    page = Page()
    page.apply(state["snapshot"]["content"], bytes(buffers[0]))
    assert page.status["steps"] == 5
    assert page.status["facts"] == (("strategy", "zero2"), ("ranks", "2"), ("steps", "5"), ("loss", "2.2"),
                                    ("tokens/s", "18,963"))
    assert state["spec"]["ranks"] == 2


def test_the_thread_sends_what_the_run_writes(run, comms):
    board = Board(run, live=True, hz=4)
    board._ipython_display_()
    page = Page()

    def step_seen():
        for message in comms[0].board_messages():
            page.apply(*message)
        return page.status.get("steps")

    until(lambda: step_seen() == 5)
    run.emitted += [event for rank in range(2) for event in step_events(rank, 5)]
    until(lambda: step_seen() == 6)
    board.close()


def test_hello_is_answered_with_a_keyframe(run, comms):
    board = Board(run, live=True, hz=0.1)
    board._ipython_display_()
    until(lambda: len(comms[0].board_messages()) == 1)
    comms[0].say(type="hello")
    until(lambda: len(comms[0].board_messages()) == 2)
    content, _ = comms[0].board_messages()[-1]
    assert content["keyframe"]
    board.close()


def test_the_stop_button_asks_the_run_to_stop(run, comms):
    board = Board(run, live=True, hz=0.1)
    board._ipython_display_()
    comms[0].say(type="stop")
    until(lambda: run.stops == 1)
    board.stop()  # its twin in a cell
    assert run.stops == 2
    board.close()


def test_the_thread_ends_with_the_run_and_a_still_picture_takes_the_place(run, comms, shown):
    board = Board(run, live=True, hz=4)
    board._ipython_display_()
    assert "application/vnd.jupyter.widget-view+json" in shown[0][0]
    run.emitted += [event for rank in range(2) for event in step_events(rank, 5)]
    run.state = "finished"
    until(lambda: not board_threads())
    bundle, display_id, update = shown[-1]
    assert update
    assert display_id == shown[0][1]
    assert set(bundle) == {"text/plain", "image/svg+xml"}
    assert "step 6" in bundle["text/plain"]
    assert sum(map(len, bundle.values())) < 200_000
    assert comms[0].messages[-1][0] == "comm_close"
    assert board.frozen


def test_on_a_reloaded_page_the_board_stays_with_its_last_word(run, comms):
    board = Board(run, live=True, hz=4)
    board._ipython_display_()
    for _ in range(2):
        comms[0].say(type="hello", fresh=True)
    run.state = "finished"
    until(lambda: not board_threads())
    assert comms[0].messages[-1][0] != "comm_close"
    assert comms[0].board_messages()[-1][0]["status"]["state"] == "finished"
    sent = len(comms[0].board_messages())
    comms[0].say(type="hello", fresh=True)  # and once more
    until(lambda: len(comms[0].board_messages()) == sent + 1)
    until(lambda: not board_threads())
    assert comms[0].board_messages()[-1][0]["keyframe"]
    board.close()
    assert comms[0].messages[-1][0] == "comm_close"


def test_freeze_leaves_the_run_alone(run, shown):
    board = Board(run, live=True)
    board._ipython_display_()
    board.freeze()
    board.freeze()
    until(lambda: not board_threads())
    assert [update for _, _, update in shown] == [False, True]
    assert run.stops == 0


def test_a_cell_that_runs_again_ends_its_old_board(run, comms, monkeypatch):
    from dplab.widgets import frontend

    monkeypatch.setattr(frontend, "cell_id", lambda: "cell-7")
    boards = [Board(FakeRun(2, events=run_events(2, 2)), live=True) for _ in range(3)]
    for board in boards:
        board._ipython_display_()
    until(lambda: len(board_threads()) == 1)
    assert [board.closed for board in boards] == [True, True, False]
    assert [comm.messages[-1][0] == "comm_close" for comm in comms] == [True, True, False]
    boards[-1].close()
    until(lambda: not board_threads())


def test_twenty_re_runs_leak_nothing(comms, monkeypatch):
    from dplab.widgets import frontend

    monkeypatch.setattr(frontend, "cell_id", lambda: "cell-8")
    alive = []
    for _ in range(20):
        board = Board(FakeRun(2, events=run_events(2, 3)), live=True)
        board._ipython_display_()
        alive.append(weakref.ref(board))
    board.close()
    del board
    until(lambda: not board_threads())
    assert {comm.messages[-1][0] for comm in comms} == {"comm_close"}
    comms.clear()  # the kernel's comm manager forgets a closed comm, our list does not
    gc.collect()
    assert [ref() for ref in alive if ref() is not None] == []


def test_a_board_nobody_holds_any_more_ends_its_thread(run, monkeypatch):
    monkeypatch.setattr(Board, "open", lambda self: None)  # ipywidgets holds what has a comm
    monkeypatch.setattr(Board, "_transmit", lambda self, keyframe: None)
    monkeypatch.setattr(Board, "model_id", "none")
    board = Board(run, live=True, hz=4)
    board._ipython_display_()
    assert board_threads()
    del board

    def ended() -> bool:
        gc.collect()      # again: a tick that goes on holds it
        return not board_threads()

    until(ended)


def test_where_nobody_watches_there_is_a_picture_and_no_comm_and_no_thread(run, comms, shown):
    board = Board(run)
    assert not board.live
    board._ipython_display_()
    assert comms == []
    assert board_threads() == []
    bundle, _, _ = shown[0]
    assert set(bundle) == {"text/plain", "image/svg+xml"}
    assert bundle["text/plain"].startswith("zero2, 2 ranks, running\n  Loss: 3.000 at step 1")
    assert repr(board) == bundle["text/plain"]


def test_unwatched_pictures_are_renewed_after_cells_until_the_run_is_over(run, shown):
    board = Board(run)
    board._ipython_display_()
    board.after_cell()
    assert len(shown) == 1  # drawn a moment ago
    run.state = "stopped"
    board.after_cell()
    bundle, display_id, update = shown[-1]
    assert (display_id, update) == (shown[0][1], True)
    assert bundle["text/plain"].startswith("zero2, 2 ranks, stopped")
    assert board.frozen


def test_a_run_that_is_over_is_a_still_picture_at_once(comms, shown):
    board = Board(FakeRun(2, state="finished", events=run_events(2, 5)), live=True)
    board._ipython_display_()
    assert [set(bundle) for bundle, _, _ in shown] == [{"text/plain", "image/svg+xml"}]
    assert board_threads() == []


def test_a_run_that_only_starts_says_so(shown):
    board = Board(FakeRun(2, state="starting"))
    assert "starting" in board.summary()
    assert "no loss yet: it appears after the first step" in board.summary()
    assert "no step is complete on every rank yet" in board.svg()


def test_a_restarted_run_says_why():
    run = FakeRun(2, events=run_events(2, 2))
    run.restarts = [Restart(number=1, at=0, wall=0, rank=1, ranks=2, world_size=1, why="rank 1 of 2 was killed")]
    assert ("restarts", "1, last on 1: rank 1 of 2 was killed") in Watch(run).head().facts


def test_a_failed_run_says_why():
    run = FakeRun(2, state="failed", events=run_events(2, 2))
    run.failure = "rank 1 failed: ValueError: no"
    assert Board(run).summary().endswith("rank 1 failed: ValueError: no")


def test_a_run_that_cannot_be_read_says_so_and_goes_on_when_it_can(run, comms):
    run.broken = "events.jsonl is damaged behind byte 7"
    board = Board(run, live=True, hz=4)
    board._ipython_display_()
    until(lambda: any(content["status"]["problem"] == "the run cannot be read: events.jsonl is damaged behind byte 7"
                      for content, _ in comms[0].board_messages()))
    run.broken = None
    until(lambda: comms[0].board_messages()[-1][0]["status"]["steps"] == 5)
    assert comms[0].board_messages()[-1][0]["status"]["problem"] is None
    board.close()


def test_silence_slows_the_board_down_and_a_word_wakes_it(run, comms, monkeypatch):
    from dplab.widgets import board as module
    from dplab.widgets import frontend

    board = Board(run, live=True)
    cells = frontend.cells()
    monkeypatch.setattr(cells, "running", False)
    monkeypatch.setattr(cells, "ended_at", 0.0)
    now = board._heard_at
    monkeypatch.setattr(module.time, "monotonic", lambda: now + 15)
    assert board.tick() == 0.5
    monkeypatch.setattr(module.time, "monotonic", lambda: now + 90)
    assert board.tick() == 45
    monkeypatch.setattr(module.time, "monotonic", lambda: now + 900)
    assert board.tick() == 60
    sent = len(comms[0].board_messages())
    monkeypatch.setattr(Watch, "behind", True)   # what is caught up with meanwhile is no news to anybody
    board.tick()
    assert len(comms[0].board_messages()) == sent
    monkeypatch.setattr(Watch, "behind", False)
    board.tick()
    assert len(comms[0].board_messages()) == sent + 1
    monkeypatch.setattr(cells, "running", True)  # a long cell holds the page's words back: that is no silence
    assert board.tick() == 0.5
    monkeypatch.setattr(cells, "running", False)
    monkeypatch.setattr(module.time, "monotonic", lambda: now + 4000)
    assert board.tick() is None
    board._on_message(board, {"type": "hello"}, [])
    assert board.tick() == 0.5
    board.close()


def test_findings_are_told_every_two_seconds_at_most_and_at_the_end(run, monkeypatch):
    from dplab.launcher import watch as module

    now = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    run.emitted += [event for rank in range(2) for event in step_events(rank, 5)]
    watch = Watch(run, patient=False)
    watch.read()
    first = watch.fold.findings.told
    assert first is not None
    run.emitted += [event for rank in range(2) for event in step_events(rank, 6)]
    now += 1.9
    watch.read()
    assert watch.fold.findings.told is first
    now += 0.2
    watch.read()
    assert watch.fold.findings.told.summary.startswith("7 steps on 2 ranks")
    run.emitted += [event for rank in range(2) for event in step_events(rank, 7)]
    run.state = "finished"
    watch.read()
    assert watch.over()
    assert watch.fold.findings.told.summary.startswith("8 steps on 2 ranks")


def test_a_run_that_hangs_says_which_rank_is_missed(tmp_path, monkeypatch):
    """Ranks note where they stand; one of three has noted least, and long ago."""
    from dplab.diagnosis import hang
    from dplab.specs import RunSpec
    from dplab.telemetry.rundir import RunDirectory
    from dplab.telemetry.state import StatePage

    run = FakeRun(3)
    run.path = tmp_path / "run"
    directory = RunDirectory(run.path)
    directory.create({"spec": RunSpec(function="m:f", world_size=3).to_dict()}, 3)
    for rank in range(3):
        page = StatePage(directory.rank(rank) / "state")
        for _ in range(3 - (rank == 1)):
            page.write(7 - (rank == 1), "all_reduce grads", 2)
    monkeypatch.setattr(hang, "STILL_SECONDS", 0.0)
    watch = Watch(run)
    watch.read()
    chart = watch.fold.findings.chart()
    assert (chart.value, chart.alert) == ("1 finding", True)
    what, seen, remedy = (text for _, _, text in chart.marks[0].lines)
    assert what.endswith("ranks [0, 2] wait for [1]")
    assert "rank 1: in step 7, all_reduce grads, bucket 2" in seen
    assert remedy.startswith("look at that line")
    assert "ranks [0, 2] wait for [1]" in watch.svg()
    run.state = "paused"
    watch.read()
    assert watch.fold.findings.told.findings == ()


@pytest.mark.parametrize(("told", "shown"), [(1, 1), (7, 0), ("x", 0), (None, 0)])
def test_the_still_picture_keeps_the_rank_that_was_chosen(run, comms, told, shown):
    board = Board(run, live=True)
    board._on_message(board, {"type": "rank", "rank": told}, [])
    bundle = board._repr_mimebundle_()
    for text in bundle["text/plain"], bundle["image/svg+xml"]:
        assert f"Memory, rank {shown}" in text
        assert f"Memory, rank {1 - shown}" not in text


@pytest.mark.parametrize("hz", [0, -1, 5])
def test_a_rate_that_is_not_allowed_is_refused(run, hz):
    with pytest.raises(UsageError, match=rf"Board\(hz={hz}\) is not allowed; hz is a number of messages a second "
                                         r"above 0 and at most 4"):
        Board(run, hz=hz)


def test_a_directory_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(RunError, match=str(tmp_path)):
        Board(tmp_path)


def test_figures_are_the_charts(run):
    titles = [figure.layout.title.text for figure in Board(run).figures(rank=1)]
    assert titles == ["Loss", "Throughput", "Step time, rank 1", "Anatomy of a step",
                      "Gradient synchronisation, step 5", "Wire, rank 1", "Memory, rank 1", "Utilization, rank 1",
                      "Who holds what", "Printed by the ranks", "Diagnosis"]


def test_the_still_picture_says_what_the_live_board_says(run, comms):
    """Its state, its facts, and every title, value, legend and caption that the page was sent."""
    import xml.etree.ElementTree as ElementTree

    run.failure, run.state = "rank 1 failed: ValueError: no", "failed"
    board = Board(run, live=True)
    page = Page()
    page.apply(board.snapshot["content"], board.snapshot["data"])
    for rank in range(2):
        picture = ElementTree.fromstring(board.svg(rank))
        texts = " ".join("".join(node.itertext()) for node in picture.iter("{http://www.w3.org/2000/svg}text"))
        for name, value in page.status["facts"]:
            assert f"{name} {value}" in texts
        assert page.status["state"] in texts
        assert page.status["problem"] in texts
        for name, said in page.charts.items():
            if name.endswith(str(1 - rank)):
                continue
            assert said["title"] in texts
            assert said["value"] in texts
            assert all(word in texts for word in said["caption"].split())
            if not name.startswith(("utilization", "anatomy")):     # named by its value, or by the one above
                assert all(text in texts for _, text in said["legend"])
            assert said["y_label"] in texts


def test_a_run_with_a_label_and_no_strategy_of_its_own_says_so(run, shown):
    from dataclasses import replace

    run.spec = replace(run.spec, label="mine", strategy=None)
    status = Board(run, live=True).snapshot["content"]["status"]
    assert status["facts"][:3] == (("run", "mine"), ("strategy", "its own"), ("ranks", "2"))
    assert Board(run).summary().startswith("mine: its own strategy, 2 ranks, running")


def test_without_the_lab_extra_one_sentence_says_what_to_install():
    script = ("import sys; sys.modules['anywidget'] = None\n"
              "try:\n    import dplab.widgets.board\nexcept ValueError as error:\n    print(error)")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ("the live board needs anywidget, which is not installed; install dplab's extra "
                                   "'lab' (pip install 'dplab[lab]'), or read the run with run.events()")


def test_the_widget_layer_stays_small():
    from pathlib import Path

    import dplab.widgets

    files = [file for file in Path(dplab.widgets.__file__).parent.iterdir() if file.suffix in (".py", ".js", ".css")]
    assert sum(len(file.read_text().splitlines()) for file in files) < 1000
    assert (Path(dplab.widgets.__file__).parent / "board.js").stat().st_size < 30_000
