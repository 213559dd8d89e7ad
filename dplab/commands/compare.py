"""`compare`: the same work under several systems, in one go, so that a drifting machine hits all alike."""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import sys
import time
from dataclasses import dataclass, field, replace
from typing import Any

from dplab.commands.base import Answer, Verbs, verb, whole_number
from dplab.commands.kept import KeptWorld
from dplab.commands.links import settle
from dplab.commands.train import ProgressLine, checked_workload, threads_of, usage_error_of, workload_arguments
from dplab.errors import RankFailed, UsageError
from dplab.peers.catalog import System, system
from dplab.telemetry.summary import Summary
from dplab.workloads.catalog import workload

DEFAULT = ["ddp", "zero1", "zero2", "zero3", "single"]
_WARM_UP = 6
"""Steps of a first turn that is not counted; memory is looked at during it, which costs time."""
_FEWEST_PAIRS = 6
"""Below this many pairs the resampled medians are little more than the pairs themselves: no interval is told."""
_NOTES = f"""how to read it:
  step ms        median over blocks of the mean step
  paired ratio   median of the ratios of paired blocks, with the 95 % interval of that median ({_FEWEST_PAIRS} blocks
                 at least); it takes out a machine that drifts, so that it may differ from the ratio of the
                 two step times beside it
  sync ms        exposed synchronisation of a step, where the system tells
  tokens/s       (samples/s of images) of all ranks at this step time, without the waiting between turns (dplab attach
                 RUN tells the rate from first to last step)
  last loss      of the last counted step, mean over ranks; {_WARM_UP} steps to warm up come before those that count
  MB, all ranks  private bytes of all ranks and their shared pages once, at the peak of the steps to warm up
  sent MB/step   by rank 0, where the system counts"""


def add(verbs: Verbs) -> None:
    """Declares the verb."""
    parser = verb(verbs, "compare", compare, about="measure systems side by side on the same work",
                  example="dplab compare ddp zero1 zero2 zero3 torch:ddp torch:fsdp2 single --world-size 2",
                  notes=_NOTES)
    parser.add_argument("systems", nargs="*", metavar="SYSTEM",
                        help="ddp, zero1, zero2, zero3, a longer strategy, torch:ddp, torch:zero1, torch:fsdp2, "
                             "deepspeed:1|2|3 (CPU ranks over gloo, as their own users have them; torch:ddp@shm: over "
                             "dplab's shm), single (no synchronisation at all); the first is what ratios are "
                             f"taken to (default: {' '.join(DEFAULT)})")
    parser.add_argument("--steps", type=whole_number, default=40, help="counted steps a system (default: 40)")
    parser.add_argument("--block", type=whole_number, default=4, help="steps a turn (default: 4)")
    workload_arguments(parser)


@dataclass
class Contender:
    """A system's world and what its turns gave."""

    name: str
    world: KeptWorld
    step_ms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    tokens: int = 0

    def turn(self, steps: int, *, counted: bool) -> None:
        """A block of steps. Its time is the slowest rank's, its loss the mean over ranks."""
        answers = self.world.turn(steps, watched=not counted)
        self.losses += [statistics.fmean(losses)
                        for losses in zip(*(answer["losses"] for answer in answers), strict=True)]
        if counted:
            self.step_ms.append(1e3 * max(answer["seconds"] for answer in answers) / steps)
            self.tokens = sum(answer["tokens"] for answer in answers) // steps


def compare(args: argparse.Namespace) -> Answer:
    """Starts a world a system, gives them turns, tabulates."""
    names = args.systems or DEFAULT
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"system {twice!r} is given twice; name each system once")
    chosen = [system(name) for name in names]
    on_links = dict(zip([each.name for each in chosen if each.strategy and not each.rival], settle(
        args, [each.strategy for each in chosen if each.strategy and not each.rival]), strict=True))
    kwargs = checked_workload(args)
    unit = "samples" if workload(args.model).data == "images" else "tokens"
    missing = {each.name: _not_emulated(each, args) or each.missing() for each in chosen}
    skipped = [{"strategy": name, "reason": reason} for name, reason in missing.items() if reason]
    for row in skipped:
        print(f"{row['strategy']} is skipped: {row['reason']}", file=sys.stderr)
    try:
        with contextlib.ExitStack() as worlds:      # each is closed, whatever closing another one raises
            contenders = [_start(each, args, kwargs, worlds) for each in (
                replace(each, strategy=on_links.get(each.name, "")) for each in chosen if not missing[each.name])]
            if not contenders:
                raise UsageError("no system is left to compare; " + "; ".join(str(row["reason"]) for row in skipped))
            _take_turns(contenders, args.steps, min(args.block, args.steps))
            rows = [_row(each, contenders[0], args.world_size) for each in contenders]
    except RankFailed as error:
        raise usage_error_of(error) or error from None
    return Answer({"rows": rows, "baseline": contenders[0].name, "skipped": skipped}, _table(rows, unit))


def _not_emulated(each: System, args: argparse.Namespace) -> str | None:
    """Why it cannot run on emulated links, where those are asked for."""
    if args.topology is None or not each.rival:
        return None
    return "its collectives do not go through dplab's, so no links can be emulated under them"


