"""A board in a kernel that nobody watches: what a saved notebook holds, with the runner's default settings."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

SETUP = """
from dplab.widgets import frontend
from dplab.widgets.board import Board
from tests.views.synthetic import run_events, step_events
from tests.widgets.fake import FakeRun
run = FakeRun(2, events=run_events(2, 3))
"""


@pytest.fixture
def executed(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))

    def execute(*sources):
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in (SETUP, *sources)])
        NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
        return notebook

    return execute


def test_h42_the_picture_of_the_end_stands_where_the_board_was_made(executed):
    notebook = executed(
        "board = Board(run)\nboard",
        "run.emitted += [event for rank in range(2) for event in step_events(rank, 3)]\nrun.state = 'finished'",
        "print(board.frozen, board.live, frontend.in_kernel(), frontend.watched())")
    (output,) = notebook.cells[1].outputs
    assert set(output["data"]) == {"text/plain", "image/svg+xml"}
    assert output["data"]["text/plain"].startswith("zero2, 2 ranks, finished")
    assert "Gradient synchronisation, step 4" in output["data"]["image/svg+xml"]
    assert notebook.cells[3].outputs[0]["text"] == "True False True False\n"
    assert not notebook.metadata.get("widgets", {})
    assert len(json.dumps(notebook)) < 200_000


def test_h42_what_ranks_print_goes_to_their_logs_and_under_no_cell(executed, monkeypatch, tmp_path):
    monkeypatch.setenv("DPLAB_RUNS", str(tmp_path / "runs"))
    launch = """
def speak(name):
    import os, sys
    for line in range(200):
        print(name, line, flush=line % 7 == 0)
        print(name, "error", line, file=sys.stderr)
    return os.environ["RANK"]
import dplab
a, b = (dplab.launch(speak, world_size=2, args=(name,), detach=False) for name in "ab")
"""
    check = """
for run, name in ((a, "a"), (b, "b")):
    assert run.wait(60) == ["0", "1"]
    for rank in range(2):
        lines = run.logs(rank).splitlines()
        assert [line for line in lines if "error" not in line] == [f"{name} {n}" for n in range(200)]
        assert [line for line in lines if "error" in line] == [f"{name} error {n}" for n in range(200)]
"""
    notebook = executed(launch, "x = 1", "import time\ntime.sleep(0.5)", check)
    assert [cell.outputs for cell in notebook.cells] == [[]] * 5


def test_freeze_keeps_the_moment_of_the_call(executed):
    notebook = executed(
        "board = Board(run)\nboard", "board.freeze()",
        "run.emitted += run_events(2, 50)[-24:]\nrun.state = 'finished'", "board")
    (output,) = notebook.cells[1].outputs
    assert output["data"]["text/plain"].startswith("zero2, 2 ranks, running")
    assert "step 3" in output["data"]["text/plain"]


def test_a_board_shown_again_shows_now(executed):
    notebook = executed("board = Board(run)\nboard", "run.state = 'stopped'", "board")
    (again,) = notebook.cells[3].outputs
    assert again["data"]["text/plain"].startswith("zero2, 2 ranks, stopped")


def test_in_a_script_a_board_is_words():
    script = f"{SETUP}\nfrom IPython.display import display\nboard = Board(run)\ndisplay(board)\nboard.freeze()"
    done = subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[2], capture_output=True, text=True,
                          timeout=60, check=True)
    assert done.stdout.count("zero2, 2 ranks, running\n  Loss: 3.000 at step 1, 2.333 at step 3\n") >= 1
    assert "svg" not in done.stdout + done.stderr
