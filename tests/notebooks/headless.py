"""Runs a notebook as CI does: under nbval, with its small parameters, against what is stored."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil


def run_headless(path: Path, scratch: Path) -> subprocess.CompletedProcess[str]:
    """Runs it in the folder `scratch`, its runs in `scratch/runs`; pytest's status and words."""
    environment = {**os.environ, "CI": "true", "DPLAB_RUNS": str(scratch / "runs")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--nbval", "--nbval-current-env", "--nbval-cell-timeout=90",
         "-o", "addopts=", "-p", "no:cacheprovider", str(path)],
        env=environment, cwd=scratch, capture_output=True, text=True, timeout=240, check=False)


def processes_of(runs: Path) -> list[psutil.Process]:
    """Processes whose environment names this folder of runs."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("DPLAB_RUNS") == str(runs) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found
