"""Training over shared memory: torch's own DDP and FSDP2 unchanged, and dplab's strategies."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dplab
from dplab.specs import SHARDINGS, Strategy
from tests import worlds

STEPS = 4
State = dict[str, torch.Tensor]


def assert_equal(states: list[State], expected: State) -> None:
    """Every rank's weights against one float64 process."""
    for state in states:
        for key, value in state.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-10, atol=1e-10)


def ddp(model: nn.Module, batches: list[worlds.Batch], **kwargs: Any) -> State:
    from torch.nn.parallel import DistributedDataParallel

    rank, size = dist.get_rank(), dist.get_world_size()
    # its own weights are made wrong, so that DDP's broadcast has something to do
    model = copy.deepcopy(model)
    if rank:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(rank)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.001, **kwargs)
    optimizer = worlds.adamw(wrapped.parameters())
    for start in range(0, len(batches), size):
        optimizer.zero_grad()
        wrapped(*batches[start + rank]).backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("kwargs", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True},
                                    {"static_graph": True}], ids=str)
def test_torch_ddp_runs_unchanged(size: int, kwargs: dict[str, bool]) -> None:
    model = worlds.build(worlds.Uneven)
    batches = worlds.uneven_batches(STEPS * size)
    expected = worlds.reference(model, batches, per_step=size)
    assert_equal(worlds.in_shm(size, ddp, model, batches, **kwargs), expected)


def test_torch_ddp_gives_over_shm_what_it_gives_over_gloo() -> None:
    model = worlds.build(worlds.Uneven, torch.float32)
    batches = worlds.uneven_batches(STEPS * 2)
    theirs = worlds.in_processes(2, ddp, model, batches)[0]
    for state in worlds.in_shm(2, ddp, model, batches):
        for key, value in state.items():
            assert torch.equal(value, theirs[key]), key


def ddp_with_norm_and_join() -> tuple[list[float], list[float]]:
    """Buffers that DDP broadcasts at every forward, ranks with unequal batches, a compressing hook."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    from torch.nn.parallel import DistributedDataParallel

    rank = dist.get_rank()
    torch.manual_seed(0)
    wrapped = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    wrapped.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    with wrapped.join():
        for index in range(3 + rank):
            optimizer.zero_grad()
            wrapped(torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * index + rank))).sum().backward()
            optimizer.step()
    first = next(iter(wrapped.parameters()))
    return first.flatten().tolist(), wrapped.module[1].running_mean.tolist()


def test_torch_ddp_with_buffers_unequal_batches_and_a_hook() -> None:
    weights = [state[0] for state in worlds.in_shm(3, ddp_with_norm_and_join)]
    assert weights[0] == weights[1] == weights[2]


def fsdp2(model: nn.Module, batches: list[worlds.Batch], mesh: tuple[int, ...] = (), clip: bool = False) -> State:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank, size = dist.get_rank(), dist.get_world_size()
    model = copy.deepcopy(model)
    options = {"mesh": init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))} if mesh else {}
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = worlds.adamw(model.parameters())
    for start in range(0, len(batches), size):
        optimizer.zero_grad()
        model(*batches[start + rank]).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(("size", "mesh", "clip"), [(2, (), False), (3, (), True), (4, (2, 2), True)])
def test_torch_fsdp2_runs_unchanged(size: int, mesh: tuple[int, ...], clip: bool) -> None:
    model = worlds.build(worlds.Even)
    batches = worlds.uneven_batches(STEPS * size)
    expected = worlds.reference(model, batches, per_step=size, clip=0.5 if clip else None)
    assert_equal(worlds.in_shm(size, fsdp2, model, batches, mesh, clip), expected)


def zero_redundancy(model: nn.Module, batches: list[worlds.Batch]) -> State:
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    rank, size = dist.get_rank(), dist.get_world_size()
    wrapped = DistributedDataParallel(copy.deepcopy(model))
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
    for start in range(0, len(batches), size):
        optimizer.zero_grad()
        wrapped(*batches[start + rank]).backward()
        optimizer.step()
    return dict(wrapped.module.state_dict())


def test_torch_zero_redundancy_optimizer_runs_unchanged() -> None:
    model = worlds.build(worlds.Uneven)
    batches = worlds.uneven_batches(STEPS * 2)
    expected = worlds.reference(model, batches, per_step=2)
    assert_equal(worlds.in_shm(2, zero_redundancy, model, batches), expected)


def redistributed() -> None:
    """DTensor: functional collectives, found by the group's name."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(float(size * size * 2)).view(size * 2, size)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = rows.redistribute(placements=[Shard(1)])
    assert torch.equal(columns.redistribute(placements=[Replicate()]).to_local(), whole)
    assert torch.equal((rows.t() @ rows).full_tensor(), whole.t() @ whole)
    assert rows.sum().full_tensor() == whole.sum()


@pytest.mark.parametrize("size", [2, 3])
def test_dtensors_are_redistributed(size: int) -> None:
    worlds.in_shm(size, redistributed)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", SHARDINGS)
def test_equals_one_process(name: str, size: int) -> None:
    model = worlds.build(worlds.Uneven)
    batches = worlds.uneven_batches(STEPS * size * 2)
    expected = worlds.reference(model, batches, per_step=size * 2, clip=0.5)
    strategy = Strategy(sharding=name, bucket_mb=0.0005, accumulate=2, clip_grad_norm=0.5)
    assert_equal(worlds.in_shm(size, worlds.train, model, batches, strategy), expected)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("mode", ["window", "micro_batch"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_strategies_agree_to_the_bit_with_each_other_and_with_threads(size: int, mode: str, precision: str) -> None:
    model = worlds.build(worlds.Uneven, torch.float32)
    batches = worlds.uneven_batches(STEPS * size * 2)
    states = []
    for name, bucket_mb in itertools.product(SHARDINGS, (0.0005, None)):
        strategy = Strategy(sharding=name, accumulate=2, accumulate_mode=mode, bucket_mb=bucket_mb,
                            precision=precision, clip_grad_norm=0.5)
        states += worlds.in_shm(size, worlds.train, model, batches, strategy)
    states += worlds.in_threads(size, worlds.train, model, batches, strategy)
    for state in states[1:]:
        for key, value in state.items():
            assert torch.equal(value, states[0][key]), key


def hybrid(model: nn.Module, batches: list[worlds.Batch]) -> State:
    return worlds.train(model, batches, "zero2+bucket_mb=0.0005", mesh=(2, 2))


def test_a_hybrid_mesh_equals_one_process() -> None:
    model = worlds.build(worlds.Uneven)
    batches = worlds.uneven_batches(STEPS * 4)
    expected = worlds.reference(model, batches, per_step=4)
    assert_equal(worlds.in_shm(4, hybrid, model, batches), expected)


def backend() -> tuple[str, str]:
    world = dplab.init()
    return world.backend, type(world.transport([list(range(world.size))])).__name__


def test_the_world_says_what_it_runs_on() -> None:
    assert worlds.in_shm(2, backend) == [("shm", "ShmTransport")] * 2
