"""Two boards on a page for minutes, over eight ranks at 50 steps a second: `python -m tests.soak.board [--minutes 10]`.

A writer plays the run. JupyterLab opens a notebook with two boards on it; every few seconds are noted: redraws and lag
of each board, how long the kernel takes to answer a cell, memory of server, kernel and each kind of the browser's
processes, bytes on disk; and, garbage collected first so that what is left is held, the page's heap, nodes and
listeners and the browser's memory (without that it is mostly how lazily Chromium collects).
For the last fifth the tab is closed, which must not make anything grow either. The result is `board.json` beside this
file: medians, and how fast each size grows (MB a minute, a line through the second half of each phase).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import psutil

from tests.browser.lab import REPOSITORY, Lab, browser_page, command, open_notebook
from tests.soak.writer import RANKS, RATE

RESULT = Path(__file__).with_suffix(".json")
_EVERY = 5.0
_COUNTED = 6
"""Garbage is collected, and what is left is counted, at one sample in so many: a collection is a pause of its own."""
_ASK = """async () => {
  const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel, began = performance.now();
  await kernel.requestExecute({code: "sum(range(1000))", store_history: false}).done;
  return performance.now() - began;
}"""
_BOARDS = """() => [...document.querySelectorAll('.dplab-board')].map(board => ({...board.dataset}))"""
_BOTH_MOVE = """() => { const boards = [...document.querySelectorAll('.dplab-board')];
  return boards.length === 2 && boards.every(board => Number(board.dataset.step) >= 20); }"""
_METRICS = {"JSHeapUsedSize": "heap_mb", "Nodes": "nodes", "JSEventListeners": "listeners"}
"""What Chromium counts in a page, by our names."""
_GROW = ("server_mb", "kernel_mb", "browser_mb", "browser_held_mb", "heap_mb", "nodes", "listeners", "disk_mb")


def soak(minutes: float) -> dict[str, Any]:
    """Runs it and returns the result."""
    seconds = 60 * minutes
    with tempfile.TemporaryDirectory() as folder:
        root, run = Path(folder) / "notebooks", Path(folder) / "runs" / "soak"
        root.mkdir()
        cells = [f"import dplab\nrun = dplab.attach({str(run)!r})", "run.dashboard(hz=4)", "run.dashboard(hz=2)"]
        nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells], metadata={
            "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}), root / "soak.ipynb")
        writer = subprocess.Popen([sys.executable, "-m", "tests.soak.writer", str(run), str(seconds + 60)],
                                  cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
        lab = Lab(root, Path(folder) / "scratch")
        try:
            with browser_page(width=1400, height=2900) as page:
                open_notebook(page, lab, "soak.ipynb")
                command(page, "notebook:run-all-cells")
                page.wait_for_function(_BOTH_MOVE, timeout=120_000)
                watched = _watch(page, lab, run, seconds=0.8 * seconds)
                page.screenshot(path=str(RESULT.with_suffix(".png")))
            closed = _watch(None, lab, run, seconds=0.2 * seconds)
        finally:
            lab.close()
            writer.terminate()
            writer.wait()
    return {"minutes": minutes, "ranks": RANKS, "steps_a_second": RATE, "boards": 2, "cores": os.cpu_count(),
            "load_before": _LOAD, "python": platform.python_version(), "date": time.strftime("%Y-%m-%d"),
            "watched": _told(watched), "closed": _told(closed), "samples": watched + closed}


_LOAD = os.getloadavg()[0]


def _watch(page: Any, lab: Lab, run: Path, *, seconds: float) -> list[dict[str, Any]]:
    samples: list[dict[str, Any]] = []
    began, before = time.monotonic(), None
    counts = _counts(page) if page is not None else dict
    while time.monotonic() - began < seconds:
        moment = time.monotonic()
        disk = sum(file.stat().st_size for file in run.rglob("*") if file.is_file())
        sample: dict[str, Any] = {"at": round(moment - began, 1), **_memory(lab), "disk_mb": round(disk / 1e6, 1)}
        if page is not None:
            boards = page.evaluate(_BOARDS)
            sample |= {"kernel_ms": round(page.evaluate(_ASK), 1), "lag_ms": [int(board["lagMs"]) for board in boards],
                       "draw_ms": [float(board["drawMs"]) for board in boards],
                       "step": [int(board["step"] or 0) for board in boards]}
            if len(samples) % _COUNTED == 0:
                sample |= counts()
                time.sleep(1)      # the pages that are free now go back to the system after a moment
                sample["browser_held_mb"] = _memory(lab)["browser_mb"]
            redraws = [int(board["redraws"]) for board in boards]
            if before is not None:
                sample["redraws_a_second"] = [round((now - then) / (moment - before[0]), 2)
                                              for now, then in zip(redraws, before[1], strict=True)]
            before = moment, redraws
        samples.append(sample)
        time.sleep(max(0.0, _EVERY - (time.monotonic() - moment)))
    return samples


def _counts(page: Any) -> Callable[[], dict[str, float]]:
    """Asks Chromium what the page holds, after a collection of garbage."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")

    def counts() -> dict[str, float]:
        session.send("HeapProfiler.collectGarbage")
        told = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
        return {ours: round(told[name] / 1e6, 1) if ours.endswith("_mb") else int(told[name])
                for name, ours in _METRICS.items()}

    return counts


def _memory(lab: Lab) -> dict[str, float]:
    """MB (PSS: shared pages counted once over all who share them) of the server, of its kernel, and of each kind of
    the browser's processes."""
    server = psutil.Process(lab._server.pid)
    kernels = [child for child in server.children(recursive=True) if "ipykernel" in " ".join(child.cmdline())]
    told: dict[str, list[psutil.Process]] = {"server_mb": [server], "kernel_mb": kernels}
    for child in psutil.Process().children(recursive=True):
        if "chrom" in child.name():
            kinds = [word.removeprefix("--type=") for word in child.cmdline() if word.startswith("--type=")]
            told.setdefault(f"browser_{(kinds or ['main'])[0]}_mb", []).append(child)
    sizes = {name: round(sum(_pss(process) for process in processes) / 1e6, 1) for name, processes in told.items()}
    return {**sizes, "browser_mb": round(sum(size for name, size in sizes.items() if name.startswith("browser")), 1)}


def _pss(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.NoSuchProcess:      # ended since it was listed
        return 0


def _told(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Of what must not grow the medians of both halves, and the growth a minute within the second; median and worst of
    the rest."""
    told: dict[str, Any] = {}
    for name in _GROW:
        rows = [(sample["at"] / 60, sample[name]) for sample in samples if name in sample]
        if len(rows) > 1:
            minutes, values = zip(*rows, strict=True)
            half = len(rows) // 2
            told[name] = {"first_half": statistics.median(values[:half]),
                          "second_half": statistics.median(values[half:])}
            if len(rows) - half > 2:
                slope = statistics.linear_regression(minutes[half:], values[half:]).slope
                told[name]["growth_a_minute"] = round(slope, 2)
    for name in ("kernel_ms", "lag_ms", "draw_ms", "redraws_a_second"):
        # a column a board, where there is one a board
        columns = list(zip(*[sample[name] if isinstance(sample[name], list) else [sample[name]] for sample in samples
                             if name in sample], strict=True))
        worst = min if name == "redraws_a_second" else max
        if columns:
            told[name] = {"median": [statistics.median(column) for column in columns],
                          "worst": [worst(column) for column in columns]}
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    arguments = parser.parse_args()
    result = soak(arguments.minutes)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: value for name, value in result.items() if name != "samples"}, indent=1))


if __name__ == "__main__":
    main()
