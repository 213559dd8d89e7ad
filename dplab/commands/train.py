"""`train`: one run, watched from the terminal."""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dplab.commands.base import Answer, Verbs, count, learning_rate, seed, strategy_name, verb, whole_number
from dplab.commands.links import emulated, link_arguments, settle
from dplab.commands.measure import figures, progress
from dplab.errors import RankFailed, RunError, RunFailed, UsageError
from dplab.telemetry.summary import Summary
from dplab.workloads.catalog import CATALOG, OPTIMIZERS, optimizer_class, workload

if TYPE_CHECKING:
    from dplab.launcher.run import Run

TICK_SECONDS = 0.25
_NOTES = """In the JSON, wire counts the whole run by collective: count, bytes sent by rank 0 in training steps, and
modelled, which is true where the bytes are those of the backend's documented algorithm and not counted as they leave;
init, control and check are what does not belong to a step. memory is rank 0's, in bytes by category; peak_bytes each
process's own pages at their most. Ctrl-C stops the run and tells how far it came; its directory stays."""


def add(verbs: Verbs) -> None:
    """Declares the verb."""
    parser = verb(verbs, "train", train, about="train a small model on real text and report what it cost",
                  example="dplab train --strategy zero2 --world-size 2 --steps 20 --json", notes=_NOTES)
    parser.add_argument("--strategy", default="ddp", help="such as zero2 or zero3+accum4 (default: ddp)")
    parser.add_argument("--steps", type=whole_number, default=100, help="optimizer steps (default: 100)")
    workload_arguments(parser)
    parser.add_argument("--label", help="a name for the run, shown by dplab runs")
    parser.add_argument("--checkpoint-every", type=whole_number, metavar="K", help="save all state after every K steps")
    parser.add_argument("--max-restarts", type=whole_number, metavar="N", help="go on from the last checkpoint after a "
                        "failure, N times at most")
    parser.add_argument("--min-ranks", type=whole_number, metavar="M", help="restart without ranks that died, while M "
                        "are left (default: with as many as before)")


def workload_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that `train` and `compare` share."""
    parser.add_argument("--world-size", type=whole_number, metavar="N", help="ranks (default: as many as the topology "
                        "has, else 2)")
    link_arguments(parser)
    about = "; ".join(f"{name}: {entry.about}" + (" (needs the extra: pip install 'dplab[images]')" * (
        entry.data == "images")) for name, entry in CATALOG.items())
    parser.add_argument("--model", default="tiny-gpt", help=f"{about} (default: tiny-gpt)")
    parser.add_argument("--data", metavar="PATH", help="a file or a folder of text (default: the standard library's "
                        "own source; image models: digits)")
    parser.add_argument("--batch-size", type=whole_number, default=8, metavar="B",
                        help="samples a rank and micro-batch (default: 8)")
    parser.add_argument("--lr", type=learning_rate, default=1e-3, help="learning rate (default: 1e-3)")
    parser.add_argument("--optimizer", default="adamw", help=f"{', '.join(OPTIMIZERS)} (default: adamw)")
    parser.add_argument("--seed", type=seed, default=0, help="of weights and order of samples (default: 0)")
    parser.add_argument("--threads", type=whole_number, metavar="T", help="a rank computes on, as OMP_NUM_THREADS says "
                        "(default: that, else 1, as torchrun's)")
    parser.add_argument("--backend", choices=("gloo", "nccl", "shm"),
                        help="gloo, nccl or shm (default: what the machine has)")


def checked_workload(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of the program; UsageError before anything starts where they are wrong."""
    from dplab.workloads import corpora

    entry = workload(args.model)
    optimizer_class(args.optimizer)
    _check_ranks(args)
    if entry.data == "images":
        corpora.require_digits(args.data)
    elif args.data is not None:
        corpus = corpora.load(args.data)
        samples, needed = max(len(corpus) - 1, 0) // corpora.SEQUENCE, args.world_size * args.batch_size
        if samples < needed:
            raise UsageError(f"{corpus.name} has {count(samples, 'sample')} of {corpora.SEQUENCE} bytes, and "
                             f"--world-size {args.world_size} x --batch-size {args.batch_size} need {needed}; use a "
                             f"smaller batch, fewer ranks or more text")
    return {"model": args.model, "data": args.data, "batch_size": args.batch_size, "lr": args.lr, "seed": args.seed,
            "optimizer": args.optimizer}


