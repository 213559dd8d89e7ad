"""What a run on emulated links would take: against schedules worked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dplab.errors import UsageError
from dplab.planner import cost, machine
from dplab.planner.hardware import of_machine
from dplab.planner.machine import Pace
from dplab.planner.recipes import RECIPES
from dplab.planner.single import predict
from dplab.planner.split import Split
from dplab.topology import Topology

FAST = [[1.0, 1e-9], [1e9, 1e-8]]
"""A local wire that takes next to nothing."""
LINK = "1Gb/s:100us"
RATE, LATENCY = 125e6, 1e-4


def quiet(*, ranks=2, contention=0.0):
    """A machine whose own wire is no matter, so that all that a collective takes is the link's."""
    wire = {"shm": dict.fromkeys(("all_reduce", "reduce_scatter", "all_gather"), FAST)}
    paces = {name: Pace(fixed=0.01, factor=0.0) for name in machine.DEFAULT.paces}
    known = replace(machine.DEFAULT, wire=wire, contention={"shm": contention}, cores=ranks, paces=paces,
                    optimizer=Pace(fixed=0.001, factor=0.0))
    return of_machine(known, ranks, "shm")


def test_two_buckets_queue_on_the_link():
    """tiny-gpt's 875,264 gradients of 4 bytes are two buckets under a large cap: what comes last is kept small. Two
    ranks each send all of a bucket once, in two steps of the ring. Forward and backward take 10 ms a layer and 10 ms
    for the ends: the first bucket is full with the third layer, 90 ms into the step, the other 10 ms later."""
    plan = predict("tiny-gpt", quiet(), f"ddp+bucket_mb=100+topology=2x1@{LINK}")
    first, second = 2_504_704, 996_352
    assert first + second == 875_264 * 4
    carried = 0.090 + (2 * LATENCY + first / RATE) + (2 * LATENCY + second / RATE)
    assert carried > 0.100
    assert plan.step == pytest.approx(carried + 0.001)


def test_bucket_size_has_a_best_in_between():
    """Small ones pay latency again and again, large ones hide nothing."""
    steps = [predict("bench-gpt", quiet(), f"ddp+bucket_mb={size}+topology=2x1@1Gb/s:2ms").step
             for size in (0.05, 4, 100)]
    assert steps[1] < steps[0]
    assert steps[1] < steps[2]


def test_fewer_bytes_take_less_of_the_link():
    wide, narrow, bytes_ = (predict("tiny-gpt", quiet(), f"ddp+bucket_mb=100{wire}+topology=2x1@100Mb/s:100us")
                            for wire in ("", "+wire=bf16", "+wire=int8"))
    assert wide.step - narrow.step == pytest.approx(875_264 * 2 / (RATE / 10))
    assert wide.step - bytes_.step == pytest.approx(875_264 * (4 - 1 - 4 / 128) / (RATE / 10))
    with pytest.raises(UsageError, match=r"what wire=powersgd4 sends depends on every matrix's shape and is not"):
        predict("tiny-gpt", quiet(), "ddp+wire=powersgd4")


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_two_levels_send_less_between_hosts(strategy):
    """Of two hosts of two ranks: the step is that of the topology's own costs, and shorter than a flat ring's."""
    flat, hybrid = (predict("bench-gpt", quiet(ranks=4), f"{strategy}{levels}+bucket_mb=100+topology=2x2@{LINK}")
                    for levels in ("", "+hybrid"))
    assert hybrid.step < flat.step
    place = Topology.parse(f"2x2@{LINK}")
    groups = cost.pieces(hybrid.cost.profile, hybrid.split, hybrid.cost.cluster, RECIPES["dplab"]).groups
    size = 1e7
    if strategy == "ddp":
        assert float(groups.data.all_reduce(size)) == pytest.approx(place.seconds("hierarchical_all_reduce", size))
    else:
        assert hybrid.split.groups == 2
        assert float(groups.shard.all_gather(size)) == pytest.approx(place.seconds("all_gather", size, [0, 1]))
        across = float(groups.reduce_scatter(size)) - float(groups.shard.reduce_scatter(size))
        assert across == pytest.approx(2 * (2 * LATENCY + size / 2 / RATE))      # two columns share a host's card


def test_waiting_for_a_link_costs_compute_nothing_and_moving_bytes_does():
    slow = quiet(contention=1.0)
    wire = {name: [[1.0, 1e-9], [4e6, 0.01]] for name in ("all_reduce", "reduce_scatter", "all_gather")}
    moved = replace(slow, gpu=replace(slow.gpu, measured=replace(slow.gpu.measured, wire={"shm": wire})))
    plans = [predict("tiny-gpt", place, f"ddp+topology=2x1@{LINK}") for place in (slow, moved)]
    shares = [cost.pieces(plan.cost.profile, plan.split, plan.cost.cluster, RECIPES["dplab"]).groups.moving(
        875_264 * 4.0) for plan in plans]
    assert shares[0] < 1e-3
    assert shares[1] == pytest.approx(0.01 * 875_264 / 1e6 / (2 * LATENCY + 875_264 * 4 / RATE), rel=0.3)
    assert plans[1].step > plans[0].step


def test_a_topology_of_other_ranks_is_refused():
    with pytest.raises(UsageError, match=r"has 4 ranks .* and the world has 2; start 4 ranks"):
        predict("tiny-gpt", quiet(), "ddp+topology=2x2@10gbe")
    with pytest.raises(UsageError, match="hybrid needs several hosts"):
        predict("tiny-gpt", quiet(), "zero1+hybrid+topology=2x1@10gbe")


def test_elsewhere_no_links_are_emulated():
    plain, linked = (predict("gpt2-medium", "8xA100-SXM-80GB", f"zero2{text}") for text in ("", "+topology=8@pcie3"))
    assert plain.step == linked.step
    assert Split().groups == 1
