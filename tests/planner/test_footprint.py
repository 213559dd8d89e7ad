"""Memory and volume against the literature's tables, against sums done another way, and against their limits."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dplab.errors import UsageError
from dplab.planner.footprint import (
    ElementBytes,
    estimate,
    model_states,
    transients,
    volume,
)
from dplab.planner.shape import ModelShape
from dplab.specs import DDP, PRECISIONS, SHARDINGS, ZERO1, ZERO2, ZERO3, Precision, Strategy

ZERO_FIGURE_1 = {"ddp": 120, "zero1": 31.4, "zero2": 16.6, "zero3": 1.9}
"""GB a device for 7.5e9 parameters on 64 devices, arXiv:1910.02054 figure 1."""

ZERO_TABLE_1 = {("zero3", 7.5e9, 4): 30, ("zero3", 1e12, 1024): 15.6, ("zero1", 7.5e9, 4): 52.5,
                ("zero2", 7.5e9, 16): 21.6, ("zero2", 128e9, 256): 263}
"""GB a device, arXiv:1910.02054 table 1."""



@pytest.mark.parametrize("strategy", ZERO_FIGURE_1)
def test_zero_paper_figure_1(strategy):
    result = estimate(params=7.5e9, world_size=64, strategy=strategy)
    assert round(result.total_bytes / 1e9, 1) == ZERO_FIGURE_1[strategy]
    assert result.total_bytes == result.model_states_bytes["total"]


@pytest.mark.parametrize(("strategy", "params", "ranks"), ZERO_TABLE_1)
def test_zero_paper_table_1(strategy, params, ranks):
    result = estimate(params=params, world_size=ranks, strategy=strategy)
    assert result.total_bytes / 1e9 == pytest.approx(ZERO_TABLE_1[strategy, params, ranks], rel=0.024)


@pytest.mark.parametrize(("sharding", "kept", "cut"), [(DDP, 16, 0), (ZERO1, 8, 8), (ZERO2, 4, 12), (ZERO3, 0, 16)])
def test_fp32_states_are_exact_integers(sharding, kept, cut):
    numel, ranks = 128 * 12, 4
    states = model_states(numel, sharding=sharding, shard=ranks)
    assert sum(states.values()) == numel * kept + numel * cut // ranks
    assert all(isinstance(size, int) for size in states.values())
    assert states["master"] == 0


def test_gradients_that_accumulate_are_fp32_so_16_becomes_18_bytes_a_parameter():
    assert ElementBytes.of(PRECISIONS["bf16"]).total == 16
    assert ElementBytes.of(PRECISIONS["bf16"], accumulate=4).total == 18
    assert ElementBytes.of(PRECISIONS["fp32"], accumulate=4).total == 16
    assert ElementBytes.of(PRECISIONS["fp32"], model="fp64").total == 32
    assert ElementBytes.of(Precision(param="bf16")).total == 8, "bf16 throughout: no master, states in bf16"


def test_a_window_that_reduces_once_holds_whole_gradients():
    sharded = model_states(1024, sharding=ZERO2, shard=4, accumulate=3)
    whole = model_states(1024, sharding=ZERO2, shard=4, accumulate=3, reduces_every_backward=False)
    assert sharded["grads"] == 1024 * 4 // 4
    assert whole["grads"] == 1024 * 4
    assert estimate(params=1024, world_size=4, strategy="zero2+fp32+accum3+accumulate_mode=window"
                    ).model_states_bytes["grads"] == whole["grads"]


@pytest.mark.parametrize("name", SHARDINGS)
@given(numel=st.integers(1, 10**9), shard=st.integers(1, 64))
def test_shards_add_up_to_the_whole(name, numel, shard):
    """N ranks together hold a sharded category once and a replicated one N times."""
    whole = model_states(numel, sharding=DDP, shard=1, precision=PRECISIONS["bf16"])
    part = model_states(numel, sharding=SHARDINGS[name], shard=shard, precision=PRECISIONS["bf16"])
    for category, size in part.items():
        ratio = Fraction(size) / whole[category]
        assert float(ratio) == pytest.approx(1) or float(ratio * shard) == pytest.approx(1)


def ring_elements(sharding, *, numel, ranks, accumulate, every_backward, reshard):
    """The same count, by walking a training step chunk by chunk around a ring."""
    chunk, sent = numel // ranks, {"all_reduce": 0, "reduce_scatter": 0, "all_gather": 0}
    for micro_batch in range(accumulate):
        if sharding.params.value == "sharded":
            for _ in range(2 if reshard else 1):
                sent["all_gather"] += chunk * (ranks - 1)
        if every_backward or micro_batch == accumulate - 1:
            if sharding.optim.value == "replicated":
                sent["all_reduce"] += chunk * (ranks - 1) + chunk * (ranks - 1)
            else:
                sent["reduce_scatter"] += chunk * (ranks - 1)
    if sharding.optim.value == "sharded" and sharding.params.value == "replicated":
        sent["all_gather"] += chunk * (ranks - 1)
    return sent


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("every_backward", [True, False])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", SHARDINGS)
def test_volume_against_a_walk_around_the_ring(name, ranks, accumulate, every_backward, reshard):
    sharding, numel = SHARDINGS[name], 128 * 12
    counted = ring_elements(sharding, numel=numel, ranks=ranks, accumulate=accumulate,
                            every_backward=every_backward, reshard=reshard)
    axes = {"shard": 1, "replicate": ranks} if name == "ddp" else {"shard": ranks}
    assert volume(numel, sharding=sharding, **axes, accumulate=accumulate,
                  reduces_every_backward=every_backward, reshard=reshard) == counted


def test_volume_defaults_are_what_each_sharding_is_for():
    u = Fraction(3, 4) * 4096
    total = {name: sum(volume(4096, sharding=sharding, shard=4, accumulate=5).values())
             for name, sharding in SHARDINGS.items()}
    assert total == {"ddp": 2 * u, "zero1": 2 * u, "zero2": 6 * u, "zero3": 15 * u}


def test_a_kept_unit_is_gathered_once():
    full = volume(4096, sharding=ZERO3, shard=4, accumulate=2)
    kept = volume(4096, sharding=ZERO3, shard=4, accumulate=2, kept_numel=1024)
    assert full["all_gather"] - kept["all_gather"] == 2 * 1024 * 3 // 4


def test_hybrid_sharding_reduces_its_shard_across_the_replicas():
    assert volume(4096, sharding=ZERO2, shard=4, replicate=2) == {
        "all_reduce": 2 * 1024 // 2, "reduce_scatter": 3072, "all_gather": 3072}


def test_transients_bound_two_buckets_and_two_neighbouring_units():
    numels = {"bucket_numels": [100, 300, 200], "unit_numels": [10, 50, 60, 5]}
    assert transients(sharding=ZERO2, **numels) == {"buckets": 2 * 300 * 4, "gathered": 0}
    assert transients(sharding=ZERO3, **numels) == {"buckets": 2 * 300 * 4, "gathered": (50 + 60) * 4}
    assert transients(sharding=DDP, **numels) == {"buckets": 0, "gathered": 0}


@pytest.mark.parametrize(("layers", "hidden", "heads", "micro_batch", "gib"), [
    (48, 6144, 64, 4, 9.5625), (96, 12288, 96, 1, 12.3515625 / (1 + 7 / 24)), (128, 25600, 160, 1, 26.5625)])
def test_activations_without_the_attention_matrix(layers, hidden, heads, micro_batch, gib):
    """arXiv:2205.05198 figure 1, sequence parallel and selective: 34 s b h / t a layer with t = 8 (the second
    row's pipeline is interleaved, which multiplies by 1 + 7/24)."""
    size, formula = ModelShape(layers=layers, hidden=hidden, heads=heads, sequence=2048,
                               micro_batch=micro_batch).activations()
    assert size / 8 / 2**30 == pytest.approx(gib)
    assert f"{layers} layers" in formula


def test_activations_with_the_attention_matrix_recomputed_and_in_fp32():
    shape = ModelShape(layers=2, hidden=64, heads=4, sequence=128, flash=False)
    token = 2 * 128 * 64
    assert shape.activations()[0] == token * (34 + 5 * 4 * 128 // 64)
    assert shape.activations(element_bytes=4)[0] == 2 * shape.activations()[0]
    assert shape.activations(recompute=True)[0] == token * 2
    with_logits = ModelShape(layers=2, hidden=64, heads=4, sequence=128, vocabulary=256)
    assert with_logits.activations()[0] == token * 34 + 4 * 128 * 256


def test_estimate_tells_its_formula_precision_and_units():
    result = estimate(params=7.5e9, world_size=64, strategy="zero2",
                      shape=ModelShape(layers=32, hidden=4096, heads=32, sequence=2048))
    assert result.strategy == "zero2+bf16"
    assert result.formula.startswith("7.5e+09 x (2 + 14/64) bytes = 16.64 GB (1e9) in bf16 "
                                     "(params 2 + grads 2 + optimizer 8 + master 4); activations")
    text = str(result)
    assert "GB (1e9)" in text
    assert "GiB (2^30)" in text
    assert "predicted" in text
    plain = json.loads(json.dumps(result.to_dict()))
    assert plain["total_bytes"] == plain["model_states_bytes"]["total"] + plain["activations_bytes"]
    assert plain["params"] == 7_500_000_000


def test_estimate_says_which_precision_it_assumes_and_only_then():
    told = estimate(params=1000, world_size=2, strategy="zero2")
    assert told.to_dict()["precision"] == (
        "bf16, assumed because 'zero2' names none; a run of it computes in fp32, estimated by 'zero2+fp32'")
    assert f"precision: {told.precision}" in str(told)
    assert estimate(params=1000, world_size=2, strategy="zero2+bf16").precision == "bf16"
    assert estimate(params=1000, world_size=2, strategy="zero2+fp32").precision == "fp32"
    assert estimate(params=1000, world_size=2, strategy=Strategy(sharding="zero2")).precision == "fp32"


@pytest.mark.parametrize(("strategy", "optimizer", "formula"), [
    ("zero2+fp32", "adamw", "(4 + 12/4)"), ("ddp+bf16+accum4", "adamw", "(18)"), ("zero3", "adamw", "(16/4)"),
    ("zero1", "sgd-momentum", "(4 + 8/4)"), ("ddp+fp32", "sgd", "(8)")])
def test_the_formula_agrees_with_the_sum(strategy, optimizer, formula):
    result = estimate(params=1000, world_size=4, strategy=strategy, optimizer=optimizer)
    assert formula in result.formula
    assert result.total_bytes == eval("1000 * " + formula)


def test_a_smaller_shard_axis():
    hybrid = estimate(params=1000, world_size=8, strategy="zero3", shard=4)
    assert hybrid.total_bytes == estimate(params=1000, world_size=4, strategy="zero3").total_bytes


@pytest.mark.parametrize(("arguments", "message"), [
    ({"params": 0, "world_size": 2}, r"params=0\) is not allowed; params is a number >= 1"),
    ({"params": 10, "world_size": 0}, r"world_size=0\) is not allowed; world_size is a number >= 1"),
    ({"params": float("inf"), "world_size": 2}, r"params=inf"),
    ({"params": 10, "world_size": 4, "strategy": "zero4"}, r"strategy 'zero4' is not known.*use one of ddp"),
    ({"params": 10, "world_size": 4, "optimizer": "adamv"}, r"optimizer 'adamv' is not known; use one of adamw"),
    ({"params": 10, "world_size": 4, "shard": 3}, r"shard=3\) is not allowed; shard is an integer that divides"),
])
def test_bad_input(arguments, message):
    with pytest.raises(UsageError, match=message):
        estimate(**arguments)


def test_bad_shape():
    with pytest.raises(UsageError, match=r"layers=0\) is not allowed; layers is a number >= 1"):
        ModelShape(layers=0, hidden=1, heads=1, sequence=1)
