"""torch.distributed over `backend="shm"`: every collective, dtype and reduction against a plain reference."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dplab.errors import WireError
from tests.worlds import in_shm

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8,
          torch.bool]
REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "SUM": lambda every: every.any(0) if every.dtype is torch.bool else every.sum(0),
    "AVG": lambda every: every.mean(0),
    "PRODUCT": lambda every: every.prod(0),
    "MIN": lambda every: every.amin(0),
    "MAX": lambda every: every.amax(0),
    "BAND": lambda every: _folded(every, torch.bitwise_and),
    "BOR": lambda every: _folded(every, torch.bitwise_or),
    "BXOR": lambda every: _folded(every, torch.bitwise_xor),
}
LENGTHS = (1, 5, 1000)
LONG = 600_000
"""Values that fill the large staging area more than once, in every dtype above a byte."""

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _folded(every: torch.Tensor, op: Callable[..., torch.Tensor]) -> torch.Tensor:
    total = every[0]
    for each in every[1:]:
        total = op(total, each)
    return total


def values(rank: int, numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Small whole numbers: every sum and product of four of them is exact, in any order and any dtype."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(0, 4, (numel,), generator=generator).to(dtype)


def reductions(dtype: torch.dtype) -> list[str]:
    real = dtype.is_floating_point
    return [name for name in REDUCTIONS if not ((name.startswith("B") and real) or (name == "AVG" and not real))
            and not (dtype is torch.bool and name in ("PRODUCT", "BXOR"))]


def expected(name: str, every: list[torch.Tensor]) -> torch.Tensor:
    stacked = torch.stack(every)
    wide = stacked.double() if stacked.is_floating_point() else stacked
    return REDUCTIONS[name](wide).to(every[0].dtype)


def reduced(dtype: torch.dtype) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for name in reductions(dtype):
        op = getattr(dist.ReduceOp, name)
        for numel in (*LENGTHS, LONG // size) if name == "SUM" else LENGTHS:
            every = [values(r, numel, dtype) for r in range(size)]
            flat = every[rank].clone()
            dist.all_reduce(flat, op)
            assert torch.equal(flat, expected(name, every)), ("all_reduce", name, numel)
            flat = every[rank].clone()
            dist.reduce(flat, size - 1, op)
            assert torch.equal(flat, expected(name, every) if rank == size - 1 else every[rank]), ("reduce", name)

            every = [values(r, numel * size, dtype) for r in range(size)]
            out = torch.empty(numel, dtype=dtype)
            reduce_scatter(out, every[rank].clone(), op)
            assert torch.equal(out, expected(name, every).view(size, -1)[rank]), ("reduce_scatter", name, numel)
            flat = every[rank].clone()
            own = flat.view(size, -1)[rank]
            reduce_scatter(own, flat, op)
            assert torch.equal(own, expected(name, every).view(size, -1)[rank]), ("in place", name, numel)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reductions_equal_plain_ones(size: int, dtype: torch.dtype) -> None:
    in_shm(size, reduced, dtype)


def moved(dtype: torch.dtype) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for numel in (*LENGTHS, LONG // size):
        every = [values(r, numel, dtype) for r in range(size)]
        whole = torch.cat(every)
        out = torch.empty_like(whole)
        all_gather(out, every[rank])
        assert torch.equal(out, whole), ("all_gather_single", numel)
        out = torch.zeros_like(whole)
        out.view(size, -1)[rank].copy_(every[rank])
        all_gather(out, out.view(size, -1)[rank])
        assert torch.equal(out, whole), ("in place", numel)
        outs = [torch.empty_like(each) for each in every]
        dist.all_gather(outs, every[rank])
        assert all(map(torch.equal, outs, every)), ("all_gather", numel)
        for root in range(size if numel < LONG // size else 1):
            flat = every[rank].clone()
            dist.broadcast(flat, root)
            assert torch.equal(flat, every[root]), ("broadcast", numel)
            outs = [torch.empty_like(each) for each in every] if rank == root else None
            dist.gather(every[rank], outs, dst=root)
            assert outs is None or all(map(torch.equal, outs, every)), ("gather", numel)
            one = torch.empty(numel, dtype=dtype)
            dist.scatter(one, every if rank == root else None, src=root)
            assert torch.equal(one, every[rank]), ("scatter", numel)
        pieces = [values(rank * size + r, numel, dtype, seed=1) for r in range(size)]
        back = [values(r * size + rank, numel, dtype, seed=1) for r in range(size)]
        out = torch.empty_like(whole)
        dist.all_to_all_single(out, torch.cat(pieces))
        assert torch.equal(out, torch.cat(back)), ("all_to_all_single", numel)
        outs = [torch.empty_like(each) for each in back]
        dist.all_to_all(outs, pieces)
        assert all(map(torch.equal, outs, back)), ("all_to_all", numel)
    dist.barrier()


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_movements_bring_every_value_to_its_place(size: int, dtype: torch.dtype) -> None:
    in_shm(size, moved, dtype)


def uneven(scale: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    lengths = [scale * (r * r + (r == 0)) for r in range(size)]  # one rank's is 0 where scale is
    every = [values(r, length, torch.float32) for r, length in enumerate(lengths)]
    outs = [torch.empty(length) for length in lengths]
    dist.all_gather(outs, every[rank])
    assert all(map(torch.equal, outs, every))

    inputs = [[values(r, length, torch.float32, seed=7 + s) for s, length in enumerate(lengths)] for r in range(size)]
    out = torch.empty(lengths[rank])
    dist.reduce_scatter(out, inputs[rank])
    assert torch.equal(out, sum(inputs[r][rank] for r in range(size)))

    def rows(source: int, target: int) -> int:
        return scale * ((source + 2 * target) % 3)

    def piece(source: int, target: int) -> torch.Tensor:
        return values(source * size + target, rows(source, target) * 5, torch.float32).view(-1, 5)

    sent = torch.cat([piece(rank, r) for r in range(size)])
    due = torch.cat([piece(r, rank) for r in range(size)])
    out = torch.empty_like(due)
    dist.all_to_all_single(out, sent, [rows(r, rank) for r in range(size)], [rows(rank, r) for r in range(size)])
    assert torch.equal(out, due)
    outs = [torch.empty_like(piece(r, rank)) for r in range(size)]
    dist.all_to_all(outs, [piece(rank, r) for r in range(size)])
    assert torch.equal(torch.cat(outs), due)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("scale", [0, 1, 7, 40_000])
def test_splits_may_be_uneven_and_empty(size: int, scale: int) -> None:
    in_shm(size, uneven, scale)


def other_layouts() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    matrix = torch.arange(12.0).view(3, 4).t() + rank
    dist.all_reduce(matrix)
    assert torch.equal(matrix, sum(torch.arange(12.0).view(3, 4).t() + r for r in range(size)))
    scalar = torch.tensor(float(rank))
    dist.all_reduce(scalar)
    assert scalar.item() == sum(range(size))
    empty = torch.empty(0)
    dist.all_reduce(empty)
    number = torch.tensor([1 + 2j]) * (rank + 1)
    dist.all_reduce(number)
    assert number.item() == (1 + 2j) * sum(range(1, size + 1))
    columns = torch.zeros(4, 2 * size)[:, ::2]
    dist.broadcast(columns if rank else columns.fill_(3), 0)
    assert (columns == 3).all()
    weight = torch.nn.Parameter(torch.full((3,), float(rank)))
    version = weight._version
    dist.broadcast(weight, size - 1)
    assert weight.tolist() == [size - 1.0] * 3
    assert weight._version == version, "a backend writes past autograd, as those in C++ do"
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "more": "x" * 1000 * rank})
    assert [each["rank"] for each in objects] == list(range(size))
    told = [{"from": rank}]
    dist.broadcast_object_list(told, src=size - 1)
    assert told == [{"from": size - 1}]


def test_gaps_scalars_complex_numbers_and_objects() -> None:
    in_shm(3, other_layouts)


def sixteen_bits() -> None:
    """1 + 2^-9 + 2^-9 ...: added in bf16 each is lost; added in fp32 and rounded once they count."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype, small in ((torch.bfloat16, 2.0 ** -9), (torch.float16, 2.0 ** -12)):
        flat = torch.full((10,), 1.0 if rank == 0 else small, dtype=dtype)
        exact = torch.tensor(1.0 + (size - 1) * small).to(dtype)
        assert exact != 1
        dist.all_reduce(flat)
        assert (flat == exact).all()


