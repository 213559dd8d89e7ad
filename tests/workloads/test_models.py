"""The workloads' models: sizes, what forward returns, that they learn, that a wrong name is answered."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from dplab.errors import UsageError
from dplab.workloads import models
from dplab.workloads.catalog import CATALOG, optimizer_class

SMALL = {"tiny-gpt": {"layers": 2, "width": 32, "sequence": 16}, "bench-gpt": {"layers": 2, "width": 32},
         "paced": {"layers": 2, "parameters": 64, "forward_ms": 0.1}, "mlp": {"width": 32}, "cnn": {"channels": 8}}


def batch_for(name: str, samples: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    if CATALOG[name].data == "images":
        return torch.rand(samples, 1, 8, 8, generator=generator), torch.randint(10, (samples,), generator=generator)
    text = torch.randint(256, (samples, 17), generator=generator)
    return text[:, :-1], text[:, 1:]


def count(model: torch.nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


def test_the_benchmark_gpt_has_about_7_4_million_parameters():
    layers, width, sequence, vocabulary = 4, 256, 128, 8192
    block = 12 * width**2 + 13 * width
    expected = layers * block + (2 * vocabulary + sequence + 2) * width
    assert count(models.build("bench-gpt")) == expected
    assert abs(expected - 7.4e6) < 0.05e6


@pytest.mark.parametrize("name", CATALOG)
def test_forward_is_the_cross_entropy_of_its_own_logits(name):
    torch.manual_seed(0)
    model = models.build(name, **SMALL[name])
    x, y = batch_for(name)
    logits = model(x)
    assert logits.shape[:-1] == y.shape
    torch.testing.assert_close(model(x, y), F.cross_entropy(logits.flatten(0, -2), y.flatten()))


@pytest.mark.parametrize("name", CATALOG)
def test_the_first_loss_is_near_that_of_a_guess(name):
    torch.manual_seed(0)
    model = models.build(name)
    x, y = batch_for(name)
    classes = model(x).shape[-1]
    assert abs(model(x, y).item() - math.log(classes)) < 0.5


@pytest.mark.parametrize("name", CATALOG)
def test_a_few_steps_lower_the_loss(name):
    torch.manual_seed(0)
    model = models.build(name, **SMALL[name])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = batch_for(name)
    first = model(x, y).item()
    for _ in range(20):
        optimizer.zero_grad()
        model(x, y).backward()
        optimizer.step()
    assert model(x, y).item() < 0.9 * first


@pytest.mark.parametrize("name", CATALOG)
def test_units_are_modules_of_the_model(name):
    model = models.build(name)
    units = [module for module in model.modules() if isinstance(module, model.shard_units)]
    assert len(units) >= 2
    assert not any(isinstance(module, torch.nn.modules.batchnorm._BatchNorm) for module in model.modules())


def test_a_token_does_not_see_the_future():
    torch.manual_seed(0)
    model = models.build("tiny-gpt", **SMALL["tiny-gpt"])
    x, _ = batch_for("tiny-gpt", samples=1)
    later = x.clone()
    later[0, 8:] = (later[0, 8:] + 1) % 256
    torch.testing.assert_close(model(x)[:, :8], model(later)[:, :8])
    assert not torch.equal(model(x)[:, 8:], model(later)[:, 8:])


def test_the_same_seed_builds_the_same_model():
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        states.append(models.build("cnn").state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


@pytest.mark.parametrize(("name", "options", "message"), [
    ("tiny-gtp", {}, r"model 'tiny-gtp' is not known \(did you mean 'tiny-gpt'\?\); use one of tiny-gpt, bench-gpt"),
    ("mlp", {"depth": 3}, "model 'mlp' cannot be built with .*depth"),
    ("tiny-gpt", {"width": 10, "heads": 4}, "width 10 cannot be cut into 4 heads"),
])
def test_bad_input(name, options, message):
    with pytest.raises(UsageError, match=message):
        models.build(name, **options)


def test_a_sequence_that_does_not_fit():
    with pytest.raises(UsageError, match="17 tokens a sequence does not fit this GPT; it was built for at most 16"):
        models.build("tiny-gpt", **SMALL["tiny-gpt"])(torch.zeros(1, 17, dtype=torch.int64))


def test_an_optimizer_that_is_not_known():
    with pytest.raises(UsageError, match=r"optimizer 'sgdd' is not known \(did you mean 'sgd'\?\); use one of adamw"):
        optimizer_class("sgdd")


def test_a_paced_layer_takes_its_time_and_no_processor(monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr(models.time, "sleep", slept.append)
    model = models.build("paced", layers=3, parameters=10, forward_ms=4.0)
    model(*batch_for("paced")).backward()
    assert slept == pytest.approx([0.004] * 3 + [0.008] * 3)
    assert all(layer.weight.grad.abs().sum() == 0 for layer in model.layers)
    assert model.tokens.weight.grad.abs().sum() > 0
    assert count(models.build("paced")) == 8 * 2**20 + 2 * 256 * 32
