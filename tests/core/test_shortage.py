"""Out of memory: who holds what, what would take less, and torch's own error behind it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import dplab
from dplab.core import shortage
from dplab.core.shortage import Shortage, is_shortage, wanted
from dplab.specs import Strategy
from dplab.telemetry.recorder import Recorder
from tests import worlds
from tests.worlds import in_threads

MIB = 2**20
CUDA = ("CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 139.72 GiB of which 1.00 MiB is "
        "free.\nIt goes on.")


class Hungry(nn.Module):
    """One MiB of weights; `error` is raised in the forward once there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(1))
        self.error: BaseException | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        return self.blocks[0](x).square().mean()


def failed(strategy: str, error: BaseException | None, *, where: str = "forward") -> BaseException:
    """What rank 1 of 2 is told where it runs out of memory in its second step."""
    def body() -> BaseException | None:
        model = Hungry()
        engine = dplab.parallelize(model, worlds.adamw, strategy)
        engine.backward(engine(torch.ones(2, 512)))
        engine.step()
        if engine.world.rank == 0:
            return None
        if where == "forward":
            model.error = error
        else:
            model.blocks[0].weight.register_hook(lambda _: (_ for _ in ()).throw(error))
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            engine.backward(engine(torch.ones(2, 512)))
        return caught.value

    told = in_threads(2, body)[1]
    assert told is not None
    return told


def test_categories_and_the_next_cheaper_strategies_are_told_and_torchs_error_is_kept() -> None:
    original = torch.OutOfMemoryError(CUDA)
    told = failed("ddp", original)
    assert type(told) is torch.OutOfMemoryError
    assert told.__cause__ is original
    text = str(told)
    assert "in the forward of step 2 " in text
    assert "on rank 1 of 2: CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity" in text
    assert "It goes on" not in text
    assert "It holds params 1.0 MiB, grads 1.0 MiB, optimizer 2.0 MiB" in text
    # zero1 frees half of the optimizer's 2 MiB, zero2 of the gradients' too, zero3 of the weights'
    assert ("What would help: strategy zero1 would hold 1.0 MiB less; strategy zero2 would hold 1.5 MiB less; "
            "strategy zero3 would hold 2.0 MiB less, which is enough; recompute would keep of the activations") in text
    assert text.endswith("a smaller micro-batch with accumulate takes less at once.")


def test_nothing_cheaper_than_zero3_is_promised() -> None:
    text = str(failed("zero3+recompute", MemoryError()))
    assert "MemoryError. It holds params 0.5 MiB" in text
    assert "What would help: a smaller micro-batch with accumulate takes less at once." in text


def test_in_backward_too() -> None:
    assert "in the backward of step 2 " in str(failed("zero2", torch.OutOfMemoryError("none left"), where="backward"))


def test_the_hosts_own_error() -> None:
    class Huge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self) -> torch.Tensor:
            return torch.empty(1 << 55) * self.weight

    engine = dplab.parallelize(Huge(), worlds.adamw, "zero1")
    with pytest.raises(RuntimeError, match=r"out of memory in the forward of step 1 on rank 0 of 1: .*you tried to "
                                           r"allocate \d+ bytes.* What would help: a smaller micro-batch.*; more ranks "
                                           r"would share the states") as caught:
        engine()
    assert "DefaultCPUAllocator" in str(caught.value.__cause__)


def test_other_errors_stay_as_they_are() -> None:
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    assert failed("ddp", error) is error


@pytest.mark.parametrize(("message", "size"), [
    (CUDA, 2 * MIB), ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.", 4096),
    ("CUDA out of memory. Tried to allocate 1.50 GiB.", 3 * 2**29), ("none left", None)])
def test_what_was_wanted(message: str, size: int | None) -> None:
    assert wanted(message) == size
    assert is_shortage(torch.OutOfMemoryError(message))


def test_cudas_allocator_and_its_snapshot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Held:
        def bytes(self) -> dict[str, int]:
            return {"params": MIB, "grads": MIB, "optimizer": 2 * MIB, "master": 0, "gathered": 0, "buckets": 0,
                    "activations": 0, "other": 0, "allocated": 6 * MIB, "reserved": 10 * MIB, "fragmentation": 4 * MIB}

    class Folder(Recorder):
        folder = tmp_path

    class World:
        rank, size, device = 0, 2, torch.device("cuda", 0)

    def dump(path: str) -> None:
        Path(path).write_bytes(b"blocks")

    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"num_alloc_retries": 3})
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    mesh = SimpleNamespace(shard=SimpleNamespace(size=1))
    made: Any = Shortage(Held(), Strategy(sharding="ddp"), mesh, World(), Folder())  # type: ignore[arg-type]
    with pytest.raises(torch.OutOfMemoryError) as caught, made.told("optimizer", 0):
        raise torch.OutOfMemoryError(CUDA)
    text = str(caught.value)
    assert "CUDA's allocator has 6.0 MiB allocated of 10.0 MiB reserved, after 3 retries" in text
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in text
    assert text.endswith(f"The allocator's blocks are in {tmp_path / shortage.SNAPSHOT}.")
    assert (tmp_path / shortage.SNAPSHOT).read_bytes() == b"blocks"
    assert "offload" not in text
    for strategy, told in (("zero1", "offload=optimizer would move 2.0 MiB to the host's memory"),
                           ("zero2", "offload=optimizer would move 3.0 MiB to the host's memory")):
        made = Shortage(Held(), Strategy.parse(strategy), mesh, World(), Folder())  # type: ignore[arg-type]
        with pytest.raises(torch.OutOfMemoryError, match=told), made.told("optimizer", 0):
            raise torch.OutOfMemoryError(CUDA)
