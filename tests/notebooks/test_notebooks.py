"""Every notebook runs headless under nbval, keeps the house's form, and leaves nothing running."""

from __future__ import annotations

import ast
import re
import time

import nbformat
import pytest

from tests.notebooks.headless import processes_of, run_headless
from tests.notebooks.store import FOLDER, metadata

NOTEBOOKS = sorted(path for path in FOLDER.rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts)
BYTES = 200_000

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def test_there_are_notebooks():
    assert "01-quickstart" in [path.stem for path in NOTEBOOKS]


@pytest.mark.slow
@every_notebook
def test_h43_runs_headless_and_says_what_is_stored(path, tmp_path):
    done = run_headless(path, tmp_path)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert f"{len(code_cells(path))} passed" in done.stdout

    limit = time.monotonic() + 30
    while left := processes_of(tmp_path / "runs"):
        assert time.monotonic() < limit, f"{path.name} left running: {[process.cmdline() for process in left]}"
        time.sleep(0.1)


@every_notebook
def test_first_cell_imports_one_holds_parameters_the_last_asserts(path):
    cells = code_cells(path)
    assert all(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.parse(cells[0].source).body)
    assert sum("parameters" in cell.metadata.get("tags", []) for cell in cells) == 1
    assert any(isinstance(node, ast.Assert) for node in ast.parse(cells[-1].source).body)


@every_notebook
def test_stored_outputs_are_whole_small_and_carry_no_widget_state(path):
    notebook = nbformat.read(path, as_version=4)
    assert path.stat().st_size < BYTES
    assert "widgets" not in notebook.metadata
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs
    assert not any(output.output_type == "error" for output in outputs)
    mimes = {mime for output in outputs for mime in output.get("data", {})}
    assert "image/svg+xml" in mimes
    assert "application/vnd.jupyter.widget-view+json" not in mimes


@every_notebook
def test_it_is_stored_as_jupyterlab_saves_it(path):
    """Else it is marked as changed as soon as it is opened, and each run leaves a diff of time stamps."""
    notebook = nbformat.read(path, as_version=4)
    assert notebook.metadata == metadata(notebook.metadata.language_info.version)
    assert {key for cell in notebook.cells for key in cell.metadata} <= {"tags"}


@every_notebook
def test_code_fits_a_cell_of_a_small_window(path):
    """JupyterLab beside its file browser shows 106 letters of a line in a window 1280 wide."""
    assert [line for cell in code_cells(path) for line in cell.source.splitlines() if len(line) > 100] == []


@every_notebook
def test_where_no_picture_is_shown_there_are_words(path):
    """A notebook that came with a clone is not trusted, and JupyterLab then shows no SVG."""
    for cell in code_cells(path):
        for output in cell.outputs:
            if "data" in output:
                assert "object>" not in output.data["text/plain"]
                assert len(output.data["text/plain"]) > 50


@every_notebook
def test_nothing_of_the_machine_it_was_made_on_is_stored(path):
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"/(home|root|tmp|work|Users)/", text)


@every_notebook
def test_pictures_that_change_are_not_compared(path):
    for cell in code_cells(path):
        if any("image/svg+xml" in output.get("data", {}) for output in cell.outputs):
            assert "nbval-ignore-output" in cell.metadata.get("tags", [])