def _start(each: System, args: argparse.Namespace, kwargs: dict[str, Any], worlds: contextlib.ExitStack) -> Contender:
    from dplab.launcher.launch import LABEL_LENGTH, launch

    run = launch("dplab.peers.serve:serve", world_size=args.world_size, args=(each.strategy or each.name,),
                 kwargs=kwargs, backend=each.backend or args.backend, threads=threads_of(args), detach=False,
                 label=f"compare {each.name}"[:LABEL_LENGTH])
    world = KeptWorld(run, args.world_size)
    worlds.callback(world.close)
    return Contender(each.name, world)


def _take_turns(contenders: list[Contender], steps: int, block: int) -> None:
    line = ProgressLine(log_every=1)
    seconds, done = 0.0, _WARM_UP
    for number, each in enumerate(contenders, 1):
        line.show(f"starting {each.name} ({number} of {len(contenders)})")
        each.world.connect()
        seconds += _timed(each, _WARM_UP, counted=False)
    blocks = [min(block, steps - begun) for begun in range(0, steps, block)]
    for index, size in enumerate(blocks):
        left = seconds / done * (steps - sum(blocks[:index]))
        if index == 0:
            seconds, done = 0.0, 0      # warming up was slower: told while there is nothing better
        told = f"block {index + 1}/{len(blocks)}, about {left:,.0f} s to go"
        line.show(told)
        # Every other round the other way round: what follows a system should not always be the same one.
        for each in contenders if index % 2 == 0 else reversed(contenders):
            line.rewrite(f"{told}: {each.name}")
            seconds += _timed(each, size, counted=True)
        done += size
    line.end()


def _timed(each: Contender, steps: int, *, counted: bool) -> float:
    """Seconds of a turn, what is around its steps included."""
    begin = time.monotonic()
    each.turn(steps, counted=counted)
    return time.monotonic() - begin


def paired_ratio(times: list[float], baseline: list[float], *, draws: int = 2000) -> dict[str, float | None]:
    """Median of the ratios of paired blocks, with the 95 % interval of that median under resampled blocks: `low` and
    `high`, None where there are fewer than six pairs."""
    ratios = [time / base for time, base in zip(times, baseline, strict=True)]
    if len(ratios) < _FEWEST_PAIRS:
        return {"median": statistics.median(ratios), "low": None, "high": None}
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(draws))
    return {"median": statistics.median(ratios), "low": medians[int(0.025 * draws)],
            "high": medians[int(0.975 * draws) - 1]}


def _row(each: Contender, baseline: Contender, world_size: int) -> dict[str, Any]:
    results = each.world.end()
    summary = Summary()
    summary.feed(each.world.run.reader().poll())
    median = statistics.median(each.step_ms)
    return {"strategy": each.name, "world_size": world_size, "backend": results[0]["backend"],
            "steps": len(each.losses) - _WARM_UP, "warm_up_steps": _WARM_UP,
            "loss_first": each.losses[0], "loss_last": each.losses[-1],
            "tokens_per_s": each.tokens * 1e3 / median, "step_ms_median": median, "step_ms_blocks": each.step_ms,
            "sync_ms_median": summary.sync_ms,
            "peak_bytes": each.world.peak_bytes, "peak_total_bytes": each.world.peak_total_bytes,
            "memory": results[0]["memory"], "wire": results[0]["wire"], "run_dir": str(each.world.run.path),
            "ratio": paired_ratio(each.step_ms, baseline.step_ms)}


def _table(rows: list[dict[str, Any]], unit: str) -> str:
    told = rows[0]["ratio"]["low"] is not None
    head = ("system", "step ms", f"paired ratio to {rows[0]['strategy']}{' [95 %]' if told else ''}", "sync ms",
            f"{unit}/s", "last loss", "MB, all ranks", "sent MB/step")
    lines = [head]
    for row in rows:
        ratio, sync = row["ratio"], row["sync_ms_median"]
        interval = f" [{ratio['low']:.3f}, {ratio['high']:.3f}]" if told else ""
        sent = sum(each["bytes"] for name, each in row["wire"].items() if name != "init")
        sent /= (row["steps"] + row["warm_up_steps"]) * 1e6
        lines.append((row["strategy"], f"{row['step_ms_median']:.1f}", f"{ratio['median']:.3f}{interval}",
                      "-" if sync is None else f"{sync:.1f}", f"{row['tokens_per_s']:,.0f}", f"{row['loss_last']:.4f}",
                      f"{row['peak_total_bytes'] / 1e6:,.0f}", f"{sent:,.2f}" if row["wire"] else "-"))
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    table = ["  ".join(cell.ljust(width) if column == 0 else cell.rjust(width)
                       for column, (cell, width) in enumerate(zip(line, widths, strict=True))) for line in lines]
    if not told:
        table.append(f"too few blocks for an interval: give at least {_FEWEST_PAIRS} (more --steps, smaller --block)")
    return "\n".join([*table, "", _NOTES])
