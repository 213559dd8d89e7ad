"""`lab`: JupyterLab on the notebooks."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from dplab.commands.base import Answer, Verbs, verb
from dplab.errors import UsageError

QUIET = ("--LabApp.news_url=None",)
"""No news are fetched; a later option of the user's wins."""
CONFIG = "jupyter"
"""The folder of data with JupyterLab's configuration: it does not ask about news, which would lie over the pictures."""


def add(verbs: Verbs) -> None:
    """Declares the verb."""
    parser = verb(verbs, "lab", lab, about="open JupyterLab on the notebooks",
                  example="dplab lab --no-browser --port 8890")
    parser.add_argument("--no-browser", action="store_true", help="do not open a browser, print the address")
    parser.add_argument("--copy-only", "--lay-only", action="store_true", dest="copy_only",
                        help="copy the notebooks into this folder and stop there")
    parser.set_defaults(passes_on=True)
    parser.epilog = f"{parser.epilog}\n\nAny other argument is given to jupyter lab."


def lab(args: argparse.Namespace) -> Answer:
    """Copies the notebooks where there is no checkout, then becomes JupyterLab."""
    from dplab.resources import DATA, NOTEBOOKS, copy_notebooks, folder, is_checkout

    if args.copy_only and args.rest:
        raise UsageError(f"lab --copy-only copies the notebooks into the current folder; "
                         f"leave {' '.join(args.rest)} out")
    here, said = Path.cwd(), []
    target = folder(NOTEBOOKS)
    written: list[Path] = []
    kept: list[Path] = []
    if not is_checkout() or args.copy_only:
        target = here
        written, kept = copy_notebooks(here)
        said = [f"{path.name} copied into {here}" for path in written]
        said += [f"{path.name} is left as you changed it; delete it to get the original" for path in kept]
    data = {"folder": str(target), "written": [path.name for path in written], "kept": [path.name for path in kept]}
    if args.copy_only:
        return Answer(data, "\n".join(said))
    if importlib.util.find_spec("jupyterlab") is None:
        raise UsageError("JupyterLab is not installed; pip install 'dplab[lab]', then dplab lab again")
    options = [*QUIET, *(["--no-browser"] if args.no_browser else []), *args.rest]
    if hasattr(os, "geteuid") and os.geteuid() == 0 and "--allow-root" not in options:
        said.append("running as root (as in a container): JupyterLab is started with --allow-root")
        options.append("--allow-root")
    trust(written or sorted(target.rglob("*.ipynb")))
    for line in said:
        print(line, file=sys.stderr, flush=True)
    if args.json:
        print(json.dumps(data), flush=True)
    paths = [str(folder(DATA) / CONFIG), os.environ.get("JUPYTER_CONFIG_PATH", "")]
    os.environ["JUPYTER_CONFIG_PATH"] = os.pathsep.join(filter(None, paths))
    return _become([sys.executable, "-m", "jupyterlab", *options, str(target)])


def trust(paths: Sequence[Path]) -> None:
    """Signs dplab's own notebooks: JupyterLab shows the stored pictures only of those that it trusts."""
    nbformat: Any = importlib.import_module("nbformat")  # untyped, and of the lab extra
    notary = importlib.import_module("nbformat.sign").NotebookNotary()
    for path in paths:
        if ".ipynb_checkpoints" not in path.parts:
            notary.sign(nbformat.read(path, as_version=4))


def _become(command: list[str]) -> NoReturn:
    """No child: whoever ends this process ends JupyterLab, and Ctrl-C is JupyterLab's to answer."""
    os.execv(command[0], command)
