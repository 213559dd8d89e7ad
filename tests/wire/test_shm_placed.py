"""Collectives of tensors that live in shared memory: equal to plain sums, lazy, and gone with the tensor."""

from __future__ import annotations

import copy
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dplab
from dplab.errors import WireError
from dplab.telemetry.recorder import NULL
from dplab.wire.collectives import Collectives, Counters
from dplab.wire.shm.memory import HOMES
from tests.worlds import ProcessWorld, Uneven, adamw, build, in_shm, in_threads, uneven_batches

CPU = torch.device("cpu")


def wire() -> Collectives:
    world = dplab.init()
    return Collectives(world.transport([list(range(world.size))]), Counters(), NULL)


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(numel, dtype=torch.float64) * (rank + 1) % 7 - 2).to(dtype)


def collectives(dtype: torch.dtype, each: int) -> None:
    axis = wire()
    rank, size, numel = axis.rank, axis.size, each * axis.size
    every = [values(r, numel, dtype) for r in range(size)]
    total = torch.stack(every).sum(0).to(dtype)

    def housed() -> torch.Tensor:
        flat = axis.housed(every[rank])
        assert HOMES.place(flat) is not None
        return flat

    flat = housed()
    axis.all_reduce(flat).wait()
    assert torch.equal(flat, total)
    flat = housed()
    axis.all_reduce(flat, op="max").wait()
    assert torch.equal(flat, torch.stack(every).amax(0))
    flat = housed()
    axis.reduce_scatter(flat).wait()
    assert torch.equal(axis.segment(flat), total.view(size, -1)[rank])
    flat, out = housed(), torch.empty(each, dtype=torch.float64)
    axis.reduce_scatter(flat, out).wait()
    assert torch.equal(out.to(dtype), total.view(size, -1)[rank])
    flat = housed()
    axis.all_gather(flat).wait()
    assert torch.equal(flat, torch.cat([value.view(size, -1)[r] for r, value in enumerate(every)]))
    own, full = axis.housed(every[rank][:each]), torch.empty(numel, dtype=dtype)
    axis.all_gather(full, own).wait()
    assert torch.equal(full, torch.cat([value[:each] for value in every]))
    half = housed()[:each]
    axis.all_reduce(half).wait()
    assert torch.equal(half, total[:each]), "a slice of a flat buffer"


