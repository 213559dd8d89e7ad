"""The program that every rank runs: the same losses under every strategy, on text and on images."""

from __future__ import annotations

import math

import pytest
import torch

import dplab
from dplab.errors import RankFailed, UsageError
from dplab.workloads.train import train


def losses_of(strategy: str, **kwargs) -> list[list[float]]:
    run = dplab.launch("dplab.workloads.train:train", world_size=2, strategy=strategy, detach=False,
                       kwargs={"steps": 4, "batch_size": 1, **kwargs})
    return [result["losses"] for result in run.wait(timeout=120)]


def test_four_strategies_agree_to_the_bit_and_learn():
    told = {strategy: losses_of(strategy, steps=6) for strategy in ("ddp", "zero1", "zero2", "zero3")}
    assert told["zero1"] == told["zero2"] == told["zero3"] == told["ddp"]
    first, last = torch.tensor(told["ddp"]).mean(0)[[0, -1]]
    assert abs(first - math.log(256)) < 0.3
    assert last < first - 0.3


def test_a_window_of_two_micro_batches_is_one_step_of_twice_the_batch():
    wide = torch.tensor(losses_of("ddp", batch_size=2))
    window = torch.tensor(losses_of("zero2+accum2", batch_size=1))
    torch.testing.assert_close(window.mean(0), wide.mean(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_images(model):
    pytest.importorskip("sklearn")
    losses = torch.tensor(losses_of("zero3", model=model, batch_size=16, steps=15, lr=3e-3))
    assert losses[:, -3:].mean() < losses[:, 0].mean()


def test_alone_without_any_launcher():
    told = train(steps=2, batch_size=1)
    assert told["steps"] == len(told["losses"]) == 2
    assert (told["loss_first"], told["loss_last"]) == (told["losses"][0], told["losses"][1])
    assert told["memory"]["params"] > 0
    assert told["backend"] == "solo"


@pytest.mark.parametrize(("options", "message"), [
    ({"steps": 0}, r"train\(steps=0\) is not allowed; steps is an integer >= 1"),
    ({"model": "gpt"}, "model 'gpt' is not known"),
    ({"optimizer": "adamx"}, "optimizer 'adamx' is not known"),
    ({"data": "/nowhere"}, "data path '/nowhere' does not exist"),
    ({"strategy": "zero4"}, "strategy 'zero4' is not known"),
])
def test_bad_input(options, message):
    with pytest.raises(UsageError, match=message):
        train(**options)


def test_two_strategies_that_differ_are_refused_with_both_names():
    run = dplab.launch("dplab.workloads.train:train", world_size=1, strategy="zero2", detach=False,
                       kwargs={"steps": 1, "strategy": "ddp"})
    with pytest.raises(RankFailed, match=r"given strategy 'ddp' and the run was launched with 'zero2'"):
        run.wait(timeout=60)
