"""Collectives on threads and over gloo against plain sums; errors that name ranks and calls; worlds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dplab
from dplab.errors import UsageError, WireError
from dplab.telemetry.recorder import NULL
from dplab.wire.collectives import Collectives, Counters
from dplab.wire.world import Mesh, World, without_shm
from tests.worlds import ProcessWorld, in_processes, in_shm, in_threads

WORLDS = [pytest.param(in_threads, size, id=f"threads-{size}") for size in (1, 2, 3, 4)] + [
    pytest.param(in_processes, size, id=f"gloo-{size}") for size in (2, 3)] + [
    pytest.param(in_shm, size, id=f"shm-{size}") for size in (2, 3, 4)]


def wire() -> Collectives:
    world = dplab.init()
    return Collectives(world.transport([list(range(world.size))]), Counters(), NULL)


def values(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(size * 6, dtype=torch.float64) * (rank + 1) % 7 - 2).to(dtype)


def collectives(dtype: torch.dtype) -> None:
    axis = wire()
    rank, size = axis.rank, axis.size
    every = [values(r, size, dtype) for r in range(size)]
    total = torch.stack(every).sum(0).to(dtype)

    flat = every[rank].clone()
    axis.all_reduce(flat).wait()
    assert torch.equal(flat, total)
    flat = every[rank].clone()
    axis.all_reduce(flat, op="max").wait()
    assert torch.equal(flat, torch.stack(every).amax(0))
    flat = every[rank].clone()
    axis.reduce_scatter(flat).wait()
    assert torch.equal(axis.segment(flat), total.view(size, -1)[rank])
    flat = torch.full((size * 6,), 99, dtype=dtype)
    axis.segment(flat).copy_(every[rank][:6])
    axis.all_gather(flat).wait()
    assert torch.equal(flat, torch.cat([each[:6] for each in every]))
    flat = every[rank].clone()
    axis.broadcast(flat, source=size - 1).wait()
    assert torch.equal(flat, every[-1])
    assert axis.gather_objects({"rank": rank}) == [{"rank": r} for r in range(size)]
    axis.all_reduce(torch.empty(0, dtype=dtype)).wait()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize(("where", "size"), WORLDS)
def test_collectives_equal_plain_sums(where: Any, size: int, dtype: torch.dtype) -> None:
    where(size, collectives, dtype)


def overlapping() -> None:
    axis = wire()
    flats = [torch.full((axis.size * 128,), float(i + axis.rank)) for i in range(5)]
    pendings = [axis.reduce_scatter(flat) for flat in flats]
    for pending in reversed(pendings):
        pending.wait()
        pending.wait()
    for i, flat in enumerate(flats):
        assert (axis.segment(flat) == sum(i + r for r in range(axis.size))).all()


@pytest.mark.parametrize(("where", "size"), WORLDS)
def test_several_at_once_keep_apart(where: Any, size: int) -> None:
    where(size, overlapping)


def counted() -> dict[str, Any]:
    axis = wire()
    flat = torch.zeros(axis.size * 100)
    axis.all_reduce(flat).wait()
    axis.reduce_scatter(flat).wait()
    axis.all_gather(flat).wait()
    axis.all_reduce(torch.zeros(4, dtype=torch.uint8), op="max", purpose="control").wait()
    axis.broadcast(flat).wait()
    return {name: (row["count"], row["bytes"], row.get("modelled", False))
            for name, row in axis.counters.rows.items()}


@pytest.mark.parametrize(("where", "modelled"), [(in_threads, False), (in_shm, False), (in_processes, True)])
def test_counters_have_a_row_a_collective_and_rows_of_their_own_for_the_rest(where: Any, modelled: bool) -> None:
    for got in where(2, counted):
        assert got == {"all_reduce": (1, 800, False), "reduce_scatter": (1, 400, False),
                       "all_gather": (1, 400, False), "control": (1, 4, False), "init": (1, 400, modelled)}


CALLS: dict[str, Callable[[Collectives], Any]] = {
    "all_gather of 12 float32": lambda axis: axis.all_gather(torch.zeros(12)),
    "reduce_scatter of 12 float32": lambda axis: axis.reduce_scatter(torch.zeros(12)),
    "all_reduce(sum) of 12 float32": lambda axis: axis.all_reduce(torch.zeros(12)),
    "all_reduce(sum) of 6000 float32": lambda axis: axis.all_reduce(torch.zeros(6000)),
    "all_reduce(sum) of 12 float64": lambda axis: axis.all_reduce(torch.zeros(12, dtype=torch.float64)),
    "all_reduce(max) of 12 float32": lambda axis: axis.all_reduce(torch.zeros(12), op="max"),
    "all_reduce(sum) of 12 float32 for bucket 7": lambda axis: axis.all_reduce(torch.zeros(12), bucket=7),
    "all_to_all of 12 float32": lambda axis: axis.all_to_all(torch.zeros(12), torch.zeros(12)),
    "broadcast(source=0) of 12 float32": lambda axis: axis.broadcast(torch.zeros(12)),
    "broadcast(source=0) of 600 float32": lambda axis: axis.broadcast(torch.zeros(600)),
    "gather_objects": lambda axis: axis.gather_objects(1),
}
MISMATCHES = [(one, other) for place, one in enumerate(CALLS) for other in list(CALLS)[place + 1:]]


def differing(one: str, other: str) -> str:
    """The last rank calls `other`; afterwards the same group works on, where ranks agree again."""
    axis = wire()
    call = CALLS[other if axis.rank == axis.size - 1 else one]
    with pytest.raises(WireError) as caught:
        call(axis).wait()
    return str(caught.value)


@pytest.mark.parametrize(("one", "other"), MISMATCHES[:3])
def test_different_calls_meeting_are_named_on_every_rank(one: str, other: str) -> None:
    for message in in_threads(2, differing, one, other):
        check_names_both(message, one, other)


@pytest.mark.parametrize("size", [2, 3])
def test_over_gloo_they_are_named_and_nothing_aborts_or_hangs(size: int) -> None:
    """gloo's own collectives of different sizes end the process from C++; ours never meet."""
    def every() -> list[str]:
        found = [differing(*pair) for pair in MISMATCHES]
        collectives(torch.float32)
        return found

    for messages in in_processes(size, every):
        for message, (one, other) in zip(messages, MISMATCHES, strict=True):
            check_names_both(message, one, other, last=size - 1)


