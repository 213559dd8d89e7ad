"""Strategies as values: they survive every round trip, and what is not one is refused in a sentence."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dplab.errors import UsageError
from dplab.specs import PRECISIONS, SHARDINGS, Placement, Precision, RunSpec, Sharding, Strategy

dtypes = st.sampled_from([None, "fp64", "fp32", "bf16", "fp16"])
strategies = st.builds(
    Strategy, sharding=st.sampled_from(list(SHARDINGS)),
    precision=st.one_of(st.sampled_from(list(PRECISIONS)),
                        st.builds(Precision, param=dtypes, grad=dtypes, master=dtypes, autocast=dtypes)),
    accumulate=st.integers(1, 1000), accumulate_mode=st.sampled_from([None, "window", "micro_batch"]),
    bucket_mb=st.one_of(st.none(), st.floats(1e-6, 1e6)),
    recompute=st.sampled_from(["none", "full", "keep:attention:matmul", "64mb", "0.5mb"]),
    prefetch=st.booleans(), reshard=st.booleans(), clip_grad_norm=st.one_of(st.none(), st.floats(1e-6, 1e6)),
    topology=st.sampled_from([None, "2x2@10gbe", "2x2@1Gb/s:50us,pcie3"]), hybrid=st.booleans(),
    wire=st.sampled_from([None, "bf16", "fp16", "int8"]),
    shares=st.one_of(st.none(), st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)))


@given(strategies)
def test_a_strategy_survives_text_and_json(strategy: Strategy) -> None:
    assert Strategy.parse(str(strategy)) == strategy
    assert Strategy.from_dict(json.loads(json.dumps(strategy.to_dict()))) == strategy
    assert str(Strategy.parse(str(strategy))) == str(strategy)


def test_the_one_line_form_of_the_contract() -> None:
    assert str(Strategy(sharding="zero3", precision="bf16", accumulate=4, recompute="full")) == (
        "zero3+bf16+accum4+recompute")


@pytest.mark.parametrize(("text", "message"), [
    ("zero4", "strategy 'zero4' is not known (did you mean 'zero3'?); use one of ddp, zero1, zero2, zero3"),
    ("", "strategy '' is not known; use one of ddp"),
    ("zero2+bf61", "strategy 'zero2+bf61': 'bf61' is not known (did you mean 'bf16'?); after the name may stand fp32"),
    ("zero2+acum4", "'acum4' is not known (did you mean 'accum4'?)"),
    ("zero2+", "strategy 'zero2+' has nothing behind a '+'; leave that out, or name what is to be added"),
    ("ZERO2", "strategy 'ZERO2' is not known (did you mean 'zero2'?); use one of ddp"),
    ("zero2+bucket_mb=big", "strategy 'zero2+bucket_mb=big': 'big' is not a value for bucket_mb"),
    ("zero2+bucket_mb=-1", "Strategy(bucket_mb=-1.0) is not allowed; bucket_mb is a number of MiB above 0, or None"),
    ("zero2+accum0", "Strategy(accumulate=0) is not allowed; accumulate is an integer >= 1"),
    ("zero2+prefetch=maybe", "'maybe' is not a value for prefetch"),
    ("zero2+accum2+accum3", "strategy 'zero2+accum2+accum3' gives accumulate twice, by 'accum2' and by 'accum3'"),
    ("zero2+bf16+fp16", "gives precision twice, by 'bf16' and by 'fp16'; leave one out"),
    ("zero2+bf16+precision=bf16:bf16:fp32:fp32:-", "gives precision twice, by 'bf16' and by 'precision=bf16:"),
    ("zero3+prefetch=true+prefetch=true", "gives prefetch twice"),
    ("zero3+recompute+recompute=4mb", "gives recompute twice, by 'recompute' and by 'recompute=4mb'"),
    ("zero3+recompute+recompute", "gives recompute twice, by 'recompute' and by 'recompute'"),
    ("zero2+accum²", "'accum²' is not known"),
    ("zero2+accum" + "9" * 5000, "is not known; after the name may stand"),
    ("zero3+offload", "'offload' is not known (did you mean 'offload=...'?)"),
    ("zero3+offlaod=all", "'offlaod=all' is not known (did you mean 'offload=all'?)"),
    ("zero3+bucket=3", "'bucket=3' is not known (did you mean 'bucket_mb=3'?)"),
    ("zero2+hybird", "'hybird' is not known (did you mean 'hybrid'?)"),
    ("zero2+hybrid+hybrid", "gives hybrid twice, by 'hybrid' and by 'hybrid'"),
    ("zero2+topology=", "Strategy(topology='') is not allowed; topology is one line such as 2x2@10gbe, or None"),
    ("zero2+wire=int9", "Strategy(wire='int9') is not known (did you mean 'int8'?); gradients travel as bf16, fp16"),
    ("zero2+accumulate_mode=daily", "accumulate_mode is one of window, micro_batch, or None"),
])
def test_what_is_no_strategy_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Strategy.parse(text)
    assert message in str(caught.value)


def test_a_strategy_of_another_type_is_named_by_its_type() -> None:
    with pytest.raises(UsageError, match=r"^strategy is of type dict; give a name such as 'zero2', or a dplab"):
        Strategy.parse({"a": "b" * 1000})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"^strategy 3 is of type int; give a name"):
        Strategy.parse(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(("fields", "message"), [
    ({"accumulate": True}, "Strategy(accumulate=True) is not allowed"),
    ({"clip_grad_norm": float("inf")}, "clip_grad_norm is a number above 0, or None"),
    ({"sharding": None}, "Strategy(sharding=None) is not allowed; sharding is a Sharding or its name"),
    ({"precision": "fp8"}, "precision 'fp8' is not known"),
    ({"recompute": "some"}, "Strategy(recompute='some') is not allowed; recompute is one of none, full, "
                            "keep:KIND[:KIND...] of attention, matmul, convolution, or a budget such as 200mb"),
    ({"recompute": "keep:"}, "Strategy(recompute='keep:') is not allowed; recompute is one of none"),
    ({"recompute": "keep:norms"}, "Strategy(recompute='keep:norms') is not allowed"),
    ({"recompute": "keep:matmul:matmul"}, "Strategy(recompute='keep:matmul:matmul') is not allowed"),
    ({"recompute": "0mb"}, "Strategy(recompute='0mb') is not allowed"),
    ({"recompute": 200}, "Strategy(recompute=200) is not allowed"),
    ({"prefetch": 1}, "prefetch is True or False"),
])
def test_fields_are_checked_when_a_strategy_is_made(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Strategy(**fields)
    assert message in str(caught.value)


def test_unknown_fields_are_named() -> None:
    with pytest.raises(UsageError, match=r"strategy has no field 'bucket_size' .*; it has accumulate, accumulate_mode"):
        Strategy.from_dict({"sharding": "ddp", "bucket_size": 3})


@pytest.mark.parametrize("text", ["zero2+shares=0:1", "zero2+shares=-1:1"])
def test_shares_are_samples(text: str) -> None:
    with pytest.raises(UsageError, match=r"shares is a number of samples >= 1 for each rank, such as 3:3:2"):
        Strategy.parse(text)


def test_shares_are_for_as_many_ranks_as_there_are() -> None:
    Strategy.parse("zero2+shares=2:1").require_ranks(2)
    with pytest.raises(UsageError, match=r"has shares for 2 ranks, and the world has 3; give one for each, or leave"):
        Strategy.parse("zero2+shares=2:1").require_ranks(3)


def test_a_stage_without_the_one_before_is_impossible() -> None:
    with pytest.raises(UsageError, match=r"params=sharded, grads=replicated, optim=sharded\) is not possible"):
        Sharding(params=Placement.SHARDED, grads=Placement.REPLICATED, optim=Placement.SHARDED)


def test_bad_dtypes_are_named() -> None:
    with pytest.raises(UsageError, match=r"Precision\(param='float8'\) is not a dtype; use one of fp64, fp32"):
        Precision(param="float8")
    with pytest.raises(UsageError, match=r"Precision\(reduce='bf16'\) is not allowed; gradients are summed"):
        Precision(reduce="bf16")


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "2"])
def test_a_world_has_ranks(size: Any) -> None:
    with pytest.raises(UsageError, match=r"launch\(world_size=.*\) is not allowed; world_size is an integer >= 1"):
        RunSpec(function="f", world_size=size)
    assert RunSpec.from_dict({**RunSpec(function="f", world_size=2).to_dict(), "later": 1}).world_size == 2
