"""Over shared memory: ranks that disagree, die, leave, are late or find no memory; and what is left behind."""

from __future__ import annotations

import gc
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dplab
from dplab.errors import WireError
from dplab.telemetry.recorder import NULL
from dplab.wire.collectives import Collectives, Counters
from tests.worlds import ProcessWorld, Uneven, adamw, build, in_shm, uneven_batches

LIMIT = 20.0
"""Seconds within which a rank must have been told; far more than it takes."""


@pytest.fixture
def ranks() -> Iterator[Callable[[int], ProcessWorld]]:
    """Worlds that a test may ruin."""
    made: list[ProcessWorld] = []

    def make(size: int) -> ProcessWorld:
        made.append(ProcessWorld(size, "shm"))
        return made[-1]

    yield make
    for world in made:
        world.drop()


def told(call: Callable[[], Any]) -> str:
    with pytest.raises(WireError) as caught:
        call()
    return str(caught.value)


def axis() -> Collectives:
    world = dplab.init()
    return Collectives(world.transport([list(range(world.size))]), Counters(), NULL)


def different(kind: str) -> str:
    rank = dist.get_rank()
    if kind == "collective":
        return told(lambda: dist.all_reduce(torch.zeros(12)) if rank else dist.broadcast(torch.zeros(12), 0))
    if kind == "size":
        return told(lambda: dist.all_reduce(torch.zeros(12 + 8 * (rank == 2))))
    if kind == "dtype":
        return told(lambda: dist.all_reduce(torch.zeros(12, dtype=torch.float64 if rank == 2 else torch.float32)))
    if kind == "operation":
        return told(lambda: dist.all_reduce(torch.zeros(12), dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM))
    if kind == "root":
        return told(lambda: dist.broadcast(torch.zeros(12), int(rank == 1)))
    if kind == "large":
        return told(lambda: dist.all_reduce(torch.zeros(2_000_000 + rank)))
    assert kind == "bucket"
    return told(lambda: axis().reduce_scatter(torch.zeros(12), bucket=rank % 2).wait())


@pytest.mark.parametrize(("kind", "first", "second"), [
    ("collective", "rank 0 calls broadcast(from rank 0) of 12 float32", "rank 1 calls all_reduce(sum) of 12 float32"),
    ("size", "rank 0 calls all_reduce(sum) of 12 float32", "rank 2 calls all_reduce(sum) of 20 float32"),
    ("dtype", "rank 0 calls all_reduce(sum) of 12 float32", "rank 2 calls all_reduce(sum) of 12 float64"),
    ("operation", "rank 0 calls all_reduce(sum) of 12 float32", "rank 1 calls all_reduce(max) of 12 float32"),
    ("root", "rank 0 calls broadcast(from rank 0) of 12 float32", "rank 1 calls broadcast(from rank 1) of 12 float32"),
    ("large", "rank 0 calls all_reduce(sum) of 2000000 float32", "rank 1 calls all_reduce(sum) of 2000001 float32"),
    ("bucket", "rank 0 calls reduce_scatter of 12 float32 for bucket 0",
     "rank 1 calls reduce_scatter of 12 float32 for bucket 1"),
])
def test_calls_that_differ_are_named_on_every_rank(ranks: Any, kind: str, first: str, second: str) -> None:
    for message in ranks(3).call(different, kind):
        assert first in message
        assert second in message
        assert "every rank must issue the same collectives in the same order" in message


