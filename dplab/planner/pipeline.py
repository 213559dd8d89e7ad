"""A pipeline's schedule, run event by event: who computes which micro-batch when.

A stage sends with a separate engine, so a transfer delays only the stage that waits for it. With the profiled times
of Qi et al. 2024 (arXiv:2401.10241, tables 5 and 9) bubble rates come out as published, to four decimals: those of 1F1B
as they are, those of interleaved schedules with the simplification that the publication makes (`streams`), without
which they are up to 0.0035 larger.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dplab.errors import UsageError


class Op(NamedTuple):
    """One forward or backward of one micro-batch's chunk on one stage; seconds."""

    kind: str
    stage: int
    micro_batch: int
    chunk: int
    start: float
    end: float


def order(stage: int, stages: int, micro_batches: int, chunks: int = 1) -> list[tuple[str, int, int]]:
    """What a stage does, in order: (forward or backward, micro-batch, chunk).

    1F1B warms up with one forward a later stage. Interleaved (Narayanan et al. 2021, arXiv:2104.04473) runs groups
    of as many micro-batches as there are stages through one chunk after the other.
    """
    total = micro_batches * chunks

    def at(place: int, forward: bool) -> tuple[str, int, int]:
        group, inside = divmod(place, stages * chunks)
        chunk = inside // stages
        micro_batch = group * stages + inside % stages
        return ("forward", micro_batch, chunk) if forward else ("backward", micro_batch, chunks - 1 - chunk)

    if chunks == 1:
        warm = min(stages - stage - 1, total)
    else:
        warm = min((stages - stage - 1) * 2 + (chunks - 1) * stages, total)
    todo = [at(place, True) for place in range(warm)]
    for place in range(total):
        if warm + place < total:
            todo.append(at(warm + place, True))
        todo.append(at(place, False))
    return todo


def run(*, forward: Sequence[float], backward: Sequence[float], micro_batches: int, hop: float = 0.0,
        chunks: int = 1, streams: bool = False) -> list[Op]:
    """Every operation of a step, by stage and then by time. `forward` and `backward` are seconds a stage, all its
    chunks together; `hop` the seconds of one transfer. Interleaving needs micro-batches in whole rounds of stages.
    `streams`: between the last stage and the first only a round's first micro-batch waits, the others are taken to
    have arrived."""
    stages = len(forward)
    if chunks > 1 and micro_batches % stages:
        raise UsageError(f"an interleaved pipeline of {stages} stages needs micro-batches in multiples of {stages}, "
                         f"got {micro_batches}; change accumulate or use chunks=1")
    todo = [order(stage, stages, micro_batches, chunks) for stage in range(stages)]
    place, free = [0] * stages, [0.0] * stages
    done: dict[tuple[str, int, int, int], float] = {}
    ops: list[list[Op]] = [[] for _ in range(stages)]
    waiting = True
    while waiting:
        waiting, moved = False, False
        for stage in range(stages):
            while place[stage] < len(todo[stage]):
                kind, micro_batch, chunk = todo[stage][place[stage]]
                needs = _needs(kind, stage, chunk, stages, chunks)
                if needs is not None and streams and micro_batch % stages and _wraps(kind, needs[2], stage):
                    needs = None
                arrived = 0.0
                if needs is not None:
                    ended = done.get((needs[0], micro_batch, needs[1], needs[2]))
                    if ended is None:
                        waiting = True
                        break
                    arrived = ended + (hop if needs[2] != stage else 0.0)
                start = max(free[stage], arrived)
                free[stage] = start + (forward if kind == "forward" else backward)[stage] / chunks
                done[kind, micro_batch, chunk, stage] = free[stage]
                ops[stage].append(Op(kind, stage, micro_batch, chunk, start, free[stage]))
                place[stage] += 1
                moved = True
        assert moved, "the schedule waits for itself"
    return [op for row in ops for op in row]


def _needs(kind: str, stage: int, chunk: int, stages: int, chunks: int) -> tuple[str, int, int] | None:
    """The operation that one waits for: (kind, chunk, stage), None for the first forward of a chain."""
    if kind == "forward":
        if stage:
            return "forward", chunk, stage - 1
        return ("forward", chunk - 1, stages - 1) if chunk else None
    if stage < stages - 1:
        return "backward", chunk, stage + 1
    return ("backward", chunk + 1, 0) if chunk < chunks - 1 else ("forward", chunk, stage)


def _wraps(kind: str, source: int, stage: int) -> bool:
    """True for the way from the last stage to the first (backward: from the first to the last)."""
    return source > stage if kind == "forward" else source < stage


def bubble_rate(ops: Sequence[Op]) -> float:
    """Share of the longest stage's time in which it computes nothing: (cost - work) / cost."""
    spans: dict[int, list[Op]] = {}
    for op in ops:
        spans.setdefault(op.stage, []).append(op)
    longest = max(spans.values(), key=lambda row: row[-1].end - row[0].start)
    cost = longest[-1].end - longest[0].start
    return (cost - sum(op.end - op.start for op in longest)) / cost
