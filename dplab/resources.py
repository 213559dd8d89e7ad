"""Where notebooks and data lie: beside the package in a checkout, inside it in a wheel."""

from __future__ import annotations

import os
from pathlib import Path

from dplab.errors import DplabError, UsageError

_PACKAGE = Path(__file__).parent
NOTEBOOKS, DATA = "notebooks", "data"


def folder(name: str) -> Path:
    """The folder `notebooks` or `data`."""
    checkout = _PACKAGE.parent / name
    if (_PACKAGE.parent / "pyproject.toml").is_file() and checkout.is_dir():
        return checkout
    packaged = _PACKAGE / f"_{name}"
    if not packaged.is_dir():
        raise DplabError(f"this installation of dplab has no {name} in {_PACKAGE}; install it again with pip")
    return packaged


def copy_notebooks(target: Path) -> tuple[list[Path], list[Path]]:
    """Copies the notebooks into `target`, never over a changed one. Returns those written and those left alone."""
    written, kept = [], []
    source = folder(NOTEBOOKS)
    for path in sorted(source.rglob("*.ipynb")):
        if ".ipynb_checkpoints" in path.parts:
            continue
        copy = target / path.relative_to(source)
        try:
            if copy.exists() and copy.read_bytes() != path.read_bytes():
                kept.append(copy)
                continue
            copy.parent.mkdir(parents=True, exist_ok=True)
            # Another process may copy the same notebooks: each copy appears whole or not at all.
            partial = copy.with_name(f".{copy.name}.{os.getpid()}")
            partial.write_bytes(path.read_bytes())
            os.replace(partial, copy)
        except OSError as error:
            raise UsageError(f"notebooks cannot be copied into {str(target)!r} ({copy.name}: {error.strerror}); "
                             f"run dplab lab from a folder that you may write") from error
        written.append(copy)
    return written, kept


def is_checkout() -> bool:
    """True where dplab runs from its own source tree."""
    return folder(NOTEBOOKS).parent == _PACKAGE.parent