def _check_ranks(args: argparse.Namespace) -> None:
    from dplab.launcher.launch import too_many

    if (reason := too_many(args.world_size)) is not None:
        raise UsageError(f"--world-size {args.world_size} is not allowed; {reason}")
    if args.backend == "nccl":
        import torch

        gpus = torch.cuda.device_count()
        if gpus < args.world_size:
            raise UsageError(f"--backend nccl needs one GPU a rank, and torch finds {count(gpus, 'GPU')} for "
                             f"{count(args.world_size, 'rank')}; use --backend gloo, or fewer ranks")


def threads_of(args: argparse.Namespace) -> int | None:
    """Threads a rank: one where nobody says otherwise, so that runs of one rank and of several compare."""
    if args.threads is None and not os.environ.get("OMP_NUM_THREADS"):
        return 1
    return int(args.threads) if args.threads is not None else None


def train(args: argparse.Namespace) -> Answer:
    """Launches, shows progress, reports."""
    (args.strategy,) = settle(args, [strategy_name(args.strategy)])
    kwargs = {**checked_workload(args), "steps": args.steps, "checkpoint_every": args.checkpoint_every}
    if args.min_ranks is not None and args.max_restarts is None:
        raise UsageError("--min-ranks says how a run restarts; give --max-restarts too")

    from dplab.launcher.launch import launch

    run = launch("dplab.workloads.train:train", world_size=args.world_size, strategy=args.strategy,
                 backend=args.backend, kwargs=kwargs, detach=False, label=args.label, threads=threads_of(args),
                 max_restarts=args.max_restarts or 0, min_ranks=args.min_ranks)
    print(f"run {run.path}", file=sys.stderr)
    results, summary = watch(run, args.steps)
    data = {"strategy": args.strategy, **emulated(args.strategy), "world_size": args.world_size,
            "backend": results[0]["backend"], "steps": results[0]["steps"], **mean_losses(results), **figures(summary),
            "memory": results[0]["memory"], "wire": results[0]["wire"], "recomputed": results[0]["recomputed"],
            "restarts": [asdict(restart) for restart in run.restarts], "run_dir": str(run.path)}
    return Answer(data, _text(data, summary.unit))


def watch(run: Run, steps: int) -> tuple[list[dict[str, Any]], Summary]:
    """Prints progress until the run ends; results of the ranks and the figures. Ctrl-C ends the run first."""
    reader, summary = run.reader(), Summary()
    line = ProgressLine()
    try:
        while True:
            try:
                results = run.wait(timeout=TICK_SECONDS)
                break
            except TimeoutError:
                summary.feed(reader.poll())
                line.show(progress(summary, steps))
    except KeyboardInterrupt:
        line.end()
        print("stopping the run ...", file=sys.stderr)
        run.stop()
        summary.feed(reader.poll())
        print(f"run {run.id} was stopped: {progress(summary, steps)}; what it recorded stays in {run.path}",
              file=sys.stderr)
        raise
    except RankFailed as error:
        line.end()
        raise usage_error_of(error) or error from None
    except RunFailed:
        line.end()
        raise
    except RunError as error:      # under our eyes: its directory was removed, the disk went away
        line.end()
        raise RunFailed(f"run {run.id} cannot be followed any more: {error}") from error
    summary.feed(reader.poll())
    line.show(progress(summary, steps))
    line.end()
    if None in results:
        raise RunFailed(f"run {run.id} was stopped after {summary.steps} of {steps} steps; "
                        f"what it recorded is in {run.path}")
    return results, summary


_OPTIONS = ((r"\bbackend='(\w+)'", r"--backend \1"), (r"\bbackend '(\w+)'", r"--backend \1"),
            (r"\bbatch_size[ =](\d+)", r"--batch-size \1"), (r"(\d+) ranks? x ", r"--world-size \1 x "))
"""What a rank says in Python's words, as the command line's options."""


def usage_error_of(error: RankFailed) -> UsageError | None:
    """The sentence that a rank refused its input with, where that is why it failed."""
    last = error.traceback.strip().rsplit("\n", 1)[-1]
    name, _, sentence = last.partition(": ")
    if name.rsplit(".", 1)[-1] != "UsageError" or not sentence:
        return None
    for python, option in _OPTIONS:
        sentence = re.sub(python, option, sentence)
    return UsageError(sentence)


