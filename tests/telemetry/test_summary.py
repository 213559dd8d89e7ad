"""A run in a few figures."""

from __future__ import annotations

from dplab.telemetry.events import Event
from dplab.telemetry.summary import Summary

MS = 1_000_000


def step(rank: int, index: int, t0: int, t1: int) -> list[Event]:
    """A step of so many ms, with two collectives that block it for 1 and 2 ms, and 64 tokens."""
    attrs = {"purpose": "grads", "bytes": 10}
    return [
        Event("data", "loader", rank, index, t0 * MS, t0 * MS, {"samples": 2, "tokens": 64}),
        Event("collective", "reduce_scatter", rank, index, t0 * MS, t1 * MS, {**attrs, "exposed": MS}),
        Event("collective", "all_gather", rank, index, t0 * MS, t1 * MS,
              {"purpose": "params", "bytes": 20, "exposed": 2 * MS}),
        Event("collective", "broadcast", rank, index, t0 * MS, t1 * MS, {"purpose": "control", "bytes": 1}),
        Event("gauge", "loss", rank, index, t1 * MS, t1 * MS, {"value": 10.0 * rank + index}),
        Event("step", "train", rank, index, t0 * MS, t1 * MS, {}),
    ]


def test_nothing_yet() -> None:
    summary = Summary()
    assert (summary.steps, summary.loss, summary.step_ms, summary.sync_ms, summary.tokens_per_s) == (0,) + (None,) * 4
    assert summary.line() == ""


def test_two_ranks_in_two_batches() -> None:
    summary = Summary().feed(step(1, 0, 0, 10)).feed(step(0, 0, 0, 20) + step(0, 1, 20, 50) + step(1, 1, 20, 60))
    assert summary.steps == 2
    assert summary.loss == (1.0 + 11.0) / 2
    assert summary.step_ms == 25.0
    assert summary.sync_ms == 3.0
    assert summary.wire == {"reduce_scatter": {"count": 2, "bytes": 20}, "all_gather": {"count": 2, "bytes": 40}}
    assert summary.tokens_per_s == 4 * 64 / 0.06
    assert summary.line() == "step 2, loss 6.000, 4,267 tokens/s"


def test_a_step_counts_when_every_rank_has_finished_it() -> None:
    summary = Summary().feed(step(0, 0, 0, 10) + step(1, 0, 0, 10) + step(0, 1, 10, 20))
    assert summary.steps == 1


def test_memory() -> None:
    def gauge(name: str, rank: int, **values: int) -> Event:
        return Event("gauge", name, rank, 0, 1, 1, values)

    summary = Summary().feed([gauge("memory", 0, params=1),
                              gauge("memory", 0, params=2, num_alloc_retries=3, num_ooms=0),      # counts, no bytes
                              gauge("process", 1, private=9), gauge("process", 1, private=7)])
    assert summary.memory == {0: {"params": 2}}
    assert summary.peak_private == {1: 9}


def loss(rank: int, index: int, value: object) -> Event:
    return Event("gauge", "loss", rank, index, 1, 1, {"value": value})


def test_the_loss_is_of_the_latest_step_that_every_rank_has_told() -> None:
    summary = Summary().feed([loss(0, 0, 4.0)])
    assert summary.loss == 4.0
    assert summary.feed([loss(1, 0, 2.0), loss(0, 1, 1.0)]).loss == 3.0
    assert summary.feed([loss(0, 2, 0.5)]).loss == 3.0
    assert summary.feed([loss(1, 2, 1.5)]).loss == 1.0
    for index in range(3, 1000):  # rank 1 tells nothing any more
        summary.feed([loss(0, index, float(index))])
    assert summary.loss is not None
    assert 700 < summary.loss < 1000


def test_images_are_counted_in_samples() -> None:
    summary = Summary().feed([Event("data", "loader", 0, 0, 0, 0, {"samples": 8, "tokens": 8}),
                              Event("data", "loader", 0, 0, 0, 0, {"samples": 4}),
                              Event("step", "train", 0, 0, 0, 1000 * MS, {})])
    assert summary.line() == "step 1, 12 samples/s"


def test_pauses_are_left_out_of_steps_and_of_the_rate() -> None:
    """A program that waits 100 ms between two steps of 10 ms."""
    summary = Summary()
    for rank in (0, 1):
        summary.feed([*step(rank, 0, 0, 10), Event("pause", "turn", rank, 1, 10 * MS, 110 * MS, {}),
                      *step(rank, 1, 10, 120)])
    assert summary.step_ms == 10.0
    assert summary.tokens_per_s == 4 * 64 / 0.02


def test_a_program_may_record_whatever_it_likes() -> None:
    odd = [loss(0, 0, "low"), loss(0, 0, None), Event("gauge", "process", 0, 0, 1, 1, {"mine": 1}),
           Event("data", "loader", 0, 0, 1, 1, {"tokens": "many"}), Event("gauge", "loss", 0, 0, 1, 1, {"x": 1}),
           Event("collective", "all_reduce", 0, 0, 0, 1, {"purpose": "grads", "exposed": "long", "bytes": None})]
    summary = Summary().feed(odd)
    assert (summary.loss, summary.tokens_per_s, summary.line()) == (None, None, "")
    assert summary.wire == {"all_reduce": {"count": 1, "bytes": 0}}
