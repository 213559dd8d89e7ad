"""Runs that are not as they should be, as real directories: the board says what is so and stays usable."""

from __future__ import annotations

import json
import os
import shutil
import time

import pytest

from dplab.errors import RunError
from dplab.launcher.run import attach
from dplab.specs import RunSpec
from dplab.telemetry.event_file import EventFile
from dplab.telemetry.files import write_json, write_reserved
from dplab.telemetry.process import Identity
from dplab.telemetry.rundir import RunDirectory
from dplab.widgets.board import Board
from tests.views.synthetic import run_events
from tests.widgets.page import Page, until

pytestmark = pytest.mark.usefixtures("comms", "shown")


@pytest.fixture
def directory(tmp_path):
    made = RunDirectory(tmp_path / "run")
    made.create({"spec": RunSpec(function="m:f", world_size=2, strategy="zero2").to_dict(), "created": time.time_ns(),
                 "versions": {"dplab": "0.0.1"}}, 2)
    me = Identity.of(os.getpid())
    write_json(made.path / "pids.json", {"supervisor": me, "ranks": [me, me]})
    for rank in range(2):
        EventFile(made.rank(rank) / "events.jsonl", rank).write([
            (event.kind, event.name, event.step, event.t0, event.t1, event.attrs)
            for event in run_events(2, 5) if event.rank == rank])
    return made


def shown_on(comms):
    page = Page()
    for message in comms[0].board_messages():
        page.apply(*message)
    return page.status


def test_a_run_whose_supervisor_died_says_so_and_keeps_its_steps(directory):
    write_json(directory.path / "pids.json", {"supervisor": Identity(4_000_000, 1.0, "gone"), "ranks": []})
    board = Board(attach(directory.path))
    words = board.summary()
    assert words.startswith("zero2, 2 ranks, failed\n  Loss: 3.000 at step 1, 2.200 at step 5")
    assert "vanished without writing the run's end, most likely killed" in words
    board.seek(2)
    assert "as after step 2" in board.summary()


def test_a_torn_last_line_waits_and_a_damaged_one_is_told_and_nothing_else_is_lost(directory, comms):
    path = directory.rank(1) / "events.jsonl"
    with path.open("a") as file:
        file.write('["step","train",5,1')
    board = Board(attach(directory.path), live=True, hz=4)
    board._ipython_display_()
    assert board._watch.problem is None      # its writer may go on
    with path.open("a") as file:
        file.write("\n")
    until(lambda: "is damaged behind byte" in (shown_on(comms).get("problem") or ""))
    assert shown_on(comms)["steps"] == 5
    assert "is not an event" in board.summary()
    assert "Gradient synchronisation, step 5" in board.svg()
    attached = Board(attach(directory.path))      # and whoever comes now sees as much
    assert "Gradient synchronisation, step 5" in attached.svg()
    assert "is not an event" in attached.summary()
    board.seek(3)
    assert "as after step 3" in board.summary()
    board.close()


def test_a_run_of_another_dplab_is_refused_in_one_sentence(directory):
    path = directory.path / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 0}))
    with pytest.raises(RunError, match=r"was written with schema 0, this dplab reads schema 1; read it with the "
                                       r"dplab that wrote it \(0\.0\.1\)"):
        Board(directory.path)


def test_a_run_of_an_older_dplab_of_this_schema_shows_what_it_recorded(directory):
    words = Board(attach(directory.path)).summary()      # no layout, no printed lines in its events
    assert "Who holds what: the layout is not recorded (yet): dplab.parallelize does it" in words
    assert "Printed by the ranks: nothing printed yet" in words
    assert "Memory, rank 0: 47 MB in tensors" in words


def test_a_run_that_is_still_starting_says_so_and_goes_on_when_it_has(directory, comms):
    for rank in range(2):
        (directory.rank(rank) / "events.jsonl").rename(directory.path / f"later-{rank}")
    write_json(directory.path / "pids.json", {"supervisor": Identity.of(os.getpid()), "ranks": []})
    board = Board(attach(directory.path), live=True, hz=4)
    board._ipython_display_()
    until(lambda: shown_on(comms).get("state") == "starting")
    assert shown_on(comms)["last"] == 0      # nothing to scrub through yet
    me = Identity.of(os.getpid())
    write_json(directory.path / "pids.json", {"supervisor": me, "ranks": [me, me]})
    for rank in range(2):
        (directory.path / f"later-{rank}").rename(directory.rank(rank) / "events.jsonl")
    until(lambda: shown_on(comms).get("steps") == 5)
    assert shown_on(comms)["state"] == "running"
    board.close()


def test_a_directory_that_is_deleted_meanwhile_is_told_and_the_last_picture_stays(directory, comms, shown):
    board = Board(attach(directory.path), live=True, hz=4)
    board._ipython_display_()
    until(lambda: shown_on(comms).get("steps") == 5)
    shutil.rmtree(directory.path)
    until(lambda: board.frozen and set(shown[-1][0]) == {"text/plain", "image/svg+xml"})
    words = shown[-1][0]["text/plain"]
    assert words.startswith("zero2, 2 ranks, damaged\n  Loss: 3.000 at step 1")
    assert "is not a run directory: it does not exist" in words


def test_an_end_that_was_written_while_nobody_read_is_the_last_word(directory, shown):
    board = Board(attach(directory.path), live=True, hz=4)
    board._ipython_display_()
    write_reserved(directory.path / "exit.json", {
        "state": "finished", "first": None, "collateral": [], "reason": None, "ranks": [], "notes": []})
    until(lambda: shown[-1][0]["text/plain"].startswith("zero2, 2 ranks, finished"))


def test_a_long_run_is_a_picture_at_once_and_then_catches_up(directory, comms, monkeypatch):
    from dplab.launcher import watch

    monkeypatch.setattr(watch, "PIECE", 500)
    monkeypatch.setattr(watch, "_MOMENT", 0.0)      # one piece at a time... at most
    board = Board(attach(directory.path), live=True, hz=4)
    assert board._watch.fold.pace.steps == 0
    board._watch._seconds = 0.001
    board._ipython_display_()
    until(lambda: shown_on(comms).get("steps") == 5)
    board.close()
    patient = watch.Watch(attach(directory.path))
    patient.read()
    assert patient.fold.pace.steps == 5
