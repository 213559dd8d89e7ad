"""The rules, on runs whose every figure is chosen: what is found, what it costs, what the remedy is said to gain."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dplab.diagnosis.diagnose import findings, judged
from dplab.diagnosis.facts import gather
from dplab.diagnosis.findings import NOTHING, Diagnosis, Finding
from dplab.telemetry.events import Event

MS = 1_000_000
GOOD = {"compute": 90.0, "exposed": 5.0, "data": 2.0, "tokens": 1024, "cpu": 97.0}


def step(rank: int, index: int, *, compute: float, exposed: float, data: float, tokens: int, cpu: float,
         buckets: int = 1, bucket_bytes: int = 1 << 20, pause: float = 0.0, memory: dict[str, Any] | None = None,
         gpu: float | None = None, away: float = 0.0) -> Iterator[Event]:
    """data, then forward, then backward whose reductions end with it, then nothing for 3 ms and for `away`."""
    at = base = index * 1000 * MS

    def span(kind: str, name: str, ms: float, **attrs: Any) -> Event:
        nonlocal at
        begin, at = at, at + int(ms * MS)
        return Event(kind, name, rank, index, begin, at, attrs)

    if pause:
        yield span("pause", "turn", pause)
    yield span("data", "loader", data, samples=8, tokens=tokens)
    yield span("forward", "GPT", compute / 3)
    backward = span("backward", "GPT", 2 * compute / 3 + exposed)
    for bucket in range(buckets):
        begin = backward.t1 - int(exposed * MS) + int(bucket * exposed * MS / buckets)
        end = begin + int(exposed * MS / buckets)
        yield Event("collective", "reduce_scatter", rank, index, begin, end, {
            "purpose": "grads", "bucket": bucket, "bytes": bucket_bytes, "exposed": end - begin})
    yield backward
    yield Event("gauge", "utilization", rank, index, at, at, {"cpu": cpu, **({} if gpu is None else {"gpu": gpu})})
    yield Event("gauge", "memory", rank, index, at, at, memory or {"params": 1})
    yield Event("step", "train", rank, index, base, at + int((3 + away) * MS), {"micro_batches": 1, "moved": True})


def found(ranks: int = 2, *, strategy: str | None = "ddp", cores: int | None = 8,
          of: dict[int, dict[str, Any]] | None = None, **changed: Any) -> list[Finding]:
    events = [event for index in range(12) for rank in range(ranks)
              for event in step(rank, index, **{**GOOD, **changed, **((of or {}).get(rank, {}))})]
    return findings(gather(events, world_size=ranks, strategy=strategy, cores=cores))


def only(kind: str, *args: Any, **kwargs: Any) -> Finding:
    seen = found(*args, **kwargs)
    assert kind in [finding.kind for finding in seen], seen
    return next(finding for finding in seen if finding.kind == kind)


def test_a_good_run_has_no_finding() -> None:
    assert found() == []
    assert found(1, exposed=0.0, buckets=0) == []


@pytest.mark.parametrize(("ranks", "steps", "said"), [(1, 1, "1 step on 1 rank, 100.0 ms: "),
                                                      (2, 3, "3 steps on 2 ranks, 100.0 ms each: "),
                                                      (2, 6, "6 steps on 2 ranks, 100.0 ms each: ")])
def test_the_summary_counts(ranks: int, steps: int, said: str) -> None:
    events = [event for index in range(steps) for rank in range(ranks) for event in step(rank, index, **GOOD)]
    facts = gather(events, world_size=ranks, strategy="ddp", cores=8)
    told = judged(facts, "run")
    assert told.summary.startswith(said)
    assert told.summary.endswith("; too short to judge where its time goes, which takes 6 steps") == (steps < 6)
    assert (NOTHING in str(told)) == (NOTHING in told._repr_html_()) == (steps >= 6)


MORE = "a larger micro-batch, or more of them a window: as much is sent for more samples"


@pytest.mark.parametrize(("strategy", "remedy", "left"), [
    ("ddp", "'ddp+wire=bf16': half the bytes travel, and sums stay fp32", 1 / 2),
    ("zero2+bf16", "'zero2+bf16+accum4': one synchronisation for four micro-batches", 1 / 4),
    ("zero3", "'zero3' sends 3u a step and zero2 2u, where its memory allows", 2 / 3),
    ("zero2+bf16+accum2", MORE, 1 / 2), (None, MORE, 1 / 2)])
def test_communication_above_thirty_percent(strategy: str | None, remedy: str, left: float) -> None:
    seen = only("communication", 2, strategy=strategy, compute=55.0, exposed=40.0)
    assert seen.what == "40% of a step waits for the wire"
    assert seen.evidence == ("of 100.0 ms a step, 40.0 ms are exposed synchronisation, on the rank too that waits "
                             "least, and 55.0 ms computing (medians over steps)")
    assert seen.remedy == remedy
    assert seen.cost == pytest.approx(0.4)
    assert seen.gain == pytest.approx(0.4 * (1 - left))
    assert not any(f.kind == "communication" for f in found(compute=71.0, exposed=29.0 - 5.0))


def test_more_ranks_than_cores_is_told_before_anything_else() -> None:
    seen = only("communication", 4, cores=2, compute=55.0, exposed=40.0)
    assert seen.remedy.startswith("run 2 ranks: 4 share 2 cores")
    assert only("utilization", 4, cores=2, cpu=48.0).remedy == "run 2 ranks: 4 share 2 cores"


def test_one_rank_alone_would_be_as_fast() -> None:
    seen = only("small-model", 4, compute=10.0, exposed=85.0)
    assert seen.what == "one rank alone is as fast as these 4"
    assert seen.evidence == ("a step takes 100.0 ms, more than 4 times the 15.0 ms that a rank works in it; the rest "
                             "it waits")
    assert "4 pay from about 2 times the work a step" in seen.remedy
    assert seen.gain == pytest.approx(1 - 4 * 15 / 100)
    for compute, exposed, first in ((5.0, 90.0, "small-model"), (10.0, 85.0, "communication")):
        both = found(4, compute=compute, exposed=exposed)[:2]      # they cost the same; what gains more comes first
        assert (both[0].kind, both[0].cost) == (first, both[1].cost)
        assert (both[0].gain or 0) > (both[1].gain or 0)
    # what a rank does besides computing it would do alone as well
    assert not any(f.kind == "small-model" for f in found(4, compute=10.0, data=30.0, exposed=57.0))


def test_many_small_buckets() -> None:
    seen = only("small-buckets", exposed=20.0, compute=75.0, buckets=40, bucket_bytes=16 << 10)
    assert seen.what == "gradients travel in 40 small reductions a step"
    assert seen.evidence == "16 KiB each, where even the quickest took 0.50 ms"
    assert seen.gain == pytest.approx(39 * 0.5 / 100)
    kinds = [finding.kind for finding in found(exposed=40.0, compute=55.0, buckets=40, bucket_bytes=16 << 10)]
    assert kinds == ["small-buckets", "communication"]      # what gains more comes first
    assert not any(f.kind == "small-buckets" for f in found(buckets=40, bucket_bytes=1 << 20))


def test_a_rank_that_is_behind() -> None:
    seen = only("straggler", 3, of={2: {"compute": 120.0}})
    assert seen.what == "rank 2 computes 33% longer than the others, and they wait for it"
    assert seen.gain == pytest.approx((120 - 100) / 100)
    seen = only("imbalance", 3, of={1: {"compute": 120.0, "tokens": 2048}})
    assert seen.what.startswith("rank 1 computes 33% longer")
    assert "for 2,048 tokens a step, more than theirs" in seen.evidence
    assert "engine.backward(loss_sum, weight=tokens)" in seen.remedy


def waiting(steps: int = 12, **late: float) -> tuple[str, list[Finding]]:
    """Three ranks, of which the last has more of everything in `late` (ms), and the others wait so much longer."""
    behind = sum(late.values())
    events = [event for index in range(steps) for rank in range(3) for event in step(rank, index, **{
        **GOOD, "compute": 30.0, "exposed": 5.0 + (0.0 if rank == 2 else behind), **(
            {name: {"compute": 30.0, "data": 2.0}[name] + more for name, more in late.items() if name != "away"}
            if rank == 2 else {})}, away=late.get("away", 0.0) if rank == 2 else 0.0)]
    facts = gather(events, world_size=3, strategy="ddp", cores=8)
    return judged(facts, "run").summary, findings(facts)


@pytest.mark.parametrize(("late", "what", "remedy"), [
    ({"away": 100.0}, "rank 2 spends 100.0 ms a step more outside of training than the others, and they wait for it",
     "look at what the program does between its steps on that rank alone: evaluating, saving, printing, loading "
     "without dplab.loader, sleeping"),
    ({"data": 100.0}, "rank 2 waits 100.0 ms a step longer for data than the others, and they wait for it",
     "look at that rank's share of the data and where it lies, or prepare its batches in workers")])
def test_a_rank_that_is_late_for_another_reason_than_computing(late: dict[str, float], what: str, remedy: str) -> None:
    """Neither the wire nor the model's size is to blame, and nobody says so."""
    summary, (seen,) = waiting(**late)
    assert (seen.kind, seen.what, seen.remedy) == ("straggler", what, remedy)
    assert seen.evidence == "of its own it takes 135.0 ms a step, and the others 35.0 ms"
    assert seen.cost == seen.gain == pytest.approx(100 / 140)
    assert summary == "12 steps on 3 ranks, 140.0 ms each: 21% computing, 4% waiting for the wire, 71% for a late rank"