def check_names_both(message: str, one: str, other: str, last: int = 1) -> None:
    calls = dict(re.findall(r"rank (\d+) calls (.+?)(?= where|: every)", message))
    assert len(calls) == 2
    assert calls.pop(str(last)) == other
    assert list(calls.values()) == [one]
    assert message.endswith("every rank must issue the same collectives in the same order")


def test_two_calls_that_change_places_are_named_over_gloo() -> None:
    def body() -> str:
        axis = wire()
        pendings = [axis.all_reduce(torch.ones(8), bucket=bucket) for bucket in ((1, 2) if axis.rank else (2, 1))]
        with pytest.raises(WireError) as caught:
            pendings[0].wait()
        return str(caught.value)

    for message in in_processes(2, body):
        assert "for bucket 1" in message
        assert "for bucket 2" in message


def halves() -> None:
    """An all-reduce between three has two halves; the second is sent when the program has gone on, or waits."""
    axis = wire()
    flats = [torch.arange(7.0) * (axis.rank + 1) + i for i in range(4)]
    pendings = [axis.all_reduce(flat) for flat in flats]
    for _ in range(3):
        pendings[2].nudge()
        pendings[0].nudge()
    for pending in pendings:
        pending.wait()
    for i, flat in enumerate(flats):
        assert torch.equal(flat, sum((torch.arange(7.0) * (rank + 1) + i for rank in range(axis.size)), torch.zeros(7)))


@pytest.mark.parametrize("size", [2, 3])
def test_an_all_reduce_goes_on_when_it_is_nudged(size: int) -> None:
    in_processes(size, halves)


def test_a_rank_that_leaves_frees_the_others_with_its_name() -> None:
    def body() -> None:
        axis = wire()
        if axis.rank == 1:
            raise KeyError("its own reason")
        axis.all_reduce(torch.zeros(3)).wait()

    with pytest.raises(KeyError, match="its own reason") as caught:
        in_threads(3, body)
    assert caught.value.__notes__ == ["on rank 1 of 3 (threads)"]


def test_a_rank_that_does_not_come_is_an_error_within_the_timeout() -> None:
    given_up = threading.Event()

    def body() -> None:
        axis = wire()
        if axis.rank == 0:
            try:
                axis.all_reduce(torch.zeros(3)).wait()
            finally:
                given_up.set()
        given_up.wait(10)  # alive, and elsewhere

    with pytest.raises(WireError, match=r"ranks \[1\] did not come to all_reduce\(sum\) of 3 float32 within 0.2 s"):
        in_threads(2, body, timeout=0.2)


def test_a_rank_that_has_ended_is_an_error_at_once_for_who_waits_for_it() -> None:
    def body() -> None:
        axis = wire()
        for _ in range(1 + axis.rank):  # what rank 0 came to before it ended is still carried out
            flat = torch.ones(3)
            axis.all_reduce(flat).wait()
            assert flat[0] == 3

    with pytest.raises(WireError, match=r"rank 0 left: it has ended while others still wait for it; give every rank "
                                        r"as many batches \(dplab.loader does\)"):
        in_threads(3, body)