@pytest.mark.parametrize("each", [1, 100, 200_000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_collectives_equal_plain_sums(size: int, dtype: torch.dtype, each: int) -> None:
    in_shm(size, collectives, dtype, each)


def in_rank_order(each: int) -> list[bytes]:
    """Values whose sum depends on the order of adding."""
    axis = wire()
    generator = torch.Generator().manual_seed(axis.rank)
    flat = axis.housed(torch.randn(each * axis.size, generator=generator) * 10.0 ** (3 * axis.rank))
    other = axis.housed(flat.clone())
    axis.all_reduce(flat).wait()
    axis.reduce_scatter(other).wait()
    assert torch.equal(axis.segment(other), axis.segment(flat))
    return [flat.numpy().tobytes()]


@pytest.mark.parametrize("each", [10, 150_000])
def test_sums_are_in_rank_order_as_those_of_threads(each: int) -> None:
    assert len({bits for result in in_shm(4, in_rank_order, each) + in_threads(4, in_rank_order, each)
                for bits in result}) == 1


def wait_in_other_orders() -> None:
    axis = wire()
    flats = [axis.housed(torch.full((axis.size * 128,), float(i + axis.rank))) for i in range(6)]
    pendings = [axis.reduce_scatter(flat) if i % 2 else axis.all_reduce(flat) for i, flat in enumerate(flats)]
    private = torch.full((1000,), float(axis.rank))
    pendings.append(axis.all_reduce(private))
    for pending in reversed(pendings) if axis.rank % 2 else pendings:
        pending.wait()
        pending.wait()
    for i, flat in enumerate(flats):
        assert (axis.segment(flat) == sum(i + r for r in range(axis.size))).all()
    assert (private == sum(range(axis.size))).all()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_several_at_once_may_be_waited_for_in_any_order(size: int) -> None:
    in_shm(size, wait_in_other_orders)


def many_more_than_slots() -> None:
    axis = wire()
    flats = [axis.housed(torch.ones(64)) for _ in range(150)]
    for pending in [axis.all_reduce(flat) for flat in flats]:
        pending.wait()
    assert all((flat == axis.size).all() for flat in flats)


def test_more_may_be_under_way_than_there_are_slots() -> None:
    in_shm(2, many_more_than_slots)


def differing() -> list[str]:
    axis = wire()
    told = []
    for flat in (axis.housed(torch.ones(64 + 64 * axis.rank)), axis.housed(torch.ones(64))):
        with pytest.raises(WireError) as caught:
            axis.all_reduce(flat, bucket=axis.rank).wait()
        told.append(str(caught.value))
    return told


def test_calls_that_differ_are_named_on_every_rank() -> None:
    world = ProcessWorld(2, "shm")
    try:
        for first, again in world.call(differing):
            assert "rank 0 calls all_reduce(sum) of 64 float32 for bucket 0" in first
            assert "rank 1 calls all_reduce(sum) of 128 float32 for bucket 1" in first
            assert again == first
    finally:
        world.drop()


def where_buffers_live(name: str) -> dict[str, Any]:
    engine = dplab.parallelize(copy.deepcopy(build(Uneven, torch.float32)), adamw, name)
    x, y = uneven_batches(dplab.init().size)[dplab.init().rank]
    engine.backward(engine(x, y))
    engine.step()
    bucket = engine._buckets[0]
    shared = {"params": bucket.params.flat if name != "zero3" else bucket.params.owned,
              "grads": bucket.grads._full if name in ("ddp", "zero1") else bucket.grads._pool.take()}
    return {key: HOMES.place(tensor) is not None for key, tensor in shared.items()} | {
        "full": name == "zero3" and HOMES.place(bucket.params.full) is not None}


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3"])
def test_flat_buffers_live_in_shared_memory_and_gathered_units_do_not(name: str) -> None:
    for where in in_shm(2, where_buffers_live, name):
        # under ddp nothing is gathered, so its weights need not be shared
        assert where == {"params": name != "ddp", "grads": True, "full": False}


def held() -> tuple[int, int]:
    """Descriptors and homes."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(HOMES._segments)


def engines_that_come_and_go() -> list[tuple[int, int]]:
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)])
    seen = []
    for _ in range(4):
        engine = dplab.parallelize(copy.deepcopy(model), adamw, "zero1")
        engine.backward(engine(torch.ones(1, 512)).sum())
        engine.step()
        del engine
        dist.barrier()
        seen.append(held())
        dist.barrier()
    return seen


def test_an_engine_that_is_gone_leaves_no_descriptor_and_no_home() -> None:
    for seen in in_shm(2, engines_that_come_and_go):
        assert seen[1:] == [seen[0]] * 3


def used() -> int:
    """Bytes that this process uses more than before, of 20 MB that two ranks share."""
    from dplab.telemetry.process import usage

    axis = wire()
    before = usage(os.getpid())
    flat = axis.empty(5_000_000, torch.float32, CPU).fill_(1)
    axis.all_gather(flat).wait()
    axis.barrier()
    after = usage(os.getpid())
    axis.barrier()
    assert before is not None
    assert after is not None
    return after.private - before.private


def test_what_ranks_share_counts_once_in_the_sum_over_ranks() -> None:
    both = sum(in_shm(2, used))
    assert 0.9 * 40_000_000 < both < 1.15 * 40_000_000


def freed() -> tuple[int, int]:
    """Bytes of a peer's mapping before and after its owner has let go of the tensor."""
    axis = wire()
    flat = axis.housed(torch.ones(2_000_000))
    axis.all_gather(flat).wait()

    def mapped() -> int:
        text, total, ours = Path("/proc/self/smaps").read_text(), 0, False
        for line in text.splitlines():
            if "-" in line.split(" ")[0]:
                ours = "memfd:dplab" in line
            elif ours and line.startswith("Rss:"):
                total += int(line.split()[1]) * 1024
        return total

    before = mapped()
    axis.barrier()
    del flat
    gc.collect()
    axis.barrier()
    return before, mapped()


def test_memory_goes_with_its_tensor_though_peers_have_mapped_it() -> None:
    for before, after in in_shm(2, freed):
        assert before - after >= 0.9 * (8_000_000 + 4_000_000), "its own, and the segment it has read"
