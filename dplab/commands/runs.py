"""`runs`, `attach`, `trace`, `export`: what there is, what goes on in it, and what can be taken out of it."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dplab.commands.base import Answer, Verbs, verb
from dplab.commands.measure import figures, progress
from dplab.commands.train import TICK_SECONDS, ProgressLine
from dplab.errors import RankFailed, RunError, UsageError
from dplab.telemetry.rundir import DAMAGED, ENDED, runs_root
from dplab.telemetry.summary import Summary

if TYPE_CHECKING:
    from dplab.launcher.run import Run


def add(verbs: Verbs) -> None:
    """Declares the verbs."""
    parser = verb(verbs, "runs", runs, about="list the runs of this user, newest first, or tell one run's figures",
                  example="dplab runs RUN --csv > steps.csv")
    parser.add_argument("run_id", nargs="?", metavar="RUN",
                        help="a run's id, the beginning of one, or a directory (default: all runs)")
    parser.add_argument("--csv", action="store_true", help="a line for each step of each rank of RUN")
    parser = verb(verbs, "export", export, about="write a run's figures, steps, time line and pictures into a folder",
                  example="dplab export RUN -o folder --formats json,csv,html")
    parser.add_argument("run_id", metavar="RUN", help="a run's id, the beginning of one, or a directory")
    parser.add_argument("-o", "--output", type=Path, default=Path("export"), metavar="FOLDER",
                        help="where to write (default: export)")
    parser.add_argument("--formats", help="some of json, csv, trace, svg, html, png (default: all but png, which needs "
                                          "kaleido)")
    parser = verb(verbs, "attach", attach, about="follow a run until it ends; Ctrl-C lets go of it",
                  example="dplab attach RUN --stop")
    parser.add_argument("run_id", metavar="RUN", help="a run's id, the beginning of one, or a directory")
    parser.add_argument("--stop", action="store_true", help="ask the run to end, and wait for that")
    parser.add_argument("--pause", action="store_true", help="make its ranks wait at the end of a step")
    parser.add_argument("--resume", action="store_true", help="let a paused run go on, and follow it")
    parser = verb(verbs, "trace", trace, about="write a run's time line for ui.perfetto.dev",
                  example="dplab trace RUN -o trace.json")
    parser.add_argument("run_id", metavar="RUN", help="a run's id, the beginning of one, or a directory")
    parser.add_argument("-o", "--output", type=Path, default=Path("trace.json"), metavar="FILE",
                        help="where to write (default: trace.json)")


def runs(args: argparse.Namespace) -> Answer:
    """All runs below the root, damaged ones marked; or one."""
    from dplab.launcher.run import runs as found

    if args.run_id is not None:
        return _one(args)
    if args.csv:
        raise UsageError("runs --csv is a line for each step of one run; name it: dplab runs RUN --csv")
    rows = [_row(run) for run in found()]
    if not rows:
        return Answer({"runs": []}, f"no runs in {runs_root()} yet; dplab train or dplab.launch makes one")
    head = ("id", "started", "state", "step", "strategy", "ranks", "function", "label")
    lines = [head, *(tuple("-" if value is None else _in_one_line(str(value)) for value in (
        row["id"], row["started"] and row["started"][:19].replace("T", " "), row["state"], row["step"],
        row["strategy"], row["world_size"], row["function"], row["label"])) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    texts += [f"{row['id']} is damaged: {row['failure']}" for row in rows if row["state"] == DAMAGED]
    return Answer({"runs": rows}, "\n".join(texts))


def _one(args: argparse.Namespace) -> Answer:
    from dplab.launcher.run import attach as attached
    from dplab.views.table import to_csv

    run = attached(args.run_id)
    if args.csv and args.json:
        raise UsageError("runs --csv --json: standard output holds one of them; leave one out")
    if args.csv:
        return Answer({}, to_csv(run.table()).rstrip("\n"))
    told = run.summary()
    return Answer(told, "\n".join(f"{name:16}{'-' if value in (None, [], {}) else value}"
                                  for name, value in told.items()))


def export(args: argparse.Namespace) -> Answer:
    """A folder of files that need no dplab."""
    from dplab.launcher.run import attach as attached

    run = attached(args.run_id)
    chosen = {} if args.formats is None else {"formats": [name.strip() for name in args.formats.split(",")]}
    written = [str(path) for path in run.export(args.output, **chosen)]
    return Answer({"id": run.id, "files": written}, "\n".join(written))


def _in_one_line(text: str) -> str:
    """Without what would move the cursor."""
    return "".join(character if character.isprintable() else "?" for character in text)


def attach(args: argparse.Namespace) -> Answer:
    """Progress of a run from its directory; the run's own figures at its end."""
    from dplab.launcher.run import attach as attached

    run = attached(args.run_id)
    if args.stop + args.pause + args.resume > 1:
        raise UsageError("attach takes one of --stop, --pause and --resume")
    if args.pause:
        state = run.pause()
        steps = run.steps or 0
        return Answer({"id": run.id, "state": state, "steps": steps}, f"run {run.id} {state} after {steps} steps")
    if args.resume:
        run.resume()
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
    row = {key: value for key, value in _row(run).items() if key != "step"}
    data = {**row, "stopped_by": run.stopped_by, "steps": summary.steps, "loss_last": summary.loss,
            **figures(summary)}
    if data["state"] == DAMAGED:
        raise RunError(data["failure"])
    reason = data["failure"] or data["stopped_by"]
    text = f"run {run.id} {data['state']}" + (f": {reason}" if reason else "")
    return Answer(data, text, status=int(data["state"] == "failed"))


def trace(args: argparse.Namespace) -> Answer:
    """Chrome's trace format, which Perfetto opens."""
    from dplab.launcher.run import attach as attached
    from dplab.telemetry.trace import export

    run = attached(args.run_id)
    path = export(run.path, args.output)
    return Answer({"id": run.id, "file": str(path)}, f"{path} is written; open it in ui.perfetto.dev")


def _row(run: Run) -> dict[str, Any]:
    """A run in plain values; of a damaged one what can be told."""
    row: dict[str, Any] = dict.fromkeys(("strategy", "world_size", "function", "label", "started", "step"))
    state = run.state
    with contextlib.suppress(RunError):      # `failure` says it
        spec = run.spec
        row |= {"strategy": spec.strategy, "world_size": spec.world_size, "function": spec.function,
                "label": spec.label, "started": run.started.isoformat(timespec="seconds")}
        row["step"] = run.steps
    return {"id": run.id, "state": state, **row, "failure": run.failure, "run_dir": str(run.path)}
