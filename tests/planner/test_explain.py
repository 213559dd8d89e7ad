"""The strategy's row, as design promises it, with numbers that agree with the footprint."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from dplab.errors import UsageError
from dplab.planner.explain import Roles, explain
from dplab.planner.footprint import estimate, model_states, volume
from dplab.specs import SHARDINGS

ROWS = {
    "ddp": ("replicated", "replicated", "all-reduce", "-", "-"),
    "zero1": ("gathered", "replicated while accumulating", "reduce-scatter", "all-gather", "-"),
    "zero2": ("gathered", "sharded", "reduce-scatter", "all-gather", "-"),
    "zero3": ("sharded", "sharded", "reduce-scatter", "-", "all-gather, free"),
}


@pytest.mark.parametrize("name", ROWS)
def test_roles_are_the_tables_rows(name):
    assert tuple(vars(Roles.of(SHARDINGS[name])).values()) == ROWS[name]


@pytest.mark.parametrize("name", ROWS)
def test_numbers_are_the_footprints(name):
    told = explain(name, 1_000_000, 4)
    axes = {"shard": 1, "replicate": 4} if name == "ddp" else {"shard": 4}
    assert told.states == model_states(1_000_000, sharding=SHARDINGS[name], shard=4)
    assert told.elements_sent == volume(1_000_000, sharding=SHARDINGS[name], **axes)
    assert told.bytes_sent == {name: 4 * count for name, count in told.elements_sent.items()}


def test_text_of_zero2():
    text = str(explain("zero2", 1_000_000, 4))
    assert "zero2 on 4 ranks, 1,000,000 parameters (predicted, one rank)" in text
    assert "16 bytes a parameter before sharding, in fp32" in text
    assert "1e+06 x (4 + 12/4) bytes = 0.007 GB (1e9) in fp32 (params 4 + grads 4 + optimizer 8)" in text
    assert "reduce_scatter          750,000 elements     3.00 MB" in text
    assert "1/4 of it" in text
    assert "all of it" in text
    assert "<pre>" in explain("zero2", 1_000_000, 4)._repr_html_()


@pytest.mark.parametrize(("strategy", "width"), [
    ("zero3+bf16", 2), ("zero3+bf16+accum4", 2), ("zero3+bf16+accum4+accumulate_mode=window", 4), ("zero1+bf16", 2),
    ("zero1+bf16+accum4", 4)])
def test_what_travels_is_as_wide_as_what_waits_in_a_bucket(strategy, width):
    told = explain(strategy, 1000, 2)
    assert told.bytes_sent["all_gather"] == 2 * told.elements_sent["all_gather"]
    assert told.bytes_sent["reduce_scatter"] == width * told.elements_sent["reduce_scatter"] > 0


@pytest.mark.parametrize("given", [(), ("ddp",), ("ddp", 1e6)])
def test_what_is_left_out_is_told(given):
    with pytest.raises(UsageError, match=r"explain needs a strategy, a model .*: explain\('zero2', 7.4e6, 4\)"):
        explain(*given)


def test_its_repr_is_its_text():
    told = explain("zero2", 1_000_000, 4)
    assert repr(told) == str(told)


def test_a_window_costs_two_bytes_a_parameter_more():
    told = explain("zero3+bf16+accum4", 1000, 2)
    assert told.bytes_per_parameter == 18
    assert "of 4 micro-batches, reduced after every backward" in str(told)
    assert explain("zero3+bf16", 1000, 2).bytes_per_parameter == 16


def test_zero3_says_that_a_kept_root_sends_less():
    told = "at most: a root unit that stays gathered after its forward is gathered once, not twice"
    assert told in str(explain("zero3", 1000, 2))
    for other in ("zero2", "zero3+reshard=false"):
        assert told not in str(explain(other, 1000, 2))
    assert told not in str(explain("zero3", 1000, 1))


@pytest.mark.parametrize(("strategy", "precision"), [
    ("zero2", "fp32"), ("zero2+bf16", "bf16"), ("zero2+amp-fp16", "amp-fp16"),
    ("zero2+precision=bf16:fp32:-:fp32:-", "own precision")])
def test_the_precision_that_is_counted_is_told(strategy, precision):
    told = explain(strategy, 1000, 2)
    assert told.to_dict()["precision"] == precision
    assert f"before sharding, in {precision}" in str(told)
    assert f"in {precision} (params " in told.to_dict()["formula"]


@pytest.mark.parametrize("strategy", ["ddp+fp32", "zero1+bf16", "zero2+fp16+accum4", "zero3+amp-bf16"])
def test_estimate_and_explain_agree_where_the_precision_is_named(strategy):
    """`estimate` assumes bf16 and `explain` fp32 only where a strategy names none."""
    told, estimated = explain(strategy, 1_000_000, 4), estimate(params=1_000_000, world_size=4, strategy=strategy)
    assert told.to_dict()["model_states_bytes"] == estimated.to_dict()["model_states_bytes"]
    assert told.to_dict()["formula"] == estimated.to_dict()["formula"]
    assert told.precision == estimated.precision


def test_one_rank_sends_nothing():
    assert "nothing: there is one rank" in str(explain("zero3", 1000, 1))
    assert sum(explain("ddp", 1000, 1).bytes_sent.values()) == 0


def test_a_module_is_counted_by_its_trainable_parameters_tied_weights_once():
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).double()
    model[1].weight = model[0].weight
    model[1].bias.requires_grad_(False)
    told = explain("ddp", model, 2)
    assert told.numel == 4 * 4 + 4
    assert told.bytes_per_parameter == 32
    assert told.precision == "fp64"
    assert json.loads(json.dumps(told.to_dict()))["params"] == 20


@pytest.mark.parametrize(("arguments", "message"), [
    (("zero2", "gpt", 2), "explain\\(model='gpt'\\) is not allowed; give an nn.Module or a number"),
    (("zero2", 0, 2), "a number of parameters is >= 1"),
    (("zero2", 10, 0), r"world_size=0\) is not allowed; world_size is an integer >= 1"),
    (("zero9", 10, 2), "strategy 'zero9' is not known"),
    (([1] * 1000, "zero2", 2), r"explain takes the strategy first, explain\('zero2', model, world_size\); it was given "
                               r"a list there$"),
    (("zero2", [1] * 1000, 2), r"explain\(model=a list\) is not allowed; give an nn\.Module or a number"),
])
def test_bad_input(arguments, message):
    with pytest.raises(UsageError, match=message):
        explain(*arguments)


def test_a_module_without_trainable_parameters():
    torch = pytest.importorskip("torch")
    with pytest.raises(UsageError, match=r"explain\(ReLU\) has no trainable parameters"):
        explain("ddp", torch.nn.ReLU(), 2)


def test_no_torch_is_imported():
    code = ("import sys, dplab; print(dplab.explain('zero2', 7_000_000, 4)); "
            "print(dplab.estimate(params=7.5e9, world_size=64)); sys.exit('torch' in sys.modules)")
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_estimate_takes_its_arguments_in_order_too():
    from dplab.planner.footprint import estimate

    assert estimate(7.5e9, 64, "zero2") == estimate(params=7.5e9, world_size=64, strategy="zero2")
    with pytest.raises(UsageError, match=r"estimate\(params=a list\) is not allowed; params is a number >= 1"):
        estimate([1] * 1000, 2)  # type: ignore[arg-type]