def test_over_gloo_every_call_after_a_rank_has_gone_is_an_error_that_names_the_call() -> None:
    def body() -> list[str]:
        axis, said = wire(), []
        if axis.rank:
            os._exit(0)
        # by the second call gloo knows, and refuses to send
        for call in (axis.all_reduce, axis.reduce_scatter, axis.all_gather, axis.broadcast):
            with pytest.raises(WireError) as info:
                call(torch.ones(4)).wait()
            said.append(str(info.value))
        return said

    world = ProcessWorld(2, "gloo")
    try:
        said = world.answers(body, dead=[1])[0]
    finally:
        world.drop()
    names = ("all_reduce(sum)", "reduce_scatter", "all_gather", "broadcast(source=0)")
    for text, name in zip(said, names, strict=True):
        assert text.startswith(f"{name} of 4 float32 did not end: rank")


def test_alone_it_is_a_world_of_one() -> None:
    world = dplab.init()
    assert (world.rank, world.size, world.local_rank, world.device.type, world.backend) == (0, 1, 0, "cpu", "solo")
    assert dplab.init() is world


def test_a_mesh_must_cover_the_world() -> None:
    world = World(0, 4, 0, torch.device("cpu"), "gloo")
    with pytest.raises(UsageError, match=r"mesh \(3, 2\) does not cover 4 ranks; give \(replicate, shard\) sizes"):
        Mesh.of(world, (3, 2))
    with pytest.raises(UsageError, match=r"mesh has dimensions \(\); parallelize takes a DeviceMesh"):
        Mesh.of(world, object())


def device_mesh() -> list[int]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = Mesh.of(dplab.init(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    flat = torch.zeros(2)
    mesh.shard.segment(flat).fill_(dplab.init().rank)
    mesh.shard.all_gather(flat).wait()
    other = torch.tensor([float(dplab.init().rank)])
    mesh.replicate.all_reduce(other).wait()
    return [*map(int, flat.tolist()), int(other.item())]


def test_a_device_mesh_gives_its_axes() -> None:
    assert in_processes(4, device_mesh) == [[0, 1, 2], [0, 1, 4], [2, 3, 2], [2, 3, 4]]


def start(program: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env={**os.environ, **env}, text=True,
                          capture_output=True, timeout=60, check=False)


@pytest.mark.parametrize("env", [
    {"RANK": "0", "WORLD_SIZE": "2"}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}], ids=["torchrun", "slurm"])
def test_a_rank_without_a_meeting_place_is_told(env: dict[str, str]) -> None:
    done = start("import dplab; dplab.init()", **env)
    assert "rank 0 of 2 does not know where to meet the others; set MASTER_ADDR and MASTER_PORT" in done.stderr


def test_an_unknown_backend_is_refused() -> None:
    done = start("import dplab; dplab.init()", RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1",
                 DPLAB_BACKEND="mpi")
    assert "backend 'mpi' is not known; use one of nccl, gloo, shm" in done.stderr


def test_nccl_without_a_gpu_a_rank_is_refused() -> None:
    if torch.cuda.device_count() >= 2:
        pytest.skip("has two GPUs")
    done = start("import dplab; dplab.init(backend='nccl')", RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                 MASTER_PORT="1")
    assert "backend 'nccl' needs one GPU a rank, and 2 ranks share" in done.stderr


def test_the_same_program_runs_under_torchrun(tmp_path: Any) -> None:
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent("""
        import torch
        import dplab

        world = dplab.init()
        engine = dplab.parallelize(torch.nn.Linear(3, 3), lambda ps: torch.optim.AdamW(ps), "zero2")
        for _ in range(2):
            engine.backward(engine(torch.full((1, 3), float(world.rank))).sum())
            engine.step()
        engine.check_agreement()
        print(f"rank {world.rank} of {world.size} over {world.backend} agrees")
    """))
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
                           "--log-dir", str(tmp_path / "logs"), str(program)], text=True, capture_output=True,
                          timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    for rank in range(2):  # the ranks share a pipe, and may share a line
        assert f"rank {rank} of 2 over {'gloo' if without_shm() else 'shm'} agrees" in done.stdout


def test_a_program_that_just_ends_ends_well(tmp_path: Any) -> None:
    """Without a word of farewell: no thread of the backend may meet an interpreter on its way out."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent("""
        import torch
        import dplab

        engine = dplab.parallelize(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)]),
                                   lambda ps: torch.optim.SGD(ps, lr=0.1), "zero2+bucket_mb=0.01")
        for _ in range(10):
            engine.backward(engine(torch.ones(2, 64)).sum())
            engine.step()
    """))
    for turn in range(3):
        env = {**os.environ, "WORLD_SIZE": "2", "DPLAB_RENDEZVOUS": f"file://{tmp_path}/meet-{turn}",
               "DPLAB_BACKEND": "gloo"}
        ranks = [subprocess.Popen([sys.executable, str(program)], env={**env, "RANK": str(rank)},
                                  stderr=subprocess.PIPE, text=True) for rank in range(2)]
        told = [rank.communicate(timeout=60)[1] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], told
