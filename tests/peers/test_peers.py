"""Every system trains as one process would: same losses, rank by rank, as the plain loop over both ranks' batches."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

import dplab
from dplab.errors import UsageError
from dplab.peers.base import Setup
from dplab.peers.catalog import system
from dplab.workloads import models

WORLD, STEPS, LR = 2, 4, 1e-2
SYNCHRONISED = ["ddp", "zero1", "zero2", "zero3", "torch:ddp", "torch:zero1", "torch:fsdp2",
                *(pytest.param(f"deepspeed:{stage}", marks=pytest.mark.peers) for stage in (1, 2, 3))]
SMALL = {"layers": 2, "width": 32, "heads": 2, "sequence": 16}


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    text = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(100 * step + rank))
    return text[:, :-1], text[:, 1:]


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    return models.build("tiny-gpt", **SMALL)


def losses_of(name: str) -> tuple[list[float], dict[str, int], dict[str, dict[str, int]]]:
    """What a rank runs."""
    world = dplab.init()
    chosen = system(name)
    trainer = importlib.import_module(f"dplab.peers.{chosen.module}").start(
        Setup(model=build(), optimizer=torch.optim.AdamW, lr=LR, world=world, strategy=chosen.strategy))
    losses = [trainer.step(*batch(world.rank, step)).item() for step in range(STEPS)]
    return losses, trainer.memory(), trainer.wire()


def reference(ranks: list[int]) -> list[list[float]]:
    """Losses of each of `ranks` where one process takes the mean of their gradients."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    told: list[list[float]] = [[] for _ in ranks]
    for step in range(STEPS):
        losses = [model(*batch(rank, step)) for rank in ranks]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for seen, loss in zip(told, losses, strict=True):
            seen.append(loss.item())
    return told


def run(name: str, world_size: int = WORLD) -> list[Any]:
    if system(name).missing():
        pytest.skip(str(system(name).missing()))
    return dplab.launch(losses_of, world_size=world_size, args=(name,), detach=False).wait(timeout=120)


@pytest.mark.parametrize("name", SYNCHRONISED)
def test_losses_are_those_of_one_process(name):
    told = [losses for losses, _, _ in run(name)]
    torch.testing.assert_close(torch.tensor(told), torch.tensor(reference([0, 1])), rtol=1e-4, atol=1e-5)


def test_single_does_not_synchronise():
    told = [losses for losses, _, _ in run("single")]
    alone = [reference([rank])[0] for rank in range(WORLD)]
    torch.testing.assert_close(torch.tensor(told), torch.tensor(alone), rtol=1e-4, atol=1e-5)
    assert (torch.tensor(told)[:, 1:] - torch.tensor(reference([0, 1]))[:, 1:]).abs().max() > 1e-4


@pytest.mark.parametrize("name", ["zero2", "torch:ddp", "torch:fsdp2"])
def test_a_world_of_one(name):
    ((told, _, _),) = run(name, world_size=1)
    torch.testing.assert_close(torch.tensor([told]), torch.tensor(reference([0])), rtol=1e-4, atol=1e-5)


def test_ours_tell_memory_and_wire():
    for _, memory, wire in run("zero2"):
        assert memory["params"] == WORLD * memory["grads"] > 0
        assert wire["reduce_scatter"]["bytes"] > 0


def test_names():
    assert system("single").module == "single"
    assert system("zero2+bucket_mb=1").strategy == "zero2+bucket_mb=1"
    assert system("deepspeed:3").strategy == "3"


def test_what_is_not_installed_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert system("deepspeed:1").missing() == "deepspeed is not installed; pip install 'dplab[peers]'"
    assert system("torch:ddp").missing() is None


@pytest.mark.parametrize(("name", "sentence"), [
    ("deepspeed:4", "system 'deepspeed:4' is not known; use single, ddp"),
    ("torch:fsdp1", "system 'torch:fsdp1' is not known"),
    ("zero2+shares=3:1", "ranks have equal batches; leave shares out"),
    ("ddp+accum2", "a step of it is 2 micro-batches, of the others one; leave accum2 out"),
])
def test_a_system_that_is_not_possible(name, sentence):
    with pytest.raises(UsageError, match=sentence.replace("+", r"\+")):
        system(name)


def test_a_system_may_name_its_backend():
    assert (system("torch:ddp@shm").backend, system("torch:ddp@shm").module) == ("shm", "torch_ddp")
    assert (system("zero2+bf16@gloo").backend, system("zero2+bf16@gloo").strategy) == ("gloo", "zero2+bf16")
    assert system("deepspeed:2").backend is None
    assert [system(name).rival for name in ("ddp", "single", "torch:fsdp2", "deepspeed:1@gloo")] == [
        False, False, True, True]