def test_the_others_wait_is_not_the_wires() -> None:
    (seen,) = waiting(compute=100.0)[1]
    assert seen.what == "rank 2 computes 333% longer than the others, and they wait for it"
    assert waiting(compute=5.0)[1] == []      # a share of the step that nobody misses
    assert not any(finding.kind == "straggler" for finding in found(compute=1.0, exposed=90.0, of={
        1: {"compute": 3.0, "exposed": 88.0}}))      # long beside the other's, but no part of the step


def test_ranks_that_are_late_in_turns_are_not_the_wires_either() -> None:
    events = [event for index in range(12) for rank in range(2) for event in step(rank, index, **{
        **GOOD, "compute": 60.0, "exposed": 5.0 if (rank + index) % 2 else 45.0})]
    facts = gather(events, world_size=2, strategy="ddp", cores=8)
    assert (facts.wire, facts.exposed) == (pytest.approx(5.0), pytest.approx(25.0))
    assert not any(finding.kind == "communication" for finding in findings(facts))


def test_waiting_for_data() -> None:
    seen = only("data", data=25.0, compute=67.0)
    assert seen.what == "25% of a step waits for data"
    assert seen.cost == seen.gain == pytest.approx(0.25)


def test_an_idle_device() -> None:
    seen = only("utilization", gpu=60.0)
    assert seen.what == "the GPU of rank 0 is 60 % busy"
    assert "kernels are too small" in seen.remedy
    seen = only("utilization", cpu=60.0)
    assert seen.what == "the core of rank 0 is 60 % busy"
    assert seen.remedy == ("look at what else runs on this machine: the rank computes for 90% of a step and has a core "
                           "for 60 % of it, so others take the core, or the program sleeps")
    assert seen.evidence == ("median of 10 samples of half a second; below 80 % with 5% of a step on the wire and 2% "
                             "on data")


