"""Unequal GPUs: samples by speed under each one's memory, against trying every division."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import dplab
from dplab.errors import UsageError
from dplab.planner import cost, memory, unequal
from dplab.planner.recipes import Recipe
from dplab.planner.split import Split
from dplab.planner.unequal import divide, mixed
from dplab.specs import Strategy

CLUSTER = "2xRTX3090+1xRTX3060"


@pytest.mark.parametrize("seed", range(20))
def test_no_other_division_ends_earlier(seed):
    random = np.random.default_rng(seed)
    counts, samples = (2, 1), int(random.integers(3, 15))
    seconds = [np.cumsum(random.uniform(0.1, 1.0, samples)) for _ in counts]
    most = [int(random.integers(2, 12)) for _ in counts]
    groups = (0, 0, 1)

    def slowest(shares):
        return max(seconds[group][share - 1] for group, share in zip(groups, shares, strict=True))

    every = [shares for shares in itertools.product(range(1, samples + 1), repeat=3) if sum(shares) == samples
             and all(share <= most[group] for group, share in zip(groups, shares, strict=True))]
    given = divide(seconds, most, counts, samples)
    if not every:
        assert given is None
    else:
        assert sum(given) == samples
        assert slowest(given) == pytest.approx(min(map(slowest, every)))


def test_faster_gpus_get_more_and_all_fit():
    plans = dplab.plan("gpt2-large", CLUSTER, 96 * 1024)
    assert len(plans.plans) == 5
    for plan in plans.plans:
        first, second, small = plan.shares.samples
        assert abs(first - second) <= 1 < small + 1 < first + 1
        assert (first + second + small) * plan.split.accumulate == 96
        for share, part in zip(plan.shares.samples, (0, 0, 1), strict=True):
            split = Split(dp=3, zero=plan.split.zero, micro_batch=share, accumulate=plan.split.accumulate,
                          recompute=plan.split.recompute)
            place = plans.cluster.parts[part]
            assert float(memory.predict(plan.memory.profile, split, plan.memory.recipe).total) < 0.95 * place.gpu.memory
            assert float(cost.predict(plan.cost.profile, split, place, plan.cost.recipe).step) <= plan.step * 1.0001
    assert plans.best.step < plans.best.shares.equal_step


def test_the_strategy_has_the_shares_and_why_says_who_deals_them():
    plans = dplab.plan("gpt2-large", CLUSTER, 96 * 1024)
    best = plans.best
    assert best.strategy.shares == best.shares.samples
    assert Strategy.parse(str(best.strategy)) == best.strategy
    assert "dplab.loader(data, strategy.shares) deals the samples so" in plans.why(best)
    best.strategy.require_ranks(3)
    told = plans.to_dict()["plans"][0]
    assert told["shares"] == list(best.shares.samples)
    assert told["equal_step_ms"] == pytest.approx(best.shares.equal_step * 1e3)
    assert 0 < told["mfu"] <= told["hfu"] < 1


def test_equal_gpus_get_equal_shares():
    plans = dplab.plan("gpt2", "2xRTX3090+2xRTX3090", 64 * 1024)
    assert plans.best.shares.equal
    assert plans.best.strategy.shares is None
    assert "equal shares are as fast as any" in plans.why(plans.best)


def test_a_gpu_that_is_30_percent_slower_gets_fewer():
    place = mixed("3xA100-SXM-80GB+1xA100-SXM-80GB", slowed=(1.0, 0.7))
    best = unequal.plan("gpt2-medium", place, 256 * 1024, recipe=Recipe(host=0.0)).best
    *fast, slow = best.shares.samples
    assert slow / np.mean(fast) == pytest.approx(0.7, abs=0.1)
    # the three fast ones would wait for the slow one: 4 ranks at 0.7 against 3.7
    assert best.shares.equal_step / best.step == pytest.approx(3.7 / 2.8, rel=0.07)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: mixed("2xRTX3090+RTX3060"), r"cluster .*: 'RTX3060' is not of the form COUNTxGPU; join such groups"),
    (lambda: mixed("2xRTX3090+1xRTX9999"), r"GPU 'RTX9999' is not known; the nearest are"),
    (lambda: mixed(CLUSTER, slowed=(1.0,)), r"slowed=\(1.0,\) is not allowed; it holds one factor above 0 and"),
    (lambda: dplab.plan("gpt2", CLUSTER, 1000), r"tokens_per_step=1000 is not a multiple of the sequence .*use 3072"),
    (lambda: dplab.plan("llama-7b", CLUSTER, 98304), r"llama-7b fits nowhere on 2 x RTX-3090-24GB \+ 1 x RTX-3060"),
    (lambda: dplab.plan("gpt2", CLUSTER, 98304, precision="int8"), r"precision 'int8' is not known; use one of"),
    (lambda: dplab.plan("gpt2", CLUSTER, 98304, memory_limit="8GB"), r"memory_limit, space and several precisions are"),
])
def test_bad_input(call, message):
    with pytest.raises(UsageError, match=message):
        call()
