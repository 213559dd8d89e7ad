"""Which run somebody means: by its directory, its id, or the beginning of one."""

from __future__ import annotations

import os
from pathlib import Path

from dplab.errors import RunError, UsageError
from dplab.telemetry.rundir import RunDirectory, require_folder, require_run, runs_root


def find_run(path_or_id: str | os.PathLike[str], *, caller: str = "attach") -> RunDirectory:
    """The run of a directory or of an id (or its unmistakable beginning), whoever started it.

    RunError where there is no such run or the directory is not one; UsageError, naming the `caller`, for what cannot
    be either.
    """
    if not isinstance(path_or_id, str | os.PathLike):
        raise UsageError(f"{caller} was given a {type(path_or_id).__name__}; give a run's directory or id")
    text = os.fspath(path_or_id)
    if not text:
        raise UsageError(f"{caller} was given an empty name; give a run's directory or id")
    try:
        path = Path(text).expanduser()
        is_path = os.sep in text or path.exists()
    except (OSError, RuntimeError, ValueError) as error:      # too long, an unknown user's home, a NUL byte
        raise UsageError(f"{caller} was given {text[:80]!r}, which is no run's directory or id ({error})") from error
    if is_path:
        return require_run(path.absolute())
    root = runs_root()
    found = [name for name in run_names(root) if name.startswith(text)]
    if len(found) == 1 or text in found:
        return require_run(root / (text if text in found else found[0]))
    raise RunError(f"{len(found) or 'no'} runs in {root} have an id that starts with {text!r}; "
                   f"`dplab runs` lists them, newest first")


def run_names(root: Path) -> list[str]:
    """Ids of the runs in a folder, in no order; none where it is not there yet. UsageError or RunError where it
    cannot be listed."""
    require_folder(root)
    try:
        return [entry.name for entry in os.scandir(root) if os.path.lexists(os.path.join(entry.path, "run.json"))]
    except FileNotFoundError:
        return []      # nothing was launched yet
    except OSError as error:
        raise RunError(f"the runs in {root} cannot be listed: {error.strerror}; set DPLAB_RUNS to a folder of "
                       f"yours") from error