def test_sixteen_bit_sums_are_added_in_fp32_and_rounded_once() -> None:
    in_shm(4, sixteen_bits)


def messages() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    mine = torch.arange(1000.0) + rank
    got = torch.empty(1000)
    sending = dist.isend(mine, after)  # all ranks send before any receives
    dist.recv(got, before)
    sending.wait()
    assert torch.equal(got, torch.arange(1000.0) + before)
    for number in range(40):  # more than lie unread at once
        if rank == 0:
            dist.send(torch.tensor([number]), 1)
        elif rank == 1:
            one = torch.empty(1, dtype=torch.int64)
            dist.recv(one, 0)
            assert one.item() == number
    if rank == 0:
        for tag in (1, 2):
            dist.send(torch.tensor([tag]), 1, tag=tag)
    elif rank == 1:
        for tag in (2, 1):
            one = torch.empty(1, dtype=torch.int64)
            dist.recv(one, 0, tag=tag)
            assert one.item() == tag
    if rank:
        dist.send(torch.tensor([float(rank)]), 0)
    else:
        one, seen = torch.empty(1), []
        for _ in range(size - 1):
            source = dist.recv(one)
            assert one.item() == source
            seen.append(source)
        assert sorted(seen) == list(range(1, size))
    dist.barrier()
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, after), dist.P2POp(dist.irecv, got, before)])
    for work in works:
        work.wait()
    dist.barrier()