def looked_at_by_threads() -> list[str]:
    """Many threads of one rank wait for a collective that the ranks disagree about: all of them are told."""
    rank = dist.get_rank()
    work = dist.all_reduce(torch.zeros(12 + rank), async_op=True)
    messages: list[str] = []
    threads = [threading.Thread(target=lambda: messages.append(told(work.wait))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return messages


def test_every_thread_that_waits_is_told(ranks: Any) -> None:
    for messages in ranks(2).call(looked_at_by_threads):
        assert len(messages) == 8
        assert all("rank 0 calls all_reduce(sum) of 12 float32 where rank 1 calls" in message for message in messages)


def splits() -> str:
    rank = dist.get_rank()
    return told(lambda: dist.all_to_all_single(torch.zeros(4 + rank), torch.zeros(4), [2, 2 + rank], [2, 2]))


def test_splits_that_do_not_fit_together_are_named_on_every_rank(ranks: Any) -> None:
    for message in ranks(2).call(splits):
        assert "rank 1 gives rank 1 8 bytes where rank 1 has room for 12 in all_to_all of float32: the splits of " \
               "both must agree" in message


def after_an_error() -> list[str]:
    first = told(lambda: dist.all_reduce(torch.zeros(12 + dist.get_rank())))
    return [first, told(lambda: dist.all_reduce(torch.zeros(3)))]


def test_a_group_that_has_failed_says_so_again(ranks: Any) -> None:
    for first, second in ranks(2).call(after_an_error):
        assert second == first


def message_that_does_not_fit() -> str:
    if dist.get_rank() == 0:
        dist.send(torch.zeros(3), 1)
        return ""
    return told(lambda: dist.recv(torch.zeros(4), 0))


def test_a_message_that_does_not_fit_is_named(ranks: Any) -> None:
    assert ("rank 0 sent 3 float32 where rank 1 receives 4 float32: both must be the same"
            in ranks(2).call(message_that_does_not_fit)[1])


def dies(how: str) -> str:
    rank = dist.get_rank()
    dist.all_reduce(torch.zeros(3))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "all_reduce":
        return told(lambda: dist.all_reduce(torch.zeros(100_000)))
    if how == "send":
        return told(lambda: dist.recv(torch.zeros(3), 1))
    assert how == "our reduce_scatter"
    return told(lambda: axis().reduce_scatter(torch.zeros(12), bucket=3).wait())


@pytest.mark.parametrize(("how", "call"), [
    ("all_reduce", r"all_reduce\(sum\) of 100000 float32"), ("send", "recv of 3 float32 from rank 1"),
    ("our reduce_scatter", "reduce_scatter of 12 float32 for bucket 3")])
def test_a_killed_rank_frees_the_others_with_its_name(ranks: Any, how: str, call: str) -> None:
    world = ranks(3)
    began = time.monotonic()
    answers = world.answers(dies, how, dead=[1], timeout=LIMIT)
    assert time.monotonic() - began < LIMIT
    for rank in (0, 2):
        pattern = (rf"^rank 1 is gone \(process \d+ has ended or was killed\); rank {rank} waited [\d.e-]+ s for it in "
                   rf"{call}$")
        assert re.search(pattern, answers[rank]), answers[rank]


def dies_in_backward(strategy: str) -> tuple[str, set[str]]:
    """Rank 1 is killed in its third backward, with reductions under way."""
    rank, seen = dist.get_rank(), []
    model = build(Uneven, torch.float32)

    def die(_module: torch.nn.Module, _gradient: Any) -> None:
        seen.append(rank)
        if rank == 1 and len(seen) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    model.blocks[1].register_full_backward_pre_hook(die)
    engine = dplab.parallelize(model, adamw, strategy)
    x, y = uneven_batches(3)[rank]

    def train() -> None:
        for _ in range(5):
            engine.backward(engine(x, y))
            engine.step()

    return told(train), names()


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_a_rank_killed_in_backward_frees_the_others_with_its_name(ranks: Any, strategy: str) -> None:
    before = names()
    answers = ranks(3).answers(dies_in_backward, f"{strategy}+bucket_mb=1e-05", dead=[1], timeout=LIMIT)
    for rank in (0, 2):
        message, left = answers[rank]
        assert re.search(rf"rank 1 is gone \(process \d+ has ended or was killed\); rank {rank} waited [\d.e-]+ s for "
                         rf"it in \w+", message), message
        assert left == before


def leaves() -> str:
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        return ""
    return told(lambda: dist.all_reduce(torch.zeros(3)))


def test_a_rank_that_has_left_frees_the_others_with_its_name(ranks: Any) -> None:
    for message in ranks(3).call(leaves)[::2]:
        assert "rank 1 has left the group: it ended or destroyed its process group while others still wait" in message
        assert "give every rank as many batches (dplab.loader does)" in message


def too_late() -> str:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=0.2))
    message = ""
    if dist.get_rank() == 0:
        message = told(lambda: dist.all_reduce(torch.zeros(3), group=group))
    dist.barrier()
    return message


def test_a_rank_that_does_not_come_in_time_is_named(ranks: Any) -> None:
    assert re.search(r"rank 1 \(process \d+, alive\) did not come to all_reduce\(sum\) of 3 float32 within 0.2 s of "
                     r"rank 0", ranks(2).call(too_late)[0])


