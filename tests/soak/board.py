"""Two boards on a page for minutes, over eight ranks at 50 steps a second: `python -m tests.soak.board [--minutes 10]`.

A writer plays the run. JupyterLab opens a notebook with two boards on it; every few seconds are noted: redraws and lag
of each board and how long the kernel takes to answer a cell (by the page itself), memory of server, kernel and each
kind of the browser's processes, bytes on disk; and, garbage collected first so that what is left is held, the page's
heap, nodes and listeners and the browser's memory (without that it is mostly how lazily Chromium collects).
Playwright looks in for moments only: while it is attached, the page's process keeps what comes over the websocket (two
boards, 6 MB a minute, and none without it).
For the last fifth the tab is closed, which must not make anything grow either. The result is `board.json` beside this
file: medians, and how fast each size grows (MB a minute, a line through the second half of each phase).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import psutil

from tests.browser.lab import CHROMIUM, FLAGS, REPOSITORY, Lab, command, free_port, open_notebook
from tests.soak.writer import RANKS, RATE

RESULT = Path(__file__).with_suffix(".json")
_EVERY = 5.0
_COUNTED = 6
"""Garbage is collected, and what is left is counted, at one sample in so many: a collection is a pause of its own."""
_NOTE = """every => {
  const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
  const boards = () => [...document.querySelectorAll('.dplab-board')].map(board => ({...board.dataset}));
  window.noted = [];
  setInterval(async () => {
    const at = Date.now() / 1000, shown = boards(), began = performance.now();
    await kernel.requestExecute({code: "sum(range(1000))", store_history: false}).done;
    window.noted.push({at, boards: shown, kernel_ms: performance.now() - began});
  }, 1000 * every);
}"""
"""The page notes how its boards go, and for how long the kernel lets it wait."""
_TAKE = "() => window.noted.splice(0)"
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
        lab, browser = Lab(root, Path(folder) / "scratch"), Chromium(Path(folder) / "profile")
        try:
            with browser.page() as page:
                open_notebook(page, lab, "soak.ipynb")
                command(page, "notebook:run-all-cells")
                page.wait_for_function(_BOTH_MOVE, timeout=120_000)
                page.evaluate(_NOTE, _EVERY)
            watched = _watch(browser, lab, run, seconds=0.8 * seconds)
            with browser.page() as page:
                page.screenshot(path=str(RESULT.with_suffix(".png")))
            browser.close()
            closed = _watch(None, lab, run, seconds=0.2 * seconds)
        finally:
            browser.close()
            lab.close()
            writer.terminate()
            writer.wait()
    return {"minutes": minutes, "ranks": RANKS, "steps_a_second": RATE, "boards": 2, "cores": os.cpu_count(),
            "load_before": _LOAD, "python": platform.python_version(), "date": time.strftime("%Y-%m-%d"),
            "watched": _told(watched), "closed": _told(closed), "samples": watched + closed}


_LOAD = os.getloadavg()[0]


class Chromium:
    """A browser of its own, on whose page Playwright looks for moments."""

    def __init__(self, profile: Path) -> None:
        self._port = free_port()
        self.process = subprocess.Popen(
            [str(CHROMIUM), "--headless=new", f"--remote-debugging-port={self._port}", f"--user-data-dir={profile}",
             "--window-size=1400,3000", *FLAGS, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    @contextlib.contextmanager
    def page(self) -> Iterator[Any]:
        """Its page, until the block ends."""
        from playwright.sync_api import sync_playwright

        limit = time.monotonic() + 30
        while self.process.poll() is None and not listens(self._port):
            assert time.monotonic() < limit, "Chromium did not answer within 30 s"
            time.sleep(0.1)
        with sync_playwright() as playwright:
            yield playwright.chromium.connect_over_cdp(f"http://127.0.0.1:{self._port}").contexts[0].pages[0]

    def close(self) -> None:
        """Ends it."""
        self.process.terminate()
        self.process.wait()


def listens(port: int) -> bool:
    """Whether somebody answers at that port of this machine."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _watch(browser: Chromium | None, lab: Lab, run: Path, *, seconds: float) -> list[dict[str, Any]]:
    """What was noted in so many seconds, in the order in which it was; without a browser of the others alone."""
    samples: list[dict[str, Any]] = []
    began, wall = time.monotonic(), time.time()
    while time.monotonic() - began < seconds:
        moment = time.monotonic()
        disk = sum(file.stat().st_size for file in run.rglob("*") if file.is_file())
        sample: dict[str, Any] = {"at": round(moment - began, 1), "disk_mb": round(disk / 1e6, 1),
                                  **_memory(lab, browser)}
        if browser is not None and len(samples) % _COUNTED == 0:
            sample |= _held(browser, lab)
        samples.append(sample)
        time.sleep(max(0.0, _EVERY - (time.monotonic() - moment)))
    if browser is not None:
        with browser.page() as page:
            samples += _noted(page.evaluate(_TAKE), wall)
    return sorted(samples, key=lambda sample: float(sample["at"]))


def _noted(notes: list[dict[str, Any]], wall: float) -> list[dict[str, Any]]:
    """The page's own notes: a row each. `wall`: when the watch began, in seconds since the epoch."""
    rows: list[dict[str, Any]] = []
    for before, note in zip([None, *notes[:-1]], notes, strict=True):
        boards = note["boards"]
        row = {"at": round(note["at"] - wall, 1), "kernel_ms": round(note["kernel_ms"], 1),
               "lag_ms": [int(board["lagMs"]) for board in boards],
               "draw_ms": [float(board["drawMs"]) for board in boards],
               "step": [int(board["step"] or 0) for board in boards]}
        if before is not None:
            row["redraws_a_second"] = [
                round((int(now["redraws"]) - int(then["redraws"])) / (note["at"] - before["at"]), 2)
                for now, then in zip(boards, before["boards"], strict=True)]
        rows.append(row)
    return rows


def _held(browser: Chromium, lab: Lab) -> dict[str, float]:
    """What Chromium counts in the page, and its memory, after a collection of garbage."""
    with browser.page() as page:
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable")
        session.send("HeapProfiler.collectGarbage")
        told = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
    counts = {ours: round(told[name] / 1e6, 1) if ours.endswith("_mb") else int(told[name])
              for name, ours in _METRICS.items()}
    time.sleep(1)      # the pages that are free now go back to the system after a moment
    return {**counts, "browser_held_mb": _memory(lab, browser)["browser_mb"]}


def _memory(lab: Lab, browser: Chromium | None) -> dict[str, float]:
    """MB (PSS: shared pages counted once over all who share them) of the server, of its kernel, and of each kind of
    the browser's processes."""
    server = psutil.Process(lab._server.pid)
    kernels = [child for child in server.children(recursive=True) if "ipykernel" in " ".join(child.cmdline())]
    told: dict[str, list[psutil.Process]] = {"server_mb": [server], "kernel_mb": kernels}
    main = [] if browser is None else [psutil.Process(browser.process.pid)]
    for one in [*main, *(child for process in main for child in process.children(recursive=True))]:
        kinds = [word.removeprefix("--type=") for word in one.cmdline() if word.startswith("--type=")]
        told.setdefault(f"browser_{(kinds or ['main'])[0]}_mb", []).append(one)
    sizes = {name: round(sum(_pss(process) for process in processes) / 1e6, 1) for name, processes in told.items()}
    if browser is not None:
        sizes["browser_mb"] = round(sum(size for name, size in sizes.items() if name.startswith("browser")), 1)
    return sizes


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
