"""Shards cut inside a node with copies across nodes, and the optimizer on the host: against closed forms and papers."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

import dplab
from dplab.cli import main
from dplab.errors import UsageError
from dplab.planner import configs, cost, grid, machine, memory
from dplab.planner.grid import Space
from dplab.planner.hardware import cluster, of_machine
from dplab.planner.recipes import recipe
from dplab.planner.search import plan
from dplab.planner.simulate import simulate
from dplab.planner.split import OFFLOAD, Split
from dplab.topology import link

NODES = cluster("4x8xA100-SXM-80GB")


def states(split):
    return memory.states(1e9, split, recipe("states-16"))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_states_are_cut_over_a_group_alone(zero):
    hybrid, one_node = states(Split(dp=32, zero=zero, groups=4)), states(Split(dp=8, zero=zero))
    assert {name: float(size) for name, size in hybrid.items()} == {
        name: float(size) for name, size in one_node.items()}


def test_a_group_reduces_and_its_slices_are_summed_over_nodes():
    profile, program = configs.model("llama-7b"), recipe("modern")
    groups = cost.pieces(profile, Split(dp=32, zero=3, groups=4), NODES, program).groups
    inside = cost.pieces(profile, Split(dp=8, zero=3), cluster("8xA100-SXM-80GB"), program).groups.shard
    assert float(groups.shard.all_gather(1e9)) == float(inside.all_gather(1e9))
    across = float(groups.reduce_scatter(1e9)) - float(inside.reduce_scatter(1e9))
    bandwidth = min(NODES.link * program.link_share, NODES.network * program.network_share)
    assert across == pytest.approx(2 * 3 / 4 * 1e9 / 8 / bandwidth, rel=0.01)      # and the trees' latency
    flat = cost.pieces(profile, Split(dp=32, zero=3), NODES, program).groups
    assert float(flat.shard.all_gather(1e9)) > 2 * float(groups.shard.all_gather(1e9))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_simulated_hybrid_step_sends_what_the_formula_says(zero):
    """Of gradients 7/8 inside a node and 2 x 3/4 of an eighth across; of weights 7/8 inside, ZeRO-3 twice."""
    profile, program = configs.model("llama-7b"), recipe("modern")
    split = Split(dp=32, zero=zero, groups=4)
    events = simulate(profile, split, NODES, program).events
    sent = {name: sum(event.attrs["bytes"] for event in events if event.name == name)
            for name in ("reduce_scatter", "all_gather")}
    grads = profile.parameters * float(cost.wire_bytes(split, program))
    weights = profile.parameters * cost.gather_bytes(program)
    assert sent["reduce_scatter"] == pytest.approx((7 / 8 + 2 * 3 / 4 / 8) * grads, rel=1e-3)
    assert sent["all_gather"] == pytest.approx(7 / 8 * weights * (2 if zero == 3 else 1), rel=1e-3)


def test_the_search_offers_hybrid_sharding_where_shards_would_leave_a_node():
    found = plan("llama-7b", NODES, 1_048_576, data_parallel_only=True, top=20)
    hybrid = [one for one in found.plans if one.mesh]
    assert {one.mesh for one in hybrid} == {(4, 8)}
    assert {one.split.zero for one in hybrid} <= {1, 2, 3}
    told = next(row for row in json.loads(json.dumps(found.to_dict()))["plans"] if row["mesh"])
    assert told["mesh"] == [4, 8]
    assert "shards stay in 4 groups of 8" in told["why"]
    assert hybrid[0].strategy.hybrid
    assert dplab.Strategy.parse(str(hybrid[0])) == hybrid[0].strategy
    assert not any(one.mesh for one in plan("llama-7b", "8xA100-SXM-80GB", 1_048_576, top=20).plans)
    slow = plan("llama-7b", NODES, 1_048_576, data_parallel_only=True, network="10Gb/s", space=Space(zero=(3,)))
    assert slow.best.mesh == (4, 8)


def test_an_offloaded_optimizer_leaves_two_bytes_a_parameter():
    """DeepSpeed's estimator, as its documentation prints it: T5-3B under ZeRO-2, optimizer on the CPU, 5.31 GB a GPU
    (in units of 2^30)."""
    held = memory.states(2851e6, Split(dp=8, zero=2, offload=1), recipe("states-16"))
    assert round(sum(map(float, held.values())) / 2**30, 2) == 5.31
    host = memory.offloaded(2851e6, Split(dp=8, zero=2, offload=1), recipe("states-16"))
    assert float(host) == 2851e6 / 8 * (2 + 4 + 8 + 2)
    assert float(memory.offloaded(1e9, Split(dp=8, zero=2), recipe("states-16"))) == 0


def gpt(layers, hidden, name):
    return {"name": name, "model_type": "gpt2", "n_layer": layers, "n_embd": hidden, "n_head": hidden // 128,
            "n_positions": 1024, "vocab_size": 50304}


@pytest.mark.parametrize(("layers", "hidden", "offload", "fits"), [
    (65, 4096, True, True), (65, 4096, False, False), (40, 1664, False, True), (60, 1664, False, False)],
    ids=["13B offloaded", "13B", "1.4B", "2B"])
def test_what_fits_on_one_v100_of_32_gb(layers, hidden, offload, fits):
    """Ren et al. 2021, arXiv:2101.06840: 13 billion parameters with ZeRO-Offload, 1.4 billion with PyTorch alone."""
    space = Space(offload=OFFLOAD) if offload else Space()
    wanted = {"precision": "fp16", "recipe": "megatron-2021", "space": space, "memory_limit": 31.7 * 2**30}
    if fits:
        best = plan(gpt(layers, hidden, "gpt"), "1xV100-SXM-32GB", 32 * 1024, **wanted).best
        assert bool(best.split.offload) == offload
    else:
        with pytest.raises(UsageError, match=r"fits nowhere on 1 x V100-SXM-32GB"):
            plan(gpt(layers, hidden, "gpt"), "1xV100-SXM-32GB", 32 * 1024, **wanted)


def test_a_step_on_the_host_is_as_slow_as_its_memory_or_its_link():
    profile, program = configs.model("llama-7b"), recipe("states-16")
    place = cluster("8xA100-SXM-80GB")
    split = Split(dp=8, zero=2, offload=1)
    made = cost.pieces(profile, split, place, program)
    owned = profile.parameters / 8
    bytes_ = owned * (2 * 2 + 2 * (4 + 8) + 2)
    assert float(cost.optimizer(made, split, place, program)) == pytest.approx(bytes_ / (110e9 / 8), rel=1e-3)
    thin = replace(place, gpu=replace(place.gpu, host_link=1e8))
    backward = float(made.layers.backward + made.head.backward)
    told = float(cost.optimizer(made, split, thin, program))
    assert told == pytest.approx(owned * 2 / 1e8 - backward + owned * 2 / 1e8, rel=1e-3)
    assert float(cost.optimizer(made, Split(dp=8, zero=2), place, program)) < told / 10
    assert place.gpu.host_link == link("PCIe4").bandwidth


def test_offloading_is_asked_for_and_told(capsys):
    call = ["plan", "--model", "llama-7b", "--cluster", "1xA100-SXM-80GB", "--tokens-per-step", "131072"]
    assert main(call) == 2
    assert "so would these with the optimizer on the host (--offload)" in capsys.readouterr().err
    assert main([*call, "--offload", "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["plans"][0]
    assert best["offload"] == "optimizer"
    strategy = dplab.Strategy.parse(best["strategy"])
    assert (strategy.offload, strategy.precision.name) == ("optimizer", "bf16")
    told = dplab.estimate("llama-7b", best["dp"], strategy, micro_batch=best["micro_batch"])
    assert told.host_bytes == best["host_bytes"]
    assert told.total_bytes == pytest.approx(best["memory_bytes"], rel=0.02)
    assert best["host_bytes"] > 12 * 6.7e9
    assert "GiB a rank on the host" in best["why"]
    with pytest.raises(UsageError, match=r"there is nothing to offload to on 2 ranks of this-machine"):
        plan("tiny-gpt", of_machine(machine.DEFAULT), 2048, space=Space(offload=OFFLOAD))


def test_candidates_name_nothing_twice():
    split = grid.candidates(NODES, 256, configs.model("llama-7b"), recipe("modern"), Space(offload=OFFLOAD))
    rows = np.stack([np.asarray(getattr(split, name)) for name in (
        "dp", "tp", "pp", "zero", "micro_batch", "recompute", "chunks", "groups", "offload")], axis=1)
    assert len(np.unique(rows, axis=0)) == len(rows)
    assert not np.any((split.zero == 0) & ((split.groups > 1) | (split.offload > 0)))
    assert np.all(split.groups * split.shard == split.dp)


@pytest.mark.parametrize(("strategy", "here", "there"), [
    ("zero1+bf16+offload=optimizer", {"params": 2, "grads": 2}, 16),
    ("zero2+bf16+offload=optimizer", {"params": 2}, 16),
    ("zero3+bf16+offload=optimizer", {"params": 0.25}, 16), ("zero3+bf16+offload=all", {}, 16),
    ("zero3+bf16+offload=parameters", {"grads": 0.25, "optimizer": 1, "master": 0.5}, 2),
    ("zero2+fp32+offload=optimizer", {"params": 4}, 16),
    ("zero2+bf16+accum4+offload=optimizer", {"params": 2}, 4 + 4 + 8 + 4 + 2)])
def test_estimate_and_explain_tell_device_and_host(strategy, here, there):
    told = dplab.estimate(8e9, 8, strategy)
    assert {name: size / 8e9 for name, size in told.model_states_bytes.items() if size and name != "total"} == here
    assert told.host_bytes == 1e9 * there
    assert "   in the host's memory" in str(told)
    assert "iB   in the host's memory" in told.explain()
    row = dplab.explain(strategy, 8e9, 8)
    assert (row.total_bytes, row.to_dict()["host_bytes"]) == (told.total_bytes, told.host_bytes)
    assert f"offload={dplab.Strategy.parse(strategy).offload}, where a GPU computes; on CPU ranks it moves nothing" in (
        str(row))
    assert row.states_formula == told.formula
    assert "in the host's memory" not in str(dplab.estimate(8e9, 8, strategy.partition("+offload")[0]))


def test_a_whole_model_may_be_offloaded(capsys):
    assert main(["estimate", "--model", "llama-7b", "--world-size", "8", "--strategy", "zero3+offload=all",
                 "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["model_states_bytes"] == {"params": 0, "grads": 0, "optimizer": 0, "master": 0, "total": 0}
    assert told["host_bytes"] == told["params"] * 2
    kept = dplab.estimate("llama-7b", 8, "zero3")
    assert told["activations_bytes"] == kept.activations_bytes
    assert told["other_bytes"]["gathered"] == kept.other_bytes["gathered"] > 0
    assert main(["estimate", "--params", "1e9", "--world-size", "2", "--strategy", "ddp+offload=optimizer"]) == 2
    assert "ddp shards nothing; use zero1, zero2 or zero3" in capsys.readouterr().err
