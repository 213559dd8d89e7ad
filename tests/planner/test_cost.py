"""Collectives against measured curves, steps against hand sums and laws of scaling, and their simulation."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dplab.planner import compute, configs, cost, published
from dplab.planner.collectives import Group, Groups
from dplab.planner.explain import explain
from dplab.planner.footprint import volume
from dplab.planner.hardware import cluster, gpu
from dplab.planner.recipes import Recipe, recipe
from dplab.planner.simulate import simulate
from dplab.planner.split import Split
from dplab.specs import PRECISIONS, SHARDINGS
from dplab.telemetry.summary import Summary

NODE = cluster("8xA100-SXM-80GB")
MODERN = recipe("modern")


@pytest.mark.parametrize("name", ["vtrain-nccl-ar8-1MB", "vtrain-nccl-ar8-50MB"])
def test_all_reduce_in_a_node_against_a_measured_table(name):
    case = published.case(name)
    size = case.config["bytes"]
    seconds = float(Group.of(8, 8, NODE, MODERN).all_reduce(size))
    assert 2 * 7 / 8 * size / seconds / 1e9 == pytest.approx(case.value, rel=0.12)


def test_bandwidth_terms_are_the_rings():
    group = Group.of(4, 4, NODE, MODERN)
    large, small = 8e9, 4e9
    slope = float(group.all_reduce(large) - group.all_reduce(small)) / (large - small)
    assert slope == pytest.approx(2 * 3 / 4 / (300e9 * MODERN.link_share))
    assert float(group.all_gather(large) - group.all_gather(small)) * 2 == pytest.approx(slope * (large - small))
    assert float(Group.of(1, 1, NODE, MODERN).all_reduce(1e9)) == 0


def test_placement_decides_the_bandwidth():
    """Tensor ranks lie beside each other; a data group that crosses nodes has a NIC for each member in a node."""
    big = cluster("8x8xA100-SXM-80GB")
    groups = Groups.of(Split(dp=8, tp=8), big, MODERN)
    assert float(groups.tensor.bandwidth) == 300e9 * MODERN.link_share
    assert float(groups.data.bandwidth) == 25e9 * MODERN.network_share
    assert float(Groups.of(Split(dp=64), big, MODERN).data.bandwidth) == 8 * 25e9 * MODERN.network_share
    assert float(Groups.of(Split(dp=4, tp=2), big, MODERN).data.bandwidth) == 300e9 * MODERN.link_share
    across = Groups.of(Split(dp=4, tp=16), big, MODERN)
    assert float(across.tensor.bandwidth) == 8 * 25e9 * MODERN.network_share


def test_a_large_product_runs_at_the_sustained_speed_and_a_thin_one_at_the_memorys():
    a100 = gpu("A100-SXM-80GB")
    rows = 16384
    seconds = float(compute.product(rows, 16384, 16384, a100, MODERN))
    assert 2 * rows * 16384**2 / seconds / 312e12 == pytest.approx(a100.sustained, rel=0.03)
    thin = float(compute.product(1, 16384, 16384, a100, MODERN))
    assert thin >= 2 * 16384**2 / a100.memory_bandwidth


def test_parts_of_a_step_by_hand():
    """One GPU, one layer, nothing overlapped: the sum of its products, attention and traffic."""
    profile = configs.model({"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 4096, "vocab_size": 8,
                             "num_attention_heads": 32, "intermediate_size": 11008}, sequence=2048)
    program = replace(MODERN, passes=0.0, host=0.0)
    part = gpu("A100-SXM-80GB")
    made = cost.predict(profile, Split(), cluster("1xA100-SXM-80GB"), program)
    layer = compute.layer(profile.blocks[0], Split(), part, program)
    products = sum(float(compute.product(2048, columns, depth, part, program)) for columns, depth in [
        (3 * 4096, 4096), (4096, 4096), (2 * 11008, 4096), (4096, 11008)])
    attention = 4 * 2048 * 2048 * 4096 / 2 / (312e12 * part.flash[0])
    assert float(layer.forward) == pytest.approx(products + attention)
    assert float(layer.backward) == pytest.approx(2 * products + 2.5 * attention * part.flash[0] / part.flash[1])
    assert float(made.parts["bubble"]) == float(made.parts["data"]) == float(made.parts["tensor"]) == 0


def test_mfu_and_hfu_are_what_their_names_say():
    profile = configs.model("gpt3-6.7b")
    plain = cost.predict(profile, Split(dp=8), NODE, MODERN)
    again = cost.predict(profile, Split(dp=8, recompute=2), NODE, MODERN)
    assert float(plain.mfu) == pytest.approx(float(plain.hfu))
    assert float(again.hfu / again.mfu) == pytest.approx(profile.hardware_flops("full") / profile.model_flops())
    assert float(plain.mfu) * 312e12 * 8 * float(plain.step) == pytest.approx(profile.model_flops() * 8)
    assert float(plain.tokens_per_second) == pytest.approx(8 * 2048 / float(plain.step))
    assert "MFU" in again.explain()
    assert "HFU" in again.explain()


def test_data_parallelism_scales_to_16384_ranks_and_pays_for_it():
    profile = configs.model("llama-7b")
    ranks = 2 ** np.arange(3, 15)
    steps = np.array([float(cost.predict(profile, Split(dp=int(n), zero=zero, micro_batch=2), replace(
        NODE, count=int(n)), MODERN).step) for zero in range(4) for n in ranks]).reshape(4, -1)
    assert ranks[-1] == 16384
    assert np.all(np.isfinite(steps))
    assert np.all(steps[:, -1] >= steps[:, 0])
    assert steps[3, -1] > 1.1 * steps[0, -1], "gathering each unit from 16,384 ranks costs latency"
    assert steps[0, -1] < 1.5 * steps[0, 0], "an all-reduce behind the backward scales"


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("accumulate", [1, 3])
def test_simulated_ranks_send_what_the_footprint_counts(zero, accumulate):
    profile, program = configs.model("gpt2-medium"), replace(MODERN, grad=4, param=4, element=4, dtype="fp32")
    split = Split(dp=4, zero=zero, accumulate=accumulate)
    summary = Summary().feed(simulate(profile, split, cluster("4xA100"), program).events)
    shard, replicate = (1, 4) if zero == 0 else (4, 1)
    counted = volume(profile.parameters, sharding=SHARDINGS[["ddp", "zero1", "zero2", "zero3"][zero]], shard=shard,
                     replicate=replicate, accumulate=accumulate, reduces_every_backward=zero >= 2)
    for name, elements in counted.items():
        assert summary.wire.get(name, {"bytes": 0})["bytes"] == pytest.approx(4 * elements, rel=1e-4), name


SETUPS = [case for case in published.cases() if case.kind in ("throughput", "best-config") and case.stem in (
    "mosaic", "sc21", "nanotron", "zb", "titan", "recomp", "vtrain")]


def test_the_simulation_and_the_closed_form_agree():
    ratios = []
    for case in SETUPS:
        try:
            made = published.setup(case)
        except published.Unusable:
            continue
        if made.split.pp * made.split.accumulate < 4000:
            closed = cost.predict(made.profile, made.split, made.cluster, made.recipe)
            told = simulate(made.profile, made.split, made.cluster, made.recipe)
            ratios.append(told.step / float(closed.step))
    assert len(ratios) > 120
    assert np.mean(np.abs(np.array(ratios) - 1)) < 0.015
    assert min(ratios) > 0.9
    assert max(ratios) < 1.1


@settings(deadline=None, max_examples=40)
@given(zero=st.integers(0, 3), accumulate=st.integers(1, 4), dp=st.sampled_from([1, 2, 8]),
       pp=st.sampled_from([1, 2, 4]))
def test_simulated_events_are_a_measured_runs_kind(zero, accumulate, dp, pp):
    split = Split(dp=dp, pp=pp, zero=0 if pp > 1 else zero, accumulate=accumulate * pp)
    told = simulate(configs.model("gpt2"), split, NODE, MODERN)
    summary = Summary().feed(told.events)
    assert summary.step_ms == pytest.approx(told.step * 1e3, rel=1e-6)
    assert {event.rank for event in told.events} == set(range(pp))
    for event in told.events:
        assert 0 <= event.t0 <= event.t1 <= round(told.step * 1e9)
        assert type(event).from_line(event.to_line(), event.rank) == event
    for rank in range(pp):
        lane = sorted((event.t0, event.t1) for event in told.events
                      if event.rank == rank and event.kind in ("forward", "backward", "optimizer"))
        assert all(end <= start + 1 for (_, end), (start, _) in itertools.pairwise(lane))
        exposed = sum(event.attrs["exposed"] for event in told.events
                      if event.rank == rank and event.kind == "collective")
        assert 0 <= exposed <= told.step * 1e9
    assert 0 < told.busy() <= 1 + 1e-6


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_bytes_on_the_wire_are_those_that_explain_tells(name, accumulate):
    numel = configs.model("gpt2-medium").parameters
    told = explain(f"{name}+bf16" + (f"+accum{accumulate}" if accumulate > 1 else ""), numel, 4)
    split = Split(dp=4, zero=list(SHARDINGS).index(name), accumulate=accumulate)
    program = Recipe().with_precision(PRECISIONS["bf16"])
    summary = Summary().feed(simulate(configs.model("gpt2-medium"), split, cluster("4xA100"), program).events)
    for collective, size in told.bytes_sent.items():
        assert summary.wire.get(collective, {"bytes": 0})["bytes"] == pytest.approx(size, rel=1e-4), collective


def test_overlap_and_recipes_change_what_they_should():
    profile = configs.model("gpt3-6.7b")
    big, split = cluster("8x8xA100-SXM-80GB"), Split(dp=64)
    open_ = cost.predict(profile, split, big, replace(MODERN, overlap=False))
    behind = cost.predict(profile, split, big, MODERN)
    assert float(open_.hidden) == 0
    assert float(open_.parts["data"]) > 2 * float(behind.parts["data"])
    faster = cost.predict(profile, Split(dp=8), NODE, replace(MODERN, efficiency=2.0))
    assert float(faster.parts["compute"]) < 0.7 * float(
        cost.predict(profile, Split(dp=8), NODE, Recipe()).parts["compute"])


def test_a_convolutional_net_runs_its_stated_flops():
    made = cost.predict(configs.model("resnet-50"), Split(dp=8, micro_batch=128), NODE, MODERN)
    assert 0.1 < float(made.mfu) < 0.25
    assert simulate(configs.model("resnet-50"), Split(dp=8, micro_batch=128), NODE, MODERN).step > 0
