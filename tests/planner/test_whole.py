"""Estimates of a model with a card: the plain estimate's states, every figure explained, what is left out named."""

from __future__ import annotations

import json

import pytest

import dplab
from dplab.cli import main
from dplab.errors import UsageError
from dplab.planner import configs
from dplab.planner.shape import ModelShape
from dplab.planner.single import predict


@pytest.mark.parametrize("strategy", ["ddp", "zero1+bf16+accum4", "zero2+fp32", "zero3+amp-bf16",
                                      "zero2+bf16+accum4+accumulate_mode=window", "zero3+bf16+recompute"])
def test_states_are_those_of_the_parameter_count(strategy):
    whole = dplab.estimate("gpt2-medium", 4, strategy, micro_batch=2)
    plain = dplab.estimate(354_823_168, 4, strategy)
    assert whole.model_states_bytes == plain.model_states_bytes
    assert whole.strategy == plain.strategy
    assert whole.precision == plain.precision
    assert whole.total_bytes == plain.total_bytes + whole.activations_bytes + sum(whole.other_bytes.values())
    assert json.loads(json.dumps(whole.to_dict()))["total_bytes"] == whole.total_bytes


def test_every_figure_is_explained_with_its_numbers():
    whole = dplab.estimate("llama-7b", 8, "zero3+bf16+accum2", micro_batch=2, sequence=1024)
    text = whole.explain()
    for part in ("6.73842e+09 parameters x 2 bytes / 8 ranks", "x 4 bytes / 8 ranks", "32 layers x 1 micro-batch x "
                 "1024 tokens x 2 samples x 4096 features x 45.53 bytes",
                 "1024 tokens x 2 samples x 32000 logits x 12 bytes", "2 units x 2.02383e+08",
                 "GB = "):
        assert part in text
    assert "gathered" in str(whole)
    assert "sequence 1024, micro-batch 2" in whole.note


def test_a_plain_estimate_explains_itself_too():
    told = dplab.estimate(7.5e9, 64, "zero2")
    lines = told.explain().splitlines()
    assert lines[0] == "params            15.000 GB   7.5e+09 parameters x 2 bytes"
    assert lines[1] == "grads              0.234 GB   7.5e+09 parameters x 2 bytes / 64 ranks"
    assert lines[-1] == "total             16.641 GB = 15.498 GiB"
    for line in lines[:-1]:
        figure, formula = line.split("   ")[0], line.rsplit("   ", 1)[1]
        numbers = formula.replace("parameters x", "*").replace("bytes", "").replace("ranks", "")
        assert eval(numbers) / 1e9 == pytest.approx(float(line.split()[1]), abs=5e-4), figure


def test_a_small_model_is_told_in_mb_and_every_row_once():
    told = dplab.estimate("tiny-gpt", 2, "zero2+fp32")
    text = str(told)
    assert "MB (1e6)  MiB (2^20)" in text
    assert " 0.000" not in text
    assert "formula:" not in text
    assert "master" not in text
    assert text.count("parameters x 4 bytes") == 2
    assert repr(told) == text
    assert ", 1 rank:" in str(dplab.estimate("tiny-gpt", 1))
    assert "kB (1e3)" in str(dplab.estimate(2000, 2))


@pytest.mark.parametrize(("given", "sentence"), [
    (("zero2", 7.5e9, 64), r"estimate takes the parameters first, estimate\(7.5e9, 64, 'zero2'\); it was given the "
                           r"strategy 'zero2' there"),
    ((7.5e9, 2.5), r"estimate\(world_size=2.5\) is not allowed; world_size is a whole number of ranks"),
])
def test_arguments_in_another_order(given, sentence):
    with pytest.raises(UsageError, match=sentence):
        dplab.estimate(*given)


def test_more_samples_and_longer_sequences_cost_activations():
    small, wide, long = (dplab.estimate("gpt2", 2, "zero1+bf16", micro_batch=batch, sequence=tokens)
                         for batch, tokens in ((1, 512), (4, 512), (1, 1024)))
    assert wide.activations_bytes == 4 * small.activations_bytes
    assert long.activations_bytes == 2 * small.activations_bytes
    again = dplab.estimate("gpt2", 2, "zero1+bf16+recompute", micro_batch=4, sequence=512)
    assert again.activations_bytes < wide.activations_bytes


