"""The rules. Each looks at the facts of a run and returns a finding, or None; thresholds are the field's usual ones.

Gains are predictions from the run's own medians: what would remain if the remedy took away exactly its part.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

from dplab.diagnosis import memory, numbers
from dplab.diagnosis.facts import Facts, RankFacts
from dplab.diagnosis.findings import Finding
from dplab.layout import bucket_cap
from dplab.specs import Placement

COMMUNICATION = 0.30
DATA = 0.10
OTHER = 0.10
STRAGGLER = 0.15
LATE = 0.05
"""Share of a step from which on one waits for a late rank."""
IMBALANCE = 0.10
UTILIZATION = 80.0
SMALL_BUCKET = 256 << 10
MANY_BUCKETS = 8


def small_model(facts: Facts) -> Finding | None:
    """One rank alone would be as fast as all of them together. Where one is late that is no measure of the model."""
    n, own = facts.world_size, statistics.median(rank.own for rank in facts.ranks.values())
    if n == 1 or facts.step < n * own or straggler(facts):
        return None
    needed = facts.step / (n * own)
    return Finding(kind="small-model", cost=facts.wire / facts.step, gain=1 - 1 / needed,
                   what=f"one rank alone is as fast as these {n}",
                   evidence=f"a step takes {facts.step:.1f} ms, more than {n} times the {own:.1f} ms that a rank "
                            f"works in it; the rest it waits",
                   remedy=f"train on one rank; {n} pay from about {math.ceil(needed)} times the work a step (a larger "
                          f"micro-batch, accumulation, a larger model)")


def communication(facts: Facts) -> Finding | None:
    """More than 30 % of a step waits for the wire, on the rank too for which no other has to wait."""
    share = facts.wire / facts.step
    if facts.world_size == 1 or share <= COMMUNICATION:
        return None
    remedy, kept = _less_wire(facts)
    return Finding(kind="communication", cost=share, gain=share * (1 - kept), remedy=remedy,
                   what=f"{share:.0%} of a step waits for the wire",
                   evidence=f"of {facts.step:.1f} ms a step, {facts.wire:.1f} ms are exposed synchronisation, on the "
                            f"rank too that waits least, and {facts.compute:.1f} ms computing (medians over steps)")


def _less_wire(facts: Facts) -> tuple[str, float]:
    """The cheapest way to send less a sample, and the part of the waiting that it leaves."""
    strategy = facts.parsed
    if facts.cores is not None and facts.world_size > facts.cores:
        return (f"run {facts.cores} ranks: {facts.world_size} share {facts.cores} cores, and who waits for a core "
                f"makes the others wait on the wire"), facts.cores / facts.world_size
    if strategy is not None and strategy.sharding.params is Placement.SHARDED:
        return f"'{strategy}' sends 3u a step and zero2 2u, where its memory allows", 2 / 3
    if strategy is not None and strategy.precision.param is None and strategy.wire is None:
        return f"'{facts.plus('wire=bf16')}': half the bytes travel, and sums stay fp32", 1 / 2
    if strategy is not None and strategy.accumulate == 1:
        return f"'{facts.plus('accum4')}': one synchronisation for four micro-batches", 1 / 4
    return "a larger micro-batch, or more of them a window: as much is sent for more samples", 1 / 2


def small_buckets(facts: Facts) -> Finding | None:
    """Many reductions of little each: their latency adds up."""
    if not facts.reductions or facts.reductions_a_step < MANY_BUCKETS:
        return None
    size = statistics.median(nbytes for nbytes, _ in facts.reductions)
    total = size * facts.reductions_a_step
    enough = max(1, math.ceil(total / bucket_cap(int(total), None)))
    if size >= SMALL_BUCKET or enough >= facts.reductions_a_step:
        return None
    latency = min(ms for _, ms in facts.reductions)
    saved = min(facts.wire, (facts.reductions_a_step - enough) * latency) / facts.step
    return Finding(kind="small-buckets", cost=facts.wire / facts.step, gain=saved,
                   what=f"gradients travel in {facts.reductions_a_step:.0f} small reductions a step",
                   evidence=f"{size / 1024:.0f} KiB each, where even the quickest took {latency:.2f} ms",
                   remedy=f"leave bucket_mb to its default, which makes about {enough} of them")


def straggler(facts: Facts) -> Finding | None:
    """One rank is longer at work than the others, which wait for it: computing, loading, or at something else."""
    if len(facts.ranks) < 2:
        return None
    slow, its = max(facts.ranks.items(), key=lambda item: item[1].own)
    rest = [rank for number, rank in facts.ranks.items() if number != slow]
    others = statistics.median(rank.own for rank in rest)
    behind = its.own - others
    if behind <= STRAGGLER * others or behind <= LATE * facts.step:
        return None
    more = {part: of(its) - statistics.median(map(of, rest)) for part, of in _PARTS.items()}
    most = max(more, key=lambda part: more[part])
    if most != "computing":
        what, remedy = _AWAY[most]
        return Finding(kind="straggler", cost=behind / facts.step, gain=behind / facts.step, remedy=remedy,
                       what=f"rank {slow} {what.format(more[most])} than the others, and they wait for it",
                       evidence=f"of its own it takes {its.own:.1f} ms a step, and the others {others:.1f} ms")
    return _computes_longer(facts, slow, behind)


_PARTS: dict[str, Callable[[RankFacts], float]] = {
    "computing": lambda rank: rank.compute, "data": lambda rank: rank.data, "else": lambda rank: rank.other - rank.data}


_AWAY = {
    "data": ("waits {:.1f} ms a step longer for data",
             "look at that rank's share of the data and where it lies, or prepare its batches in workers"),
    "else": ("spends {:.1f} ms a step more outside of training",
             "look at what the program does between its steps on that rank alone: evaluating, saving, printing, "
             "loading without dplab.loader, sleeping")}
"""What a rank does that is late, and not by computing; and what to look at."""


def _computes_longer(facts: Facts, slow: int, behind: float) -> Finding:
    its, rest = facts.ranks[slow], [rank for number, rank in facts.ranks.items() if number != slow]
    others = statistics.median(rank.compute for rank in rest)
    more = its.tokens > (1 + IMBALANCE) * statistics.median(rank.tokens for rank in rest)
    mean = statistics.fmean(rank.own for rank in facts.ranks.values())
    return Finding(kind="imbalance" if more else "straggler", cost=behind / facts.step,
                   gain=(its.own - mean) / facts.step,
                   what=f"rank {slow} computes {its.compute / others - 1:.0%} longer than the others, and they wait "
                        f"for it",
                   evidence=f"{its.compute:.1f} ms a step against {others:.1f} ms"
                            + (f", for {its.tokens:,.0f} tokens a step, more than theirs" if more else ""),
                   remedy="deal batches of equal length (sort or pack by length, or weigh with "
                          "engine.backward(loss_sum, weight=tokens))" if more else
                          "look at what else runs there and at its clock; a device that is slower for good wants a "
                          "smaller share of the batch")


def data(facts: Facts) -> Finding | None:
    """Steps wait for their batches."""
    share = statistics.median(rank.data for rank in facts.ranks.values()) / facts.step
    if share <= DATA:
        return None
    return Finding(kind="data", cost=share, gain=share,
                   what=f"{share:.0%} of a step waits for data",
                   evidence=f"{share * facts.step:.1f} of {facts.step:.1f} ms lie in the loader",
                   remedy="prepare batches in workers (torch.utils.data.DataLoader(num_workers=2) around the data "
                          "set), or once before training")


def utilization(facts: Facts) -> Finding | None:
    """The device idles although neither the wire, nor the loader, nor a late rank takes the time."""
    measured = [(rank, _device(of)) for rank, of in facts.ranks.items() if _device(of) is not None]
    if not measured or communication(facts) or data(facts) or straggler(facts):
        return None
    rank, percent = min(measured, key=lambda each: each[1] or 0.0)
    if percent is None or percent >= UTILIZATION:
        return None
    of = facts.ranks[rank]
    device = "GPU" if of.gpu is not None else "core"
    if device == "core" and facts.cores is not None and facts.world_size > facts.cores:
        why = f"run {facts.cores} ranks: {facts.world_size} share {facts.cores} cores"
    elif of.other > max(of.exposed, OTHER * of.step):
        why = f"look at what the program does between its steps: {of.other:.1f} ms of {of.step:.1f} are neither "\
              f"computing nor synchronising"
    elif device == "core":      # who computes on a core keeps it busy, if it has it
        why = f"look at what else runs on this machine: the rank computes for {of.compute / of.step:.0%} of a step " \
              f"and has a core for {percent:.0f} % of it, so others take the core, or the program sleeps"
    else:
        why = "kernels are too small to keep it busy: a larger micro-batch, or torch.compile of the units"
    return Finding(kind="utilization", cost=1 - percent / 100, remedy=why,
                   what=f"the {device} of rank {rank} is {percent:.0f} % busy",
                   evidence=f"median of {of.samples} samples of half a second; below {UTILIZATION:.0f} % with "
                            f"{of.exposed / of.step:.0%} of a step on the wire and {of.data / of.step:.0%} on data")


TIMED: tuple[Callable[[Facts], Finding | None], ...] = (
    small_model, small_buckets, communication, straggler, data, utilization, memory.recompute)
"""Rules over medians of steps, which take some steps."""
RULES: tuple[Callable[[Facts], Finding | None], ...] = (
    numbers.not_finite, numbers.skipped, memory.retries, memory.fragmentation, memory.nearly_full)
"""Those that a single step may break."""


def _device(of: RankFacts) -> float | None:
    return of.gpu if of.gpu is not None else of.cpu
