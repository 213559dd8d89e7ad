"""A run that never happened, with times chosen so that every figure of it can be computed by hand."""

from __future__ import annotations

from collections.abc import Iterator

from dplab.telemetry.events import Event

MS = 1_000_000
START = 5_000 * MS
PERIOD = 110
"""ms from one step to the next; 10 of them lie between the steps"""
MB = 1_000_000
MEMORY = {"params": 16 * MB, "grads": 8 * MB, "optimizer": 16 * MB, "buckets": 2 * MB, "activations": 5 * MB,
          "process": 300 * MB}
TOKENS = 1024


def loss(step: int, rank: int) -> float:
    """2 + 1 / (step + 1), a little different on every rank; the ranks' mean is exact at two ranks."""
    return 2 + 1 / (step + 1) + (0.25 if rank % 2 else -0.25)


def step_events(rank: int, step: int, *, sync: bool = True) -> Iterator[Event]:
    """One step of 100 ms: 30 forward, 45 backward, 15 optimizer; of 60 ms on the wire 12 + 4 are exposed.

    compute = 30 + 45 - 12 + 15 = 78, exposed = 12 + 4 = 16, other = 6.
    """
    base = START + step * PERIOD * MS

    def at(ms: float) -> int:
        return base + int(ms * MS)

    yield Event("data", "loader", rank, step, at(-8), at(-6), {"samples": 8, "tokens": TOKENS})
    yield Event("forward", "GPT", rank, step, at(1), at(31), {})
    if sync:
        for bucket, filled, issued, done, exposed in [(0, 40, 40, 56, 0), (1, 50, 52, 68, 0), (2, 62, 62, 78, 12)]:
            yield Event("collective", "reduce_scatter", rank, step, at(issued), at(done),
                        {"purpose": "grads", "bucket": bucket, "bytes": 4096, "exposed": exposed * MS,
                         "filled": at(filled)})
    yield Event("backward", "GPT", rank, step, at(33), at(78), {})
    yield Event("optimizer", "AdamW", rank, step, at(78), at(93), {})
    if sync:
        yield Event("collective", "all_gather", rank, step, at(86), at(98),
                    {"purpose": "params", "bucket": None, "bytes": 4096, "exposed": 4 * MS})
    yield Event("gauge", "loss", rank, step, at(99), at(99), {"value": loss(step, rank)})
    yield Event("gauge", "memory", rank, step, at(99), at(99), dict(MEMORY))
    yield Event("step", "train", rank, step, at(0), at(100), {"micro_batches": 1, "moved": True})
    if step % 4 == 0:
        yield Event("gauge", "utilization", rank, step, at(100), at(100), {"cpu": 97.0})


def run_events(world_size: int = 2, steps: int = 10) -> list[Event]:
    """A whole run, step by step, rank by rank."""
    return [event for step in range(steps) for rank in range(world_size) for event in step_events(rank, step)]