def no_memory() -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        return told(lambda: dist.all_reduce(torch.zeros(1_000_000)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_memory_that_is_not_to_be_had_is_an_error_and_no_crash(ranks: Any) -> None:
    for message in ranks(2).call(no_memory):
        assert "8.0 MiB of shared memory are not to be had" in message
        assert "use fewer ranks, a smaller model or backend='gloo'" in message


def test_more_memory_than_there_is_is_refused_before_it_is_taken() -> None:
    from dplab.wire.shm.memory import Segment

    with pytest.raises(WireError, match=r"1048576.0 GiB of shared memory are wanted where [\d.]+ [GM]iB are free"):
        Segment(1 << 50)


def held() -> tuple[int, int]:
    """Descriptors and shared mappings of this process."""
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), maps.count("/memfd:dplab")


def grown() -> tuple[tuple[int, int], tuple[int, int]]:
    before = held()
    for _ in range(3):
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.zeros(1_000_000), group=group)
        dist.send(torch.zeros(10), 1 - dist.get_rank(), group=group)
        dist.recv(torch.zeros(10), 1 - dist.get_rank(), group=group)
        dist.destroy_process_group(group)
        del group
        gc.collect()
    return before, held()


def test_a_destroyed_group_leaves_no_descriptor(ranks: Any) -> None:
    for before, after in ranks(2).call(grown):
        assert after[0] == before[0]


def names() -> set[str]:
    return set(os.listdir("/dev/shm"))


def test_nothing_is_left_behind_by_ranks_that_are_killed(ranks: Any) -> None:
    before = names()
    world = ranks(2)
    world.call(lambda: dist.all_reduce(torch.zeros(1_000_000)))
    pids = [process.pid for process in world.processes]
    assert names() == before
    world.drop()
    assert names() == before
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def start(program: str, *, size: int = 2, rank: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", textwrap.dedent(program)], text=True, capture_output=True, timeout=60,
                          check=False, env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(size),
                                            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", **env})


def test_ranks_on_several_hosts_are_refused() -> None:
    done = start("import dplab; dplab.init(backend='shm')", LOCAL_WORLD_SIZE="1")
    assert ("backend 'shm' cannot be used here: it joins processes of one host, and 1 of 2 ranks are on this one; use "
            "backend='gloo'") in done.stderr


def test_a_machine_of_another_kind_is_refused() -> None:
    done = start("import platform; platform.machine = lambda: 'aarch64'\nimport dplab; dplab.init(backend='shm')")
    assert ("backend 'shm' cannot be used here: it counts on the memory order of x86-64 Linux, and this is aarch64 "
            "Linux; use backend='gloo'") in done.stderr


WHICH = """
    import torch.distributed as dist
    def stop(backend, **_):
        raise SystemExit(f"{backend} it is")
    dist.init_process_group = stop
    import dplab
    dplab.init(device="cpu")
"""


@pytest.mark.parametrize(("env", "backend"), [
    ({"LOCAL_WORLD_SIZE": "2"}, "shm"), ({"DPLAB_RENDEZVOUS": "file:///nowhere"}, "shm"), ({}, "gloo"),
    ({"LOCAL_WORLD_SIZE": "1"}, "gloo"), ({"LOCAL_WORLD_SIZE": "2", "DPLAB_BACKEND": "gloo"}, "gloo"),
    ({"DPLAB_RENDEZVOUS": "file:///nowhere", "LOCAL_WORLD_SIZE": "1"}, "gloo")], ids=str)
def test_cpu_ranks_known_to_be_on_one_host_share_memory(env: dict[str, str], backend: str) -> None:
    assert f"{backend} it is" in start(WHICH, **env).stderr


def test_a_kernel_without_nameless_memory_is_told() -> None:
    done = start("import os; del os.memfd_create\nimport dplab; dplab.init(backend='shm')")
    assert ("backend 'shm' cannot be used here: this kernel or container gives no nameless memory, or no descriptors "
            "of processes (") in done.stderr


def test_a_program_that_just_ends_ends_well(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import torch, dplab
        dplab.init(backend="shm")
        engine = dplab.parallelize(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)]),
                                   lambda ps: torch.optim.SGD(ps, lr=0.1), "zero2+bucket_mb=0.01")
        for _ in range(10):
            engine.backward(engine(torch.ones(2, 64)).sum())
            engine.step()
    """)
    env = {**os.environ, "WORLD_SIZE": "2", "DPLAB_RENDEZVOUS": f"file://{tmp_path}/meet"}
    ends = [subprocess.Popen([sys.executable, "-c", program], env={**env, "RANK": str(rank)}, stderr=subprocess.PIPE,
                             text=True) for rank in range(2)]
    said = [rank.communicate(timeout=60)[1] for rank in ends]
    assert [rank.returncode for rank in ends] == [0, 0], said


def test_a_kept_world_still_works_after_all_this() -> None:
    assert in_shm(2, lambda: dist.get_backend()) == ["shm", "shm"]
