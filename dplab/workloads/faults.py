"""What goes wrong on purpose: a small training run in which one rank fails at one moment, in one way.

Every rank runs `program`; `dplab.workloads.drill` launches it and judges what came of it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch

import dplab
from dplab.layout import MIB
from dplab.workloads import models
from dplab.workloads.train import Kept

POINTS = ("forward", "backward", "step", "save")
"""Moments of a step; `save` is in the middle of writing a checkpoint."""
EVERY = 2
"""Steps from one checkpoint to the next."""
REPORTED = "reported"
"""File of the run directory with the steps whose checkpoint was reported complete, one a line."""


def program(*, steps: int, fault: dict[str, Any] | None = None) -> list[float]:
    """Trains and saves; in the first attempt `fault` (kind, rank, step, point, variant) happens. This rank's losses."""
    world = dplab.init()
    torch.manual_seed(0)
    model = models.build("tiny-gpt", layers=2, width=32, heads=2, sequence=8, vocabulary=32)
    engine = dplab.parallelize(model, lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
    rows = torch.randint(0, 32, (64, 9), generator=torch.Generator().manual_seed(1))
    batches = dplab.loader([(row[:-1], row[1:]) for row in rows], batch_size=2, seed=0)
    kept = Kept(engine, batches, EVERY)
    losses = kept.load()
    first = not int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    poison = 1.0
    if fault is not None and first and fault["rank"] == world.rank:
        trap = Trap(engine, fault)
        trap.set()
    for x, y in chain.from_iterable(repeat(batches)):
        if len(losses) >= steps:
            break
        if fault is not None and first and fault["kind"] == "nan" and fault["rank"] == world.rank:
            poison = float("nan") if engine.steps == fault["step"] and poison == 1.0 else 0.0 if poison != 1.0 else 1.0
        loss = engine(x, y)
        engine.backward(loss * poison if poison != 0.0 else loss)
        # a step that overflowed moved nothing, and is made up for
        if engine.step():
            losses.append(loss.item())
            kept.save(losses)
            if world.rank == 0 and len(losses) % EVERY == 0:
                _report(engine.steps)
    return losses


def _report(step: int) -> None:
    with open(Path(os.environ["DPLAB_RUN_DIR"], REPORTED), "a") as file:
        file.write(f"{step}\n")
        file.flush()
        os.fsync(file.fileno())


class Trap:
    """Waits for one moment of one step."""

    def __init__(self, engine: dplab.Engine, fault: dict[str, Any]) -> None:
        self.engine, self.fault = engine, fault

    def set(self) -> None:
        """Lays it. (`nan` has no moment but the loss, which the program itself spoils.)"""
        if self.fault["kind"] == "nan":
            return
        point = self.fault["point"]
        if point == "forward":
            self.engine.module.get_submodule("blocks.1").register_forward_pre_hook(lambda *_: self.spring())
        elif point == "backward":
            self.engine.module.get_parameter("tokens.weight").register_hook(  # type: ignore[no-untyped-call]
                lambda _grad: self.spring())
        elif point == "step":
            self.engine.optimizer.register_step_pre_hook(lambda *_: self.spring())
        else:
            self._in_writing()

    def spring(self) -> None:
        """It happens, if this is the step."""
        if self.engine.steps == self.fault["step"]:
            FAULTS[self.fault["kind"]](self.fault)

    def _in_writing(self) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        write = FileSystemWriter.write_data

        def half(writer: Any, plan: Any, planner: Any) -> Any:
            done = write(writer, plan, planner)
            self.spring()
            return done

        FileSystemWriter.write_data = half  # type: ignore[method-assign, assignment]


def _kill(_fault: dict[str, Any]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(_fault: dict[str, Any]) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _raise(fault: dict[str, Any]) -> None:
    raise RuntimeError(f"the drill's own error in the {fault['point']}")


def _out_of_memory(fault: dict[str, Any]) -> None:
    if fault["variant"] == 0:
        raise MemoryError
    if fault["variant"] == 1:
        raise torch.OutOfMemoryError("CUDA out of memory (the drill's own)")
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 64 * MIB, resource.RLIM_INFINITY))
    torch.empty(1024 * MIB, dtype=torch.uint8)


def _hang(_fault: dict[str, Any]) -> None:
    while True:
        time.sleep(0.02)


def _fill_disk(fault: dict[str, Any]) -> None:
    if fault["disk"] is None:      # no disk of its own: files of this process may not grow any more
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        return
    handle = os.open(Path(fault["disk"], "filler"), os.O_WRONLY | os.O_CREAT, 0o600)
    for portion in (1 << 16, 1 << 10, 1):
        with contextlib.suppress(OSError):
            while os.write(handle, bytes(portion)):
                pass
    os.close(handle)


def _cut_network(_fault: dict[str, Any]) -> None:
    subprocess.run(["ip", "link", "set", "lo", "down"], check=True)


FAULTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "kill": _kill, "stop": _stop, "exception": _raise, "out-of-memory": _out_of_memory, "hang": _hang, "nan": _raise,
    "torn": _kill, "disk": _fill_disk, "network": _cut_network}
