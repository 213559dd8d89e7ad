"""Memory against the papers' closed forms to their printed digits, against measured peaks, and against itself."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dplab.errors import UsageError
from dplab.planner import activations, configs, published
from dplab.planner.footprint import model_states
from dplab.planner.memory import CATEGORIES, predict, stage_layers, states
from dplab.planner.recipes import RECIPES, Recipe, recipe
from dplab.planner.split import Split
from dplab.specs import PRECISIONS, SHARDINGS

ZERO = [case for case in published.cases() if case.stem == "zero" and case.unit == "GB" and case.config]
LARGEST = [case for case in published.cases() if case.id.startswith("zero-t2") and "-th-" in case.id]
FIGURE_1 = [case for case in published.cases() if case.id.startswith("recomp-fig1")]
FIGURE_7 = [case for case in published.cases() if case.id.startswith("recomp-fig7")]
PLAYBOOK = [case for case in published.cases() if case.stem == "playbook"]


def ids(cases):
    return [case.id for case in cases]


def printed(value):
    """Decimals of a figure as it was printed."""
    return len(str(value).partition(".")[2].rstrip("0"))


@pytest.mark.parametrize("case", ZERO, ids=ids(ZERO))
def test_zero_paper_to_its_printed_digits(case):
    split = Split(dp=case.config["dp"], zero=case.config["zero"])
    size = sum(states(case.model["params"], split, recipe("states-16")).values())
    assert round(size / 1e9, printed(case.value)) == case.value


@pytest.mark.parametrize("case", LARGEST, ids=ids(LARGEST))
def test_zero_papers_largest_models(case):
    """The largest model whose states fit 32 GB (GiB, by the paper's own numbers), as printed: two or three digits."""
    split = Split(dp=case.config["dp"], zero=case.config["zero"])
    each = sum(states(1.0, split, recipe("states-16")).values())
    assert case.config["tp"] * 32e9 / each == pytest.approx(case.value, rel=0.025)


@pytest.mark.parametrize("case", FIGURE_1, ids=ids(FIGURE_1))
def test_recomputation_paper_figure_1_exactly(case):
    setup = published.setup(case)
    if case.unit.endswith("activations"):
        block = setup.profile.blocks[0]
        held = activations.in_flight(0, replace(setup.split, accumulate=10**6), setup.recipe)
        size = block.layers / setup.split.pp * held * activations.layer(block, setup.split, setup.recipe)
    else:
        numel = 12 * setup.profile.layers * setup.profile.hidden**2 / (setup.split.tp * setup.split.pp)
        size = sum(states(numel, setup.split, recipe("states-18")).values())
    assert round(float(size) / 2**30, printed(case.value)) == case.value


@pytest.mark.parametrize("case", FIGURE_7, ids=ids(FIGURE_7))
def test_recomputation_paper_figure_7(case):
    """Shares of the tensor-parallel activations; the figure's own digits carry what the paper leaves out of its
    formula (below 2 % of them)."""
    setup = published.setup(case)
    block = setup.profile.blocks[0]
    whole = activations.layer(block, replace(setup.split, recompute=0), replace(
        setup.recipe, sequence_parallel=False))
    share = float(activations.layer(block, setup.split, setup.recipe) / whole)
    assert 100 * share == pytest.approx(case.value, rel=0.02)


@pytest.mark.parametrize("case", PLAYBOOK, ids=ids(PLAYBOOK))
def test_16_and_20_bytes_a_parameter(case):
    name = "states-20" if "fp32 grad" in case.config["precision"] else "states-16"
    assert recipe(name).state_bytes * case.model["params"] / 1e9 == pytest.approx(case.value)


def test_bytes_a_parameter_are_named():
    assert {name: recipe(f"states-{name}").state_bytes for name in (16, 18, 20)} == {16: 16, 18: 18, 20: 20}
    split = Split(dp=8, zero=1)
    assert sum(states(1.0, split, recipe("states-18")).values()) == 6 + 12 / 8
    assert sum(states(1.0, replace(split, zero=2), recipe("states-18")).values()) == 2 + 16 / 8


@pytest.mark.parametrize("name", SHARDINGS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "amp-bf16"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_states_are_those_of_the_footprint_that_the_ledger_is_held_to(name, precision, accumulate):
    program = Recipe().with_precision(PRECISIONS[precision])
    split = Split(dp=4, zero=list(SHARDINGS).index(name), accumulate=accumulate)
    counted = model_states(1024, sharding=SHARDINGS[name], shard=4, precision=PRECISIONS[precision],
                           accumulate=accumulate)
    assert {key: float(value) for key, value in states(1024, split, program).items()} == counted


MEASURED = [case for case in published.cases() if case.kind == "memory" and case.stem in ("nanotron", "zb")]


def test_measured_peaks_within_ten_percent_on_average():
    errors = {}
    for case in MEASURED:
        setup = published.setup(case)
        total = float(predict(setup.profile, setup.split, setup.recipe).total)
        errors.setdefault(case.stem, []).append(abs(total / published.measured_bytes(case) - 1))
    assert {stem: len(values) for stem, values in errors.items()} == {"nanotron": 19, "zb": 10}
    assert np.mean(errors["nanotron"]) < 0.08
    assert np.mean(errors["zb"]) < 0.02


def test_arrays_give_what_numbers_give():
    profile, program = configs.model("llama-3-8b"), RECIPES["modern"]
    splits = [Split(dp=d, tp=t, pp=p, zero=z, micro_batch=b, accumulate=a, recompute=r)
              for d, t, p, z, b, a, r in [(8, 1, 1, 3, 1, 1, 0), (2, 4, 1, 1, 2, 4, 2), (1, 2, 4, 0, 1, 8, 1),
                                          (4, 2, 2, 0, 1, 2, 0)]]
    many = Split(**{name: np.array([getattr(split, name) for split in splits]) for name in vars(splits[0])})
    together = predict(profile, many, program)
    for place, split in enumerate(splits):
        alone = predict(profile, split, program)
        for name in CATEGORIES:
            assert float(np.broadcast_to(together.parts[name], (4,))[place]) == pytest.approx(float(alone.parts[name]))
        assert alone.total == pytest.approx(sum(float(alone.parts[name]) for name in CATEGORIES))


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]), st.integers(1, 4), st.integers(0, 2))
def test_more_sharding_and_more_recomputation_never_cost_more(dp, tp, micro, mode):
    profile = configs.model("gpt3-6.7b")
    program = replace(RECIPES["megatron-2022"], context=1e9)
    base = Split(dp=dp, tp=tp, micro_batch=micro, recompute=mode)
    totals = [float(predict(profile, replace(base, zero=zero), program).parts["params"]
                    + predict(profile, replace(base, zero=zero), program).parts["optimizer"]) for zero in range(4)]
    assert totals == sorted(totals, reverse=True)
    kept = [float(predict(profile, replace(base, recompute=r), program).parts["activations"]) for r in range(3)]
    assert kept == sorted(kept, reverse=True)