@pytest.mark.parametrize("size", [2, 3])
def test_messages_between_ranks(size: int) -> None:
    in_shm(size, messages)


def spelled(old: bool) -> None:
    """What c10d calls a group's methods before and since torch 2.13."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    names = ({"gather": "_allgather_base", "gathers": "allgather_into_tensor_coalesced",
              "scatter": "_reduce_scatter_base",
              "scatters": "reduce_scatter_tensor_coalesced", "exchange": "alltoall_base"} if old else
             {"gather": "all_gather_single", "gathers": "all_gather_single_coalesced",
              "scatter": "reduce_scatter_single", "scatters": "reduce_scatter_single_coalesced",
              "exchange": "all_to_all_single"})
    call = {what: getattr(group, name) for what, name in names.items()}
    every = [values(r, 4, torch.float32) for r in range(size)]
    whole, total = torch.cat(every), sum(values(r, 4 * size, torch.float32) for r in range(size))
    outs = [torch.empty(4 * size) for _ in range(3)]
    call["gather"](outs[0], every[rank]).wait()
    call["gathers"](outs[1:], [every[rank]] * 2).wait()
    assert all(torch.equal(out, whole) for out in outs)
    outs = [torch.empty(4) for _ in range(3)]
    mine = values(rank, 4 * size, torch.float32)
    options = dist.ReduceScatterOptions()
    call["scatter"](outs[0], mine, options).wait()
    call["scatters"](outs[1:], [mine] * 2, options).wait()
    assert all(torch.equal(out, total.view(size, -1)[rank]) for out in outs)
    out = torch.empty(size)
    call["exchange"](out, torch.full((size,), float(rank)), [], []).wait()
    assert out.tolist() == list(map(float, range(size)))


@pytest.mark.parametrize("old", [True, False], ids=["old names", "new names"])
def test_both_spellings_of_the_tensor_collectives(old: bool) -> None:
    in_shm(3, spelled, old)


def groups() -> None:
    rank = dist.get_rank()
    pairs = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    mine = pairs[rank % 2]
    odd = dist.new_group([1, 2, 3])
    for _ in range(3):
        flat = torch.tensor([float(rank)])
        dist.all_reduce(flat, group=mine)
        assert flat.item() == (2 if rank % 2 == 0 else 4)
        if rank:
            flat = torch.tensor([float(rank)])
            dist.broadcast(flat, 3, group=odd)
            assert flat.item() == 3
            outs = [torch.empty(1) for _ in range(3)]
            dist.all_gather(outs, torch.tensor([float(rank)]), group=odd)
            assert [each.item() for each in outs] == [1, 2, 3]
        dist.all_reduce(flat)
    dist.destroy_process_group(mine)


def test_groups_of_some_ranks() -> None:
    in_shm(4, groups)


def asynchronous() -> None:
    """Several under way, waited for in another order on every rank; the first is never waited for by rank 0."""
    rank, size = dist.get_rank(), dist.get_world_size()
    flats = [torch.full((50_000 * (i + 1),), float(rank + i)) for i in range(6)]
    works = [dist.all_reduce(flat, async_op=True) for flat in flats]
    order = list(range(6))
    random.Random(rank).shuffle(order)
    for index in order:
        if rank or index:
            works[index].wait()
            assert works[index].is_completed()
            assert (flats[index] == sum(r + index for r in range(size))).all()
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert torch.equal(work.get_future().wait()[0], torch.full((3,), float(size)))
    dist.barrier()


@pytest.mark.parametrize("size", [2, 4])
def test_works_end_in_whatever_order_they_are_waited_for(size: int) -> None:
    in_shm(size, asynchronous)


def elsewhere() -> None:
    """Rank 0 issues and then waits for something that rank 1 only does once the collective is over there."""
    store = dist.distributed_c10d._get_default_store()
    flat = torch.ones(100_000)
    work = dist.all_reduce(flat, async_op=True)
    if dist.get_rank() == 1:
        work.wait()
        store.set("over", "yes")
    store.wait(["over"])
    work.wait()
    assert (flat == 2).all()


def test_a_collective_goes_on_while_its_issuer_is_elsewhere() -> None:
    in_shm(2, elsewhere)


def disturbed(seed: int) -> list[bytes]:
    """Values whose sum depends on the order of adding; ranks come at random moments."""
    import time

    rank = dist.get_rank()
    pause = random.Random(100 * seed + rank)
    bits = []
    for numel in (10, 70_000, 500_000):
        flat = torch.randn(numel, generator=torch.Generator().manual_seed(rank)) * 10.0 ** (3 * rank)
        time.sleep(pause.random() * 0.003)
        dist.all_reduce(flat)
        bits.append(flat.numpy().tobytes())
    return bits


def test_the_same_bits_on_all_ranks_whatever_the_timing() -> None:
    seen = {tuple(bits) for seed in range(4) for bits in in_shm(4, disturbed, seed)}
    assert len(seen) == 1
    for place, numel in enumerate((10, 70_000, 500_000)):
        total = torch.zeros(numel)
        for rank in range(4):
            total += torch.randn(numel, generator=torch.Generator().manual_seed(rank)) * 10.0 ** (3 * rank)
        assert next(iter(seen))[place] == total.numpy().tobytes(), "the sum in rank order"


def refused() -> list[str]:
    told = []
    for call in (lambda: dist.all_reduce(torch.ones(3, dtype=torch.int64), dist.ReduceOp.AVG),
                 lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND),
                 lambda: dist.all_reduce(torch.ones(3).to_sparse()),
                 lambda: all_gather(torch.ones(3), torch.ones(3)),
                 lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3))):
        with pytest.raises(WireError) as caught:
            call()
        told.append(str(caught.value))
    flat = torch.ones(3)
    dist.all_reduce(flat)
    assert flat[0] == 2, "nobody was left waiting"
    return told


def test_what_means_nothing_is_refused_before_anybody_waits() -> None:
    for told in in_shm(2, refused):
        assert "avg of int64 is not defined; averages are of floating-point values" in told[0]
        assert "band of float32 is not defined" in told[1]
        assert "backend 'shm' moves dense CPU tensors, not one that is torch.sparse_coo on cpu" in told[2]
        assert "the output of all_gather has 3 values where 2 ranks times an input of 3 are 6" in told[3]
        assert "all_to_all over 2 ranks of 3 rows with splits []" in told[4]
