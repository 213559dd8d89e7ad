"""Ours read by plain torch and by FSDP2, theirs read by us: weights and Adam's state, element by element."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import dplab
from tests.checkpoint.programs import moments, same, train, wrap
from tests.worlds import Even, adamw, build, in_processes, in_threads

ROWS = 6


def ours(model: nn.Module, strategy: str, load: Path | None, save: Path | None,
         steps: int = 2) -> dict[str, torch.Tensor]:
    engine = wrap(model, strategy)
    start = engine.load(load) if load is not None else 0
    train(engine, start, start + steps, ROWS)
    if save is not None:
        engine.save(save)
    return engine.full_state_dict()


def plain(model: nn.Module, load: Path | None, save: Path | None, start: int, steps: int) -> dict[str, torch.Tensor]:
    """One process, no wrapper, torch.distributed.checkpoint as its tutorial has it."""
    from tests.checkpoint.programs import BATCHES

    model = copy.deepcopy(model)
    optimizer = adamw(model.parameters())
    if load is not None:
        state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=load, no_dist=True)
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optim"])
    for step in range(start, start + steps):
        optimizer.zero_grad()
        for x, y in BATCHES[step * ROWS:(step + 1) * ROWS]:
            (model(x, y) / ROWS).backward()
        optimizer.step()
    if save is not None:
        dcp.save({"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)},
                 checkpoint_id=save, no_dist=True)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def fsdp2(model: nn.Module, load: Path | None, save: Path | None, start: int, steps: int) -> dict[str, torch.Tensor]:
    """The same under torch's FSDP2, on every rank of a process world."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from tests.checkpoint.programs import BATCHES

    world = dplab.init()
    model = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (world.size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model.parameters())
    if load is not None:
        state: Any = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=load)
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optim"])
    share = ROWS // world.size
    for step in range(start, start + steps):
        optimizer.zero_grad()
        for index in range(share):
            x, y = BATCHES[step * ROWS + world.rank * share + index]
            (model(x, y) / share).backward()
        optimizer.step()
    if save is not None:
        dcp.save({"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)},
                 checkpoint_id=save)
    found = {name: value.full_tensor().clone() for name, value in model.state_dict().items()}
    dist.barrier()
    return found


def close(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert list(first) == list(second)
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-10, atol=1e-10, msg=name)


@pytest.fixture(scope="module")
def reference() -> dict[str, torch.Tensor]:
    return plain(build(Even), None, None, 0, 4)


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_one_process_with_plain_torch_goes_on_from_ours(strategy: str, tmp_path: Path,
                                                        reference: dict[str, torch.Tensor]) -> None:
    in_threads(3, ours, build(Even), strategy, None, tmp_path / "saved")
    close(plain(build(Even, seed=9), tmp_path / "saved", None, 2, 2), reference)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_ours_goes_on_from_one_process_with_plain_torch(strategy: str, tmp_path: Path,
                                                        reference: dict[str, torch.Tensor]) -> None:
    plain(build(Even), None, tmp_path / "saved", 0, 2)

    def resumed() -> dict[str, torch.Tensor]:
        engine = wrap(build(Even, seed=9), strategy)
        assert engine.load(tmp_path / "saved") == 0  # plain torch tells no steps
        train(engine, 2, 4, ROWS)
        return engine.full_state_dict()

    close(in_threads(3, resumed)[0], reference)


def test_fsdp2_goes_on_from_ours_and_ours_from_fsdp2(tmp_path: Path, reference: dict[str, torch.Tensor]) -> None:
    in_threads(3, ours, build(Even), "zero3", None, tmp_path / "ours")
    theirs = in_processes(2, fsdp2, build(Even, seed=9), tmp_path / "ours", tmp_path / "theirs", 2, 1)[0]
    assert theirs

    def resumed() -> dict[str, torch.Tensor]:
        engine = wrap(build(Even, seed=9), "zero2")
        engine.load(tmp_path / "theirs")
        train(engine, 3, 4, ROWS)
        return engine.full_state_dict()

    close(in_threads(3, resumed)[0], reference)


def test_moments_of_fsdp2_come_over_element_by_element(tmp_path: Path) -> None:
    in_processes(2, fsdp2, build(Even), None, tmp_path / "theirs", 0, 2)

    def state(load: Path | None) -> dict[str, torch.Tensor]:
        engine = wrap(build(Even), "ddp")
        if load is None:
            train(engine, 0, 2, ROWS)
        else:
            engine.load(load)
        return moments(engine)

    close(in_threads(1, state, tmp_path / "theirs")[0], in_threads(1, state, None)[0])


def test_a_checkpoint_of_nothing_but_weights_loads_without_the_optimizer(tmp_path: Path) -> None:
    model = build(Even, seed=4)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "bare", no_dist=True)

    def loaded() -> dict[str, torch.Tensor]:
        engine = wrap(build(Even), "zero3")
        with pytest.raises(dplab.DplabError, match=r"has no optimizer state; load the weights alone with "
                                                   r"engine.load\(..., optimizer=False\)"):
            engine.load(tmp_path / "bare")
        engine.load(tmp_path / "bare", optimizer=False)
        return engine.full_state_dict()

    assert same(in_threads(2, loaded)[0], dict(model.state_dict()))