def test_kept_kinds_lie_between_full_and_nothing_computed_again():
    full, attention, both, none = (
        dplab.estimate("gpt2", 2, f"zero1+bf16+recompute={way}", micro_batch=4, sequence=512).activations_bytes
        for way in ("full", "keep:attention", "keep:attention:matmul", "none"))
    assert full < attention < both < none + 12 * 4 * 512 * 768 * 64
    rows = 12 * 4 * 512
    assert attention - full == rows * (2 * 768 + 4 * 12)
    assert both - attention == rows * 2 * (3 * 768 + 768 + 4 * 768 + 768)


def test_a_budget_is_met_with_as_few_layers_as_it_takes():
    def alive(way):
        return dplab.estimate("gpt2", 2, f"zero1+bf16+recompute={way}", micro_batch=4, sequence=512).activations_bytes

    full, none = alive("full"), alive("none")
    assert alive(f"{none / 2**20 + 1:.2f}mb") == none
    budget = (full + none) / 2 / 2**20
    told = dplab.estimate("gpt2", 2, f"zero1+bf16+recompute={budget:.2f}mb", micro_batch=4, sequence=512)
    assert full < told.activations_bytes <= budget * 2**20
    assert "layers that are not computed again" in told.formulas["activations"]
    with pytest.raises(UsageError, match=r"recompute=9mb: with every layer computed again activations still .* MiB; "
                                         r"give at least .*mb, or a smaller micro-batch"):
        alive("9mb")
    shape = ModelShape(layers=2, hidden=64, heads=2, sequence=8)
    with pytest.raises(UsageError, match=r"estimate\(shape=...\) has no figure of recompute=9mb; give none or full"):
        dplab.estimate(1e6, 2, "ddp+recompute=9mb", shape=shape)
    with pytest.raises(UsageError, match="a predicted step has no figure of recompute=9mb; give none or full"):
        predict("gpt2", "8xA100-SXM-80GB", "ddp+bf16+recompute=9mb")


def test_a_config_in_place_of_a_name():
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
              "intermediate_size": 128, "vocab_size": 256}
    assert dplab.estimate(config, 2, "ddp+fp32").params == configs.model(config).parameters


def test_the_command(capsys):
    assert main(["estimate", "--model", "llama-7b", "--world-size", "8", "--strategy", "zero3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {"model_states_bytes", "activations_bytes", "total_bytes", "formula"} <= set(told)
    assert main(["estimate", "--model", "llama-7b", "--world-size", "8"]) == 0
    assert "parameters x" in capsys.readouterr().out
    for arguments, message in (
            (["--model", "lama-7b"], "model 'lama-7b' is not known; the nearest are llama-7b"),
            (["--model", "gpt2", "--layers", "3"], "leave them out where --model names one"),
            (["--model", "gpt2", "--params", "3e6"], "not allowed with argument"),
            ([], "one of the arguments --params --model is required")):
        assert main(["estimate", *arguments, "--world-size", "8"]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "options", "message"), [
    (("gpt2", 4), {"micro_batch": 0}, r"micro_batch=0\) is not allowed; micro_batch is a whole number >= 1"),
    (("gpt2", 4, "ddp", "adamw", 2), {}, r"shape=..., shard=...\) goes with a number of parameters"),
    ((1e9, 4), {"micro_batch": 2}, r"needs a model's name or config in place of a number of parameters"),
    (("gpt5", 4), {}, r"model 'gpt5' is not known; the nearest are gpt"),
    (("gpt2", 4, "ddp", "lion"), {}, r"optimizer 'lion' is not known; use one of adamw"),
])
def test_bad_input(arguments, options, message):
    with pytest.raises(UsageError, match=message):
        dplab.estimate(*arguments, **options)


def test_an_image_model_has_no_sequence_and_a_stated_net_no_attention() -> None:
    assert dplab.estimate("resnet-50", 8, micro_batch=4).note == "micro-batch 4"
    assert dplab.estimate("vit-b-16", 8, micro_batch=4).note == "micro-batch 4; flash attention is assumed"
    assert dplab.estimate("gpt2-xl", 8).note == "sequence 1024, micro-batch 1; flash attention is assumed"
