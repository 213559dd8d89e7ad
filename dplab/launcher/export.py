"""What a run leaves behind outside of dplab: its figures as JSON, its steps as CSV or a pandas frame, its pictures."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dplab.errors import RunError, UsageError
from dplab.launcher.watch import Watch
from dplab.telemetry.trace import export as export_trace
from dplab.telemetry.trace import finite
from dplab.views.svg import svg
from dplab.views.table import table, to_csv

if TYPE_CHECKING:
    from dplab.launcher.run import Run

FORMATS = ("json", "csv", "trace", "svg", "html", "png")


def summary(run: Run) -> dict[str, Any]:
    """The run in plain values: what was asked for, how far it came, and the figures that `dplab train` reports."""
    return _summary(run, table(run.events()))


def _summary(run: Run, rows: list[dict[str, Any]]) -> dict[str, Any]:
    spec, folded = run.spec, run._fold()
    first = [row["loss"] for row in rows if row["step"] == rows[0]["step"] and row["loss"] is not None]
    return {
        "id": run.id, "state": run.state, "failure": run.failure, "started": run.started.isoformat(timespec="seconds"),
        "function": spec.function, "strategy": spec.strategy, "world_size": spec.world_size, "backend": spec.backend,
        "label": spec.label, "steps": folded.steps, "loss_first": sum(first) / len(first) if first else None,
        "loss_last": folded.loss, "tokens_per_s": folded.tokens_per_s,
        "unit": folded.unit if folded.tokens_per_s is not None else None, "step_ms_median": folded.step_ms,
        "sync_ms_median": folded.sync_ms,
        "peak_bytes": [folded.peak_private[rank] for rank in sorted(folded.peak_private)],
        "memory": folded.memory.get(0, {}), "wire": folded.wire, "run_dir": str(run.path)}


def frame(run: Run) -> Any:
    """The table as a pandas frame. UsageError where pandas is not installed."""
    try:
        pandas = importlib.import_module("pandas")
    except ImportError as error:
        raise UsageError("run.frame() needs pandas, which is not installed; pip install pandas, or take run.table(), "
                         "the same rows as plain dicts") from error
    return pandas.DataFrame(table(run.events()))


def export(run: Run, folder: str | os.PathLike[str], formats: Sequence[str]) -> list[Path]:
    """Writes the run into a folder, which is made; returns what was written. UsageError for a format that is not known
    or needs what is not installed, RunError where something cannot be written."""
    if isinstance(formats, str) or not all(name in FORMATS for name in formats):
        raise UsageError(f"export(formats={formats!r}) is not allowed; give some of {', '.join(FORMATS)}")
    if "png" in formats:
        _require_kaleido()
    target, read = Path(folder), _Read(run)
    try:
        target.mkdir(parents=True, exist_ok=True)
        # a trace last: a run without events has none, and all the rest
        return [path for name in sorted(formats, key="trace".__eq__) for path in _WRITERS[name](read, target)]
    except OSError as error:
        raise RunError(f"run {run.id} cannot be exported to {target}: {error.strerror}; give another folder") from error


class _Read:
    """A run, read once for all formats that want the same of it."""

    def __init__(self, run: Run) -> None:
        self.run = run

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        return table(self.run.events())

    @cached_property
    def watch(self) -> Watch:
        watch = Watch(self.run)
        watch.read()
        return watch


def _json(read: _Read, folder: Path) -> list[Path]:
    path = folder / "summary.json"
    told = finite(_summary(read.run, read.rows))
    path.write_text(json.dumps(told, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return [path]


def _csv(read: _Read, folder: Path) -> list[Path]:
    path = folder / "steps.csv"
    path.write_text(to_csv(read.rows), encoding="utf-8")
    return [path]


def _trace(read: _Read, folder: Path) -> list[Path]:
    return [export_trace(read.run.path, folder / "trace.json")]


def _svg(read: _Read, folder: Path) -> list[Path]:
    """The whole board, and every chart by itself; drawn here, without a browser."""
    watch, written = read.watch, [folder / "board.svg"]
    written[0].write_text(watch.svg(), encoding="utf-8")
    for chart in watch.fold.charts():
        written.append(folder / f"{chart.key}.svg")
        written[-1].write_text(svg([chart], columns=1), encoding="utf-8")
    return written


def _html(read: _Read, folder: Path) -> list[Path]:
    """Every chart as a page; plotly's script lies beside them once, so that they open without a network."""
    written = []
    for key, figure in _figures(read.watch).items():
        written.append(folder / f"{key}.html")
        figure.write_html(written[-1], include_plotlyjs="directory")
    return written


def _png(read: _Read, folder: Path) -> list[Path]:
    written = []
    for key, figure in _figures(read.watch).items():
        written.append(folder / f"{key}.png")
        figure.update_layout(paper_bgcolor="white")
        try:
            figure.write_image(written[-1], width=900, height=480)
        except (RuntimeError, ValueError) as error:      # kaleido's own: no browser, or one that does not start
            raise RunError(f"PNG pictures need a browser, and kaleido says: {str(error).strip().splitlines()[0]}; "
                           f"install chromium, or take 'svg' or 'html'") from error
    return written


def _figures(watch: Watch) -> dict[str, Any]:
    try:
        from dplab.views.figures import figure
    except ModuleNotFoundError as error:
        raise UsageError(f"figures need {error.name}, which is not installed; install dplab's extra 'lab' "
                         f"(pip install 'dplab[lab]'), or take 'svg', which is drawn without it") from error
    return {chart.key: figure(chart) for chart in watch.fold.charts()}


def _require_kaleido() -> None:
    if importlib.util.find_spec("kaleido") is None:
        raise UsageError("PNG pictures need kaleido, which is not installed; pip install kaleido (it draws with a "
                         "Chromium that is installed), or take 'svg' or 'html'")


_WRITERS = {"json": _json, "csv": _csv, "trace": _trace, "svg": _svg, "html": _html, "png": _png}