SICK = {**GOOD, "compute": 40.0, "exposed": 45.0, "data": 12.0, "buckets": 40, "bucket_bytes": 1 << 10, "cpu": 5.0}


def sick(steps: int, samples: int, **changed: Any) -> list[str]:
    """Kinds of findings of a run with everything wrong, rank 1 slowest, of which only the last samples are there."""
    events = [event for index in range(steps) for rank in range(2)
              for event in step(rank, index, **{**SICK, "compute": 40.0 + 30 * rank, **changed})
              if event.name != "utilization" or index >= steps - samples]
    return [finding.kind for finding in findings(gather(events, world_size=2, strategy="ddp", cores=8))]


@pytest.mark.parametrize("steps", range(1, 6))
def test_times_of_a_few_steps_are_not_judged(steps: int) -> None:
    assert sick(steps, steps) == []
    assert set(sick(6, 6)) == {"communication", "data", "small-buckets", "straggler"}


def test_a_rank_that_has_ended_no_step_holds_judgement_back() -> None:
    events = [event for index in range(9) for event in step(0, index, **SICK)]
    assert findings(gather(events, world_size=2, strategy="ddp", cores=8)) == []
    assert findings(gather(events, world_size=1, strategy="ddp", cores=8))


def test_a_device_is_judged_by_some_samples_of_its_steps() -> None:
    calm = {"exposed": 5.0, "data": 2.0, "buckets": 1, "compute": 90.0}
    assert sick(12, 3, **calm) == []
    assert sick(12, 4, **calm) == ["utilization"]
    assert sick(12, 4, gpu=50.0, cpu=99.0, **calm) == ["utilization"]
    # samples of the warm-up are none: a rank that imports and builds says nothing of how it trains
    assert sick(6, 5, **calm) == sick(6, 6, **calm) == ["utilization"]
    assert sick(5, 5, **calm) == []


