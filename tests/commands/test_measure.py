"""The command line's figures from events whose answer is known."""

from __future__ import annotations

from dplab.commands.measure import figures, progress
from dplab.telemetry.events import Event
from dplab.telemetry.summary import Summary

MS = 1_000_000


def step_of(rank: int, index: int, start_ms: int, *, length_ms: int, exposed_ms: int) -> list[Event]:
    """One step: its batch, a collective that blocks its caller at the end, the loss, the step itself."""
    t0, t1 = start_ms * MS, (start_ms + length_ms) * MS
    return [
        Event("data", "loader", rank, index, t0, t0 + MS, {"samples": 2, "tokens": 100}),
        Event("collective", "all_reduce", rank, index, t1 - exposed_ms * MS, t1,
              {"purpose": "grads", "bucket": 0, "bytes": 8, "exposed": exposed_ms * MS}),
        Event("gauge", "loss", rank, index, t1, t1, {"value": 5.0 - index}),
        Event("step", "train", rank, index, t0, t1, {"micro_batches": 1, "moved": True}),
    ]


def test_a_run_of_two_ranks():
    summary = Summary()
    for index in range(5):
        for rank in range(2):
            summary.feed(step_of(rank, index, 100 * index, length_ms=50 + 10 * rank, exposed_ms=10 + 2 * rank))
    summary.feed([Event("gauge", "process", 0, 0, 0, 0, {"private": 300_000_000, "resident": 900}),
                  Event("gauge", "process", 1, 0, 0, 0, {"private": 400_000_000, "resident": 900}),
                  Event("gauge", "process", 0, 0, 0, 0, {"private": 200_000_000, "resident": 900})])
    assert figures(summary) == {"tokens_per_s": 1000 / 0.46, "step_ms_median": 55, "sync_ms_median": 11,
                                "peak_bytes": [300_000_000, 400_000_000]}
    assert progress(summary, 9) == "step 5/9 · loss 1.000 · 2,174 tokens/s · sync 20% · process peak 400 MB"
    assert progress(summary).startswith("step 5 ·")


def test_before_the_first_step():
    assert progress(Summary(), 9) == "step 0/9"
    assert figures(Summary()) == {"tokens_per_s": None, "step_ms_median": None, "sync_ms_median": None,
                                  "peak_bytes": []}


def test_alone_there_is_nothing_to_wait_for():
    summary = Summary().feed([Event("step", "train", 0, 0, 0, 10 * MS, {})])
    assert figures(summary)["sync_ms_median"] == 0