def test_explained_formulas_give_the_figures():
    memory = predict(configs.model("llama-7b"), Split(dp=4, tp=2, zero=1, accumulate=4), RECIPES["modern"])
    text = memory.explain()
    assert "llama-7b on 8 ranks: predicted, one rank" in text
    assert "GB (1e9)" in text
    assert "GiB (2^30)" in text
    for line in text.splitlines()[2:]:
        name, gigabytes, formula = line.split()[0], float(line.split()[1]), line.split("   ")[-1]
        if name in ("params", "grads", "optimizer", "master", "logits"):
            told = re.sub(r"parameters|bytes|ranks|tokens|samples?|logits", "", formula).replace(" x ", " * ")
            assert eval(told) / 1e9 == pytest.approx(gigabytes, rel=1e-4, abs=1e-3), formula
    first = next(line for line in text.splitlines() if line.startswith("activations"))
    assert "32 layers x 1 micro-batch x 2048 tokens x 1 sample x 4096 features x" in first
    assert memory.to_dict()["total"] == round(float(memory.total))


@pytest.mark.parametrize(("partition", "expected"), [
    ("uniform", (20, 20, 20)), ("edges", (19.5, 20.5, 19.5)), ("balanced", (21, 21, 19))])
def test_layers_of_a_stage(partition, expected):
    """Balanced as nanotron cuts an 80-layer model whose head weighs 1.1 layers: a stage closes once it exceeds its
    quarter."""
    profile = configs.model({"model_type": "llama", "num_hidden_layers": 80, "hidden_size": 8192,
                             "num_attention_heads": 64, "intermediate_size": 28672, "vocab_size": 131072})
    program = replace(RECIPES["modern"], partition=partition)
    assert tuple(float(count) for count in stage_layers(profile, Split(pp=4), program)) == expected


def test_images_have_activations_without_layers():
    memory = predict(configs.model("resnet-50"), Split(dp=2, micro_batch=32), RECIPES["modern"])
    assert float(memory.parts["activations"]) == 22_200_000 * 2 * 32
    assert "32 samples x 2.22e+07 elements x 2 bytes" in memory.explain()


def test_bad_recipes():
    with pytest.raises(UsageError, match=r"recipe 'fdsp' is not known; use one of modern, states-16"):
        recipe("fdsp")
    with pytest.raises(UsageError, match=r"partition 'even' is not known; use one of uniform, edges, balanced"):
        Recipe(partition="even")
    with pytest.raises(UsageError, match=r"schedule 'gpipe' is not known; use one of 1f1b, zb-1p, zb-2p"):
        Recipe(schedule="gpipe")