def test_a_gpu_with_few_samples_is_not_judged_by_its_rank_s_core() -> None:
    events = [event._replace(attrs={**event.attrs, "gpu": 50.0}) if event.name == "utilization" and index > 9 else event
              for index in range(12) for event in step(0, index, **{**GOOD, "cpu": 30.0, "exposed": 0.0})]
    assert findings(gather(events, world_size=1, strategy="ddp", cores=8)) == []


def test_fragments_of_gpu_memory() -> None:
    held = {"reserved": 10e9, "allocated": 6e9, "fragmentation": 4e9}
    seen = only("fragmentation", memory=held)
    assert seen.what == "40% of rank 0's GPU memory is fragments"
    assert "expandable_segments:True" in seen.remedy
    # at a step's end, when the gauge is taken, activations lie in no tensor any more: they are no fragments
    assert found(memory={**held, "activations": 3e9}) == []


def of_allocator(*counts: tuple[int, int], limit: float | None = 80e9, strategy: str = "zero1",
                 **memory: float) -> list[Finding]:
    """Two ranks' steps; rank 1's gauges tell so many retries and failures, one pair a step, the last one on."""
    events = [Event("gauge", "layout", rank, 0, 0, 0, {"limit": limit}) for rank in range(2)]
    for index in range(12):
        told = counts[min(index, len(counts) - 1)]
        for rank in range(2):
            held = {"reserved": 72e9, "allocated": 70e9, "fragmentation": 2e9, "activations": 1e9, **memory}
            events += step(rank, index, **GOOD, memory={**held, **dict(zip(
                ("num_alloc_retries", "num_ooms"), told if rank else (7, 0), strict=True))})
    return findings(gather(events, world_size=2, strategy=strategy, cores=8))


def test_an_allocator_that_had_to_begin_again() -> None:
    (seen,) = of_allocator((3, 0), (3, 0), (5, 0), (8, 0), optimizer=40e9)
    assert (seen.kind, seen.cost, seen.gain) == ("allocator-retries", 0.0, None)
    assert seen.what == "rank 1's GPU ran out of memory 5 times and went on"
    assert seen.evidence == ("cudaMalloc failed 5 times within 11 steps; each time every cached block was freed, which "
                             "waits for all kernels, and it was asked again; 72.00 GB are reserved, 90% of the GPU's")
    assert seen.remedy == ("the next stage of ZeRO: zero1 cuts the optimizer's state into pieces, zero2 gradients, "
                           "zero3 weights; where much of it is fragments, PYTORCH_ALLOC_CONF=expandable_segments:True, "
                           "set before the start")
    (seen,) = of_allocator((0, 0), (1, 1), limit=None)
    assert seen.what == "rank 1's GPU ran out of memory once and went on"
    assert "asked again (in vain once); 72.00 GB are reserved" in seen.evidence
    assert seen.remedy.startswith("'zero1+recompute' computes activations again")


def test_retries_of_building_the_model_and_of_a_process_that_is_gone_do_not_count() -> None:
    assert of_allocator((6, 0)) == []
    (seen,) = of_allocator((6, 0), (7, 0), (0, 0), (2, 0))      # started again after the second
    assert "ran out of memory 3 times" in seen.what


def test_a_run_that_recorded_no_retries_is_judged_as_before() -> None:
    assert found(memory={"reserved": 10e9, "allocated": 9e9, "fragmentation": 1e9}) == []


