"""Runs notebooks anew and stores them as JupyterLab would save them: `python -m tests.notebooks.store [NAME...]`.

Opening a notebook then changes nothing in it: it names the kernel and the language as the kernel names itself, and
holds no time stamps and no widget state. (`version` is this Python's; under another one JupyterLab writes its own.)
"""

from __future__ import annotations

import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "notebooks"
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
LANGUAGE = {"codemirror_mode": {"name": "ipython", "version": 3}, "file_extension": ".py",
            "mimetype": "text/x-python", "name": "python", "nbconvert_exporter": "python",
            "pygments_lexer": "ipython3"}


def metadata(version: str) -> dict[str, Any]:
    """What JupyterLab writes into a notebook of this kernel and Python."""
    return {"kernelspec": dict(KERNEL), "language_info": {**LANGUAGE, "version": version}}


def store(path: Path) -> None:
    """Executes one notebook without CI's small parameters, and writes it."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as elsewhere:
        NotebookClient(notebook, timeout=300, record_timing=False, store_widget_state=False, coalesce_streams=True,
                       resources={"metadata": {"path": elsewhere}}).execute()
    notebook.metadata = nbformat.from_dict(metadata(platform.python_version()))
    nbformat.write(notebook, path)


def main() -> None:
    """Stores the notebooks named, or all."""
    names = sys.argv[1:] or [path.name for path in sorted(FOLDER.glob("*.ipynb"))]
    for name in names:
        print(name)
        store(FOLDER / name)


if __name__ == "__main__":
    main()
