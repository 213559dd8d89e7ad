"""`dplab lab` before it becomes JupyterLab."""

from __future__ import annotations

import shutil
from pathlib import Path

import nbformat
import pytest
from nbformat.sign import NotebookNotary

from dplab.commands.lab import trust
from dplab.resources import NOTEBOOKS, folder


def test_our_own_notebooks_show_their_stored_pictures_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    path = shutil.copy(folder(NOTEBOOKS) / "01-quickstart.ipynb", tmp_path)
    notebook = nbformat.read(path, as_version=4)
    assert not NotebookNotary().check_signature(notebook)
    trust([Path(path)])
    assert NotebookNotary().check_signature(notebook)
    notebook.cells[0].source += " changed"
    assert not NotebookNotary().check_signature(notebook)