def of_memory(strategy: str, limit: float, *, again: float = 0.0, dropped: int = 0,
              **memory: float) -> list[Finding]:
    """Two ranks' steps of 100 ms, `again` of them computing activations again, with a limit."""
    events: list[Event] = []
    for rank in range(2):
        events.append(Event("gauge", "layout", rank, 0, 0, 0, {"limit": limit, "limit_of": "host, all ranks"}))
    for index in range(12):
        for rank in range(2):
            mine = list(step(rank, index, **GOOD, memory=memory))
            backward = next(event for event in mine if event.kind == "backward")
            place = mine.index(backward)
            for part in range(2):      # two blocks
                begin = backward.t0 + int(part * again / 2 * MS)
                mine.insert(place + part, Event("recompute", f"blocks.{part}", rank, index, begin,
                                                begin + int(again / 2 * MS), {"bytes": dropped // 2}))
            events += mine
    return findings(gather(events, world_size=2, strategy=strategy, cores=8))


@pytest.mark.parametrize(("strategy", "parts", "remedy"), [
    ("zero1", {"activations": 3e9, "params": 1e9}, "'zero1+recompute' computes activations again"),
    ("zero1+recompute", {"activations": 3e9, "params": 1e9}, "a smaller micro-batch"),
    ("zero1", {"activations": 1e9, "optimizer": 3e9}, "the next stage of ZeRO"),
    ("zero3", {"activations": 1e9, "optimizer": 3e9}, "a smaller micro-batch")])
def test_memory_that_is_nearly_full(strategy: str, parts: dict[str, float], remedy: str) -> None:
    (seen,) = of_memory(strategy, 10e9, process=4.7e9, **parts)
    most = max(parts, key=lambda name: parts[name])
    assert (seen.kind, seen.cost, seen.gain) == ("memory", 0.0, None)
    assert seen.what == "the memory of the host is 94% full"
    assert seen.evidence == f"9.40 of 10.00 GB; of what rank 0 holds {most} are the most, 3.00 GB"
    assert seen.remedy.startswith(remedy)
    assert of_memory(strategy, 10e9, process=4.4e9, **parts) == []
    (seen,) = of_memory(strategy, 10e9, process=1e9, reserved=9.4e9, **parts)      # a GPU is one rank's
    assert seen.what == "the memory of rank 0's GPU is 94% full"


def test_activations_computed_again_that_would_fit() -> None:
    (seen,) = of_memory("zero2+recompute", 10e9, again=20.0, dropped=1_000_000_000, process=2e9)
    assert seen.what == "20% of a step computes activations again that would fit"
    assert seen.evidence == "1000.0 MB a rank are not kept; with them the memory would be 60% full, of 10.00 GB"
    assert (seen.cost, seen.gain) == (pytest.approx(0.2), pytest.approx(0.2))
    assert of_memory("zero2+recompute", 10e9, again=20.0, dropped=2_500_000_000, process=2e9) == []
    assert of_memory("zero2+recompute", 0, again=20.0, dropped=1_000_000_000, process=2e9) == []


def test_pauses_and_the_first_steps_do_not_count() -> None:
    events = [event for index in range(12) for rank in range(2) for event in step(
        rank, index, **{**GOOD, **({"data": 500.0} if index < 2 else {}), "pause": 400.0 if index % 5 == 4 else 0.0})]
    facts = gather(events, world_size=2, strategy="ddp", cores=8)
    assert facts.step == pytest.approx(100.0)
    assert facts.steps == 10
    assert findings(facts) == []


def test_the_most_expensive_comes_first_and_everything_is_told() -> None:
    seen = found(compute=40.0, exposed=45.0, data=12.0)
    assert [finding.kind for finding in seen] == sorted([f.kind for f in seen], key=lambda k: -only(
        k, compute=40.0, exposed=45.0, data=12.0).cost)
    told = Diagnosis(run="r", summary="12 steps", findings=tuple(seen))
    assert str(told).startswith("run r: 12 steps\n1. ")
    assert "(predicted: " in str(told)
    assert told.to_dict()["findings"][0]["kind"] == seen[0].kind
    assert "<table>" in told._repr_html_()
    assert "nothing to complain of" in str(Diagnosis(run="r", summary="s", findings=(), steps=1))
    assert str(Diagnosis(run="r", summary="no step yet", findings=())) == "run r: no step yet"


def test_nothing_is_judged_before_a_step_has_ended() -> None:
    assert findings(gather([], world_size=2, strategy="ddp", cores=2)) == []
