"""The search: every plan legal and within memory, none better left out, reasons counted, bad input in a sentence."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace

import numpy as np
import pytest

import dplab
from dplab.cli import main
from dplab.errors import UsageError
from dplab.planner import configs, cost, grid, memory
from dplab.planner.grid import Space
from dplab.planner.hardware import cluster
from dplab.planner.recipes import recipe
from dplab.planner.search import HEADROOM, plan
from dplab.planner.split import RECOMPUTE, Split
from dplab.specs import PRECISIONS

CONTRACT = {"strategy", "dp", "tp", "pp", "zero", "micro_batch", "accumulate", "recompute", "step_ms", "memory_bytes",
            "mfu", "why"}


@pytest.fixture(scope="module")
def llama():
    return plan("llama-7b", "8xH100-SXM-80GB", 1_048_576)


def test_plans_keep_the_contract(llama):
    told = json.loads(json.dumps(llama.to_dict()))
    assert {"plans", "rejected", "searched", "seconds"} <= set(told)
    steps = [row["step_ms"] for row in told["plans"]]
    assert steps == sorted(steps)
    for row in told["plans"]:
        assert set(row) >= CONTRACT
        assert row["dp"] * row["tp"] * row["pp"] == 8
        assert row["dp"] * row["micro_batch"] * row["accumulate"] * 2048 == 1_048_576
        assert row["memory_bytes"] <= (1 - HEADROOM) * 79.1 * 2**30
        assert 0 < row["mfu"] <= row["hfu"] < 1
        assert row["recompute"] in RECOMPUTE
        assert row["why"]
        assert row["memory_bytes"] == sum(size for name, size in row["memory"].items() if name != "total") or abs(
            row["memory_bytes"] - sum(size for name, size in row["memory"].items() if name != "total")) < 20
    assert sum(item["count"] for item in told["rejected"]) < told["searched"]
    assert all(item["example"] for item in told["rejected"])
    assert "fastest that fits" in told["plans"][0]["why"]
    assert "slower than the best" in told["plans"][1]["why"]


def test_a_plan_is_slower_by_a_part_that_takes_longer_or_overlaps_less():
    """16 GPUs on two nodes: hybrid ZeRO-3 and ZeRO-2 have the same parts, and a tenth of a percent between them."""
    plans = plan("llama-7b", "16xH100-SXM-80GB", 512 * 2048)
    for each in plans.plans[1:]:
        why = plans.why(each)
        told = re.search(r"% slower than the best: (?:([\d,.]+) ms more in \w|its parts take no longer)", why)
        assert told, why
        if told[1]:
            assert float(told[1].replace(",", "")) > 100 * (each.step - plans.best.step)


def test_text_names_units_and_says_predicted(llama):
    text = str(llama)
    assert "predicted" in text
    for word in ("GiB", "GB", "step ms", "MFU", "rejected:"):
        assert word in text
    assert "<pre>" in llama._repr_html_()
    assert "parameters x" in llama.best.explain()
    assert "GiB a GPU" in text
    assert repr(llama) == text


def test_rejected_and_fitting_are_all_that_was_searched(llama):
    told = llama.to_dict()
    assert told["fitting"] + sum(item["count"] for item in told["rejected"]) == told["searched"]
    assert told["fitting"] >= len(told["plans"])
    assert f"{told['fitting']:,} of {told['searched']:,} candidates can run, the fastest 5 above" in str(llama)


def test_the_explanation_tells_the_tables_step_and_names_the_parts(llama):
    best = llama.best
    text = best.explain()
    assert f"predicted {best.step * 1e3:,.1f} ms by simulation" in text
    assert f"{best.step * 1e3:,.1f}" in str(llama)
    assert "exposed data-parallel collectives" in text
    shares = [float(share) for share in re.findall(r" ms +([\d.]+)%", text)]
    assert sum(shares) == pytest.approx(100, abs=0.3)
    told = [float(share) for share in re.findall(r"([\d.]+)% ", llama.why(best))]
    assert told == sorted(shares, reverse=True)[:len(told)]
    assert sum(told) > 99


def test_nothing_better_is_left_out():
    """Against every candidate, one at a time, by another loop."""
    profile, machine = configs.model("gpt3-6.7b"), cluster("4xA100-SXM-80GB")
    program = recipe("modern").with_precision(PRECISIONS["bf16"])
    best = float("inf")
    for tp, pp, zero, micro, mode in itertools.product((1, 2, 4), (1, 2, 4), range(4), (1, 2, 4, 8), (0, 2)):
        if 4 % (tp * pp) or 64 % (4 // tp // pp * micro) or (pp > 1 and zero > 1) or (tp * pp == 4 and zero):
            continue
        dp = 4 // tp // pp
        split = Split(dp=dp, tp=tp, pp=pp, zero=zero, micro_batch=micro, accumulate=64 // dp // micro, recompute=mode)
        if split.accumulate < pp or float(memory.predict(profile, split, program).total) > (
                1 - HEADROOM) * machine.gpu.memory:
            continue
        best = min(best, float(cost.predict(profile, split, machine, program).step))
    found = plan("gpt3-6.7b", "4xA100-SXM-80GB", 64 * 2048, space=Space(micro_batches=(1, 2, 4, 8), chunks=(1,)))
    assert float(found.best.cost.step) == pytest.approx(best)


def test_every_rejection_is_counted_once():
    profile, machine = configs.model("llama-3-8b"), cluster("2x8xH100-SXM-80GB")
    split = grid.candidates(machine, 96, profile, recipe("modern"), Space())
    left, rejected = grid.sift(split, grid.laws(split, profile, machine, 96))
    assert int(left.sum()) + sum(item.count for item in rejected) == len(split.dp)
    kept = split.take(np.flatnonzero(left))
    assert np.all(kept.ranks == 16)
    assert np.all(kept.samples == 96)
    assert np.all((kept.pp == 1) | (kept.zero < 2))
    assert np.all((kept.chunks == 1) | (kept.accumulate % kept.pp == 0))
    reasons = " ".join(item.reason for item in rejected)
    for word in ("exceeds a node's 8 GPUs", "samples a step are not divisible",
                 "fewer micro-batches than pipeline stages", "of a pipeline"):
        assert word in reasons


@pytest.mark.parametrize(("name", "reason"), [
    ("gpt2-xl", "25 heads are not divisible by the tensor degree"),
    ("t5-3b", "a pipeline needs equal blocks"), ("resnet-50", "tensor parallelism needs transformer blocks"),
    ({"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16,
      "num_key_value_heads": 4, "intermediate_size": 4096, "vocab_size": 512}, "4 key-value heads are not divisible")],
    ids=["heads", "blocks", "convolution", "key-value heads"])
def test_what_a_model_forbids_is_a_reason(name, reason):
    told = plan(name, "8xA100-SXM-80GB", 64 * configs.model(name).sequence)
    assert any(reason in item.reason for item in told.rejected)


def test_a_pure_data_parallel_plan_is_a_strategy_that_runs():
    found = plan("gpt2-medium", "4xA100-SXM-40GB", 256 * 1024, data_parallel_only=True, top=8)
    assert len(found.plans) >= 4
    for one in found.plans:
        assert one.pure
        strategy = one.strategy
        assert dplab.Strategy.parse(str(one)) == strategy
        assert strategy.accumulate == one.split.accumulate
        assert strategy.sharding.name == grid.name(one.split.zero)
        assert strategy.precision == PRECISIONS["bf16"]
    mixed = plan("gpt3-13b", "8xA100-SXM-80GB", 256 * 2048, top=20)
    assert any(one.strategy is None for one in mixed.plans), "tensor and pipeline plans are not dplab's to run"


def test_a_plan_that_recomputes_says_who_does_it():
    found = plan("llama-3-70b", "64xH100-SXM-80GB", 4_194_304, data_parallel_only=True)
    again = next(one for one in found.plans if one.split.recompute)
    assert "checkpoint its blocks" in found.why(again) or again.strategy.recompute == "full"


def test_precisions_can_be_searched():
    found = plan("gpt2-xl", "8xA100-SXM-80GB", 512 * 1024, precision=["bf16", "fp32", "amp-bf16"], top=20)
    assert {one.precision for one in found.plans} >= {"bf16", "amp-bf16"}
    assert found.best.precision != "fp32"
    assert plan("gpt2-xl", "8xV100-SXM-32GB", 512 * 1024).best.precision == "fp16", "a V100 has no bf16"


def test_memory_limit_and_network_change_the_answer():
    wide = plan("gpt3-6.7b", "16xA100-SXM-80GB", 512 * 2048)
    tight = plan("gpt3-6.7b", "16xA100-SXM-80GB", 512 * 2048, memory_limit="24GiB")
    assert all(float(one.memory.total) <= 24 * 2**30 for one in tight.plans)
    assert tight.best.step > wide.best.step
    slow = plan("gpt3-6.7b", "16xA100-SXM-80GB", 512 * 2048, network="1Gb/s")
    assert slow.best.step > wide.best.step


def test_large_clusters_and_a_hundred_thousand_candidates():
    """Sizes only; how long it takes is printed by the command and measured in the benchmarks."""
    found = plan("llama-3-405b", "2048x8xH100-SXM-80GB", 16384 * 8192)
    assert found.best.split.ranks == 16384
    profile, program = configs.model("llama-7b"), recipe("modern")
    many = Split(**{name: np.resize(np.array(values), 100_000) for name, values in {
        "dp": [1, 2, 4], "tp": [1, 2], "pp": [1, 2, 4, 8], "zero": [0, 1, 2, 3], "micro_batch": [1, 2, 4],
        "accumulate": [8, 16], "recompute": [0, 2], "chunks": [1]}.items()})
    assert np.shape(cost.predict(profile, many, cluster("8xH100"), program).step) == (100_000,)
    assert np.shape(memory.predict(profile, many, program).total) == (100_000,)


@pytest.mark.parametrize(("arguments", "options", "message"), [
    (("llama-3-405b", "8xH100-SXM-80GB", 1_048_576), {}, r"llama-3-405b fits nowhere on 8 x H100-SXM-80GB: the leanest "
     r"layout \(.*\) needs [\d.]+ GiB = [\d.]+ GB a GPU, and 75.1\d? GiB are allowed; \d+ of these GPUs would do"),
    (("llama-7b", "8xH100", 1_000_000), {}, r"not a multiple of the sequence 2048; use 999424 or 1001472"),
    (("llama-7b", "8xH100", 0), {}, r"tokens_per_step=0 is not allowed; it is a whole number of tokens"),
    (("gpt2-xl", "8xH100", 1024), {}, r"no layout of gpt2-xl on 8 x H100-SXM-80GB with 1 samples a step is legal: "),
    (("lama-7b", "8xH100", 2048), {}, r"model 'lama-7b' is not known; the nearest are llama-7b"),
    (("llama-7b", "8xH1000", 2048), {}, r"GPU 'H1000' is not known; the nearest are H100"),
    (("llama-7b", "8xV100", 1_048_576), {"precision": "bf16"}, r"V100-SXM-32GB has no bf16 tensor cores; use fp16 or"),
    (("llama-7b", "8xH100", 1_048_576), {"precision": "int8"}, r"precision 'int8' is not known; use one of fp32, bf16"),
    (("llama-7b", "8xH100", 1_048_576), {"memory_limit": "80"}, r"memory limit '80' is no number above 0 with its"),
    (("llama-7b", "8xH100", 1_048_576), {"memory_limit": "80GiB"}, r"memory limit 80 GiB is not allowed; H100-SXM-80GB "
     r"has 79.1 GiB = 84.93 GB"),
    (("llama-7b", "8xH100", 1_048_576), {"network": "400"}, r"network '400' is no number above 0 with its unit"),
    (("llama-7b", "8xH100", 1_048_576), {"recipe": "fdsp"}, r"recipe 'fdsp' is not known; use one of modern"),
    (("llama-7b", "8xH100", 1_048_576), {"top": 0}, r"top=0 is not allowed; it is the number of plans"),
])
def test_bad_input_is_one_sentence(arguments, options, message):
    with pytest.raises(UsageError, match=message) as caught:
        plan(*arguments, **options)
    assert "\n" not in str(caught.value)


def test_the_gpus_that_would_do_do():
    with pytest.raises(UsageError, match=r"; 128 of these GPUs would do"):
        plan("llama-3-405b", "8xH100-SXM-80GB", 1_048_576)
    assert plan("llama-3-405b", "128xH100-SXM-80GB", 1_048_576).plans
    with pytest.raises(UsageError, match="fits nowhere"):
        plan("llama-3-405b", "64xH100-SXM-80GB", 1_048_576)


def test_layers_that_do_not_divide_are_cut_with_less_at_the_ends():
    found = plan("llama-3-405b", "512xH100-SXM-80GB", 512 * 8192, space=Space(zero=(0, 1)), top=30)
    staged = next(one for one in found.plans if one.split.pp == 16)
    assert 126 % 16
    assert sum(float(count) * many for count, many in zip(
        memory.stage_layers(found.profile, staged.split, recipe("modern")), (1, 14, 1), strict=True)) == 126


def test_the_command(capsys, tmp_path):
    arguments = ["plan", "--model", "llama-7b", "--cluster", "8xH100-SXM-80GB", "--tokens-per-step", "1048576"]
    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told["plans"][0]) >= CONTRACT
    assert main([*arguments, "--explain", "--top", "1"]) == 0
    assert "GiB (2^30)" in capsys.readouterr().out
    path = tmp_path / "step.json"
    assert main([*arguments, "--trace", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trace"] == str(path)
    kinds = {row.get("cat") for row in json.loads(path.read_text())["traceEvents"]}
    assert kinds >= {"step", "forward", "backward", "collective", "optimizer"}
    assert main([*arguments, "--trace", str(tmp_path)]) == 2
    assert "(Is a directory); give a path that can be" in capsys.readouterr().err
    assert main(["plan", "--list"]) == 0
    assert "llama-7b" in capsys.readouterr().out
    for extra, message in (
            (["--network", "400"], "dplab: network '400' is no number above 0 with its unit"),
            (["--memory-limit", "1GB"], "dplab: llama-7b fits nowhere on 8 x H100-SXM-80GB")):
        assert main([*arguments, *extra]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert main(["plan", "--model", "llama-7b"]) == 2
    assert "plan needs --cluster, --tokens-per-step; such as" in capsys.readouterr().err


def test_a_spread_of_models_and_clusters_has_plans():
    for name, machine in [("gpt2", "2xRTX-4090-24GB"), ("t5-3b", "8xA100-SXM-80GB"), ("vit-h-14", "4xL4-24GB"),
                          ("resnet-50", "8xV100-SXM-32GB"), ("mistral-7b", "2x8xH200-SXM-141GB"),
                          ("bert-large", "4xT4-16GB"), ("llama-3.2-1b", "1xB200-SXM-180GB")]:
        profile = configs.model(name)
        found = plan(name, machine, 256 * profile.sequence)
        assert 0.01 < found.best.mfu < found.cluster.gpu.sustained, name


def test_the_best_plan_is_simulated():
    found = plan("gpt2-xl", "8xA100-SXM-80GB", 64 * 1024)
    assert found.best.step == pytest.approx(float(found.best.cost.step), rel=0.1)
    assert found.best.step != float(found.best.cost.step)
    assert replace(found.best, step=2 * found.best.step).mfu == pytest.approx(found.best.mfu / 2)