def mean_losses(results: list[dict[str, Any]]) -> dict[str, float]:
    """First and last loss, the mean over ranks."""
    return {name: statistics.fmean(result[name] for result in results) for name in ("loss_first", "loss_last")}


class ProgressLine:
    """One line on standard error: rewritten in a terminal; in a log every so many calls, and whatever came last."""

    def __init__(self, *, log_every: int = 20) -> None:
        self._live = sys.stderr.isatty()
        self._log_every = log_every
        self._told = self._printed = ""
        self._calls = 0

    def show(self, text: str) -> None:
        """Replaces the line."""
        if self._live:
            self.rewrite(text)
        elif self._calls % self._log_every == 0:
            self._log(text)
        self._told = text
        self._calls += 1

    def rewrite(self, text: str) -> None:
        """Replaces the line in a terminal; a log is left as it is."""
        if self._live:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Leaves the last line standing."""
        if not self._live:
            self._log(self._told)
        elif self._calls:
            print(file=sys.stderr, flush=True)
        self._calls = 0

    def _log(self, text: str) -> None:
        if text != self._printed:
            print(text, file=sys.stderr, flush=True)
            self._printed = text


def _text(data: dict[str, Any], unit: str) -> str:
    rows = [("strategy", f"{data['strategy']} on {count(data['world_size'], 'rank')}"
                         + (f" over {data['backend']}" if data["world_size"] > 1 else ", which has nobody to talk to")),
            ("loss", f"{data['loss_first']:.4f} -> {data['loss_last']:.4f} in {count(data['steps'], 'step')}, "
                     f"mean over ranks")]
    if "emulated" in data:
        rows.append(("links", f"emulated: {data['emulated']}"))
    if data["step_ms_median"] is not None:
        rows.append(("step", f"{data['step_ms_median']:.1f} ms, of which {data['sync_ms_median']:.1f} ms exposed "
                             f"synchronisation (medians)"))
    if data["tokens_per_s"] is not None:
        rows.append(("throughput", f"{data['tokens_per_s']:,.0f} {unit}/s, all ranks"))
    rows.append(("memory", ", ".join(f"{name} {size / 1e6:.1f}" for name, size in data["memory"].items() if size)
                 + " MB on rank 0"))
    if "offload=" in data["strategy"] and "host" not in data["memory"]:
        rows.append(("offload", "moved nothing: the ranks compute in the host's memory already"))
    if data["peak_bytes"]:
        rows.append(("process", ", ".join(f"{size / 1e6:,.0f}" for size in data["peak_bytes"])
                     + " MB private at the peak, by rank"))
    for name, row in data["wire"].items():
        whole = f"{_size(row['bytes'])} sent by rank 0 in the whole run, {count(row['count'], 'time')}"
        rows.append(("wire", f"{name}: " + (f"{whole}, before the first step" if name == "init" else
                                            f"{_size(row['bytes'] / data['steps'])} a step"
                                            f"{_between_hosts(row, data['steps'])}; {whole}")))
    if saved := sum(row["saved_bytes"] for row in data["recomputed"].values()):
        cost = sum(row["ms"] for row in data["recomputed"].values())
        rows.append(("recomputed", f"{_size(saved)} of activations not kept, for {cost:.1f} ms a backward on rank 0"))
    rows += [("restarted", f"on {count(again['world_size'], 'rank')}: {again['why']}") for again in data["restarts"]]
    rows.append(("run", data["run_dir"]))
    return "\n".join(f"{name:12}{value}" for name, value in rows)


def _between_hosts(row: dict[str, Any], steps: int) -> str:
    """What of it left the host, and what was lost on the way, as far as that is known."""
    left = f" ({_size(row['across'] / steps)} of it between hosts)" if "across" in row else ""
    return left + (f", off by {row['error']:.2g} (relative L2)" if row.get("error") is not None else "")


def _size(size: float) -> str:
    """In MB, small ones in kB."""
    return f"{size / 1e6:,.2f} MB" if size >= 1e4 else f"{size / 1e3:,.2f} kB"
