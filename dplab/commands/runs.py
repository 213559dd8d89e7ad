"""`runs`, `attach`, `trace`: what there is, what goes on in it, and its time line for Perfetto."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dplab.commands.base import Answer, Verbs, verb
from dplab.commands.measure import figures, progress
from dplab.commands.train import TICK_SECONDS, ProgressLine
from dplab.errors import RankFailed, RunError
from dplab.telemetry.rundir import ENDED
from dplab.telemetry.summary import Summary

if TYPE_CHECKING:
    from dplab.launcher.run import Run


def add(verbs: Verbs) -> None:
    """Declares the verbs."""
    verb(verbs, "runs", runs, about="list the runs of this user, newest first", example="dplab runs")
    parser = verb(verbs, "attach", attach, about="follow a run until it ends; Ctrl-C lets go of it",
                  example="dplab attach RUN --stop")
    parser.add_argument("run_id", metavar="RUN", help="a run's id or directory")
    parser.add_argument("--stop", action="store_true", help="ask the run to end, and wait for that")
    parser = verb(verbs, "trace", trace, about="write a run's time line for ui.perfetto.dev",
                  example="dplab trace RUN -o trace.json")
    parser.add_argument("run_id", metavar="RUN", help="a run's id or directory")
    parser.add_argument("-o", "--output", type=Path, default=Path("trace.json"), metavar="FILE",
                        help="where to write (default: trace.json)")


def runs(args: argparse.Namespace) -> Answer:
    """All runs below the root."""
    from dplab.launcher.run import runs as found

    rows = [_row(run) for run in found()]
    if not rows:
        return Answer({"runs": []}, "no runs yet; dplab train or dplab.launch makes one")
    columns = ("id", "state", "strategy", "world_size", "function", "label")
    texts = [columns, *(tuple(str("-" if row[name] is None else row[name]) for name in columns) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in texts]
    return Answer({"runs": rows}, "\n".join(lines))


def attach(args: argparse.Namespace) -> Answer:
    """Progress of a run from its directory; the run's own figures at its end."""
    from dplab.launcher.run import attach as attached

    run = attached(args.run_id)
    if args.stop:
        run.stop()
    reader, summary, line = run.reader(), Summary(), ProgressLine()
    while True:
        ended = run.state in ENDED      # asked before reading, so that the last events are read
        summary.feed(reader.poll())
        line.show(progress(summary))
        if ended:
            break
        with contextlib.suppress(TimeoutError, RankFailed, RunError):      # told below, by state and reason
            run.wait(timeout=TICK_SECONDS)
    line.end()
    data = {**_row(run), "failure": run.failure, "steps": summary.steps, "loss_last": summary.loss,
            **figures(summary)}
    text = f"run {run.id} {run.state}" + (f": {run.failure}" if run.failure else "")
    return Answer(data, text, status=int(run.state == "failed"))


def trace(args: argparse.Namespace) -> Answer:
    """Chrome's trace format, which Perfetto opens."""
    from dplab.launcher.run import attach as attached
    from dplab.telemetry.trace import export

    run = attached(args.run_id)
    path = export(run.path, args.output)
    return Answer({"id": run.id, "file": str(path)}, f"{path} is written; open it in ui.perfetto.dev")


def _row(run: Run) -> dict[str, Any]:
    spec = run.spec
    return {"id": run.id, "state": run.state, "strategy": spec.strategy, "world_size": spec.world_size,
            "function": spec.function, "label": spec.label, "run_dir": str(run.path)}
