"""Worlds for tests: ranks as threads, ranks as processes that stay alive, and the one-process reference.

Everything a rank does is written once, as a function of the world; where it runs is the test's choice.
"""

from __future__ import annotations

import copy
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import cloudpickle
import torch
from torch import nn

import dplab
from dplab.specs import SHARDINGS
from dplab.wire import threads

# as every launched rank does: a rank has one core, and kernels on one thread sum in one order
torch.set_num_threads(1)

STRATEGIES = [f"{name}{bucket}" for name in SHARDINGS for bucket in ("", "+bucket_mb=1e-05")]
"""Every sharding with its default buckets, which hold a whole test model, and with one parameter a bucket."""

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
Batch = tuple[torch.Tensor, torch.Tensor]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


class Uneven(nn.Module):
    """Shapes that no world size divides, a 0-dim scale, a tied pair, a module used twice, a list of units."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 7)) for _ in range(3))
        self.norm = nn.LayerNorm(7)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = h + block(h) * self.scale
        h = self.norm(h + self.blocks[0](h))
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


class Even(nn.Module):
    """As `Uneven`, without what FSDP2 refuses: nothing tied, no module used from outside its unit."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 7)) for _ in range(3))
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 11, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = h + block(h)
        return nn.functional.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


def uneven_batches(count: int, size: int = 4, length: int = 5) -> list[Batch]:
    generator = torch.Generator().manual_seed(7)
    return [tuple(torch.randint(0, 11, (size, length), generator=generator) for _ in range(2)) for _ in range(count)]


def build(kind: type[nn.Module], dtype: torch.dtype = torch.float64, seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return kind().to(dtype)


def reference(model: nn.Module, batches: Sequence[Any], *, per_step: int, optimizer: MakeOptimizer = adamw,
              clip: float | None = None) -> dict[str, torch.Tensor]:
    """One process, plain torch: every step averages `per_step` batches (ranks x window)."""
    model = copy.deepcopy(model)
    opt = optimizer(model.parameters())
    for start in range(0, len(batches), per_step):
        opt.zero_grad()
        for batch in batches[start:start + per_step]:
            (model(*batch) / per_step).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def train(model: nn.Module, batches: Sequence[Any], strategy: Any, *, optimizer: MakeOptimizer = adamw,
          **kwargs: Any) -> dict[str, torch.Tensor]:
    """What every rank runs: batches dealt out rank by rank, window by window, as `reference` averages them."""
    model = copy.deepcopy(model)
    world = dplab.init()
    engine = dplab.parallelize(model, optimizer, strategy, **kwargs)
    window = engine.strategy.accumulate
    per_step = world.size * window
    for start in range(0, len(batches), per_step):
        for index in range(window):
            x, y = batches[start + world.rank * window + index]
            engine.backward(engine(x, y))
        assert engine.step()
    engine.check_agreement()
    return engine.full_state_dict()


def in_threads(size: int, fn: Callable[..., Any], *args: Any, timeout: float = 30.0, **kwargs: Any) -> list[Any]:
    """`fn` on every rank of a thread world."""
    return threads.run(lambda: fn(*args, **kwargs), size, timeout=timeout)


class ProcessWorld:
    """Ranks as processes, over gloo or shared memory, that stay alive from test to test.

    A world in which a call failed is dropped.

    They are forked from a server that has torch imported already, so a world costs a fraction of a second.
    """

    _kept: ClassVar[dict[tuple[int, str], ProcessWorld]] = {}

    def __init__(self, size: int, backend: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch._dynamo", "dplab.engine"])
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, size, backend, self.folder.name), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    @classmethod
    def of(cls, size: int, backend: str = "gloo") -> ProcessWorld:
        if (size, backend) not in cls._kept:
            cls._kept[size, backend] = cls(size, backend)
        return cls._kept[size, backend]

    def call(self, fn: Callable[..., Any], *args: Any, timeout: float = 90.0, **kwargs: Any) -> list[Any]:
        """`fn` on every rank; the results in rank order. The first exception is raised with its traceback as note."""
        answers = self.answers(fn, *args, timeout=timeout, **kwargs)
        return [answers[rank] for rank in range(len(self.pipes))]

    def answers(self, fn: Callable[..., Any], *args: Any, dead: Sequence[int] = (), timeout: float = 90.0,
                **kwargs: Any) -> dict[int, Any]:
        """As `call`, by rank; the ranks of `dead` kill themselves in it and give none."""
        for pipe in self.pipes:
            pipe.send(cloudpickle.dumps((fn, args, kwargs)))
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < len(self.pipes) - len(dead):
            waiting = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in answers and rank not in dead}
            ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self.drop()
                raise TimeoutError(f"ranks {sorted(waiting.values())} gave no answer within {timeout} s")
            for pipe in ready:
                ok, value = cloudpickle.loads(pipe.recv())
                if not ok:
                    self.drop()
                    raise value
                answers[waiting[pipe]] = value
        return answers

    def drop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()
        for key in [key for key, world in self._kept.items() if world is self]:
            del self._kept[key]

    @classmethod
    def drop_all(cls) -> None:
        for world in list(cls._kept.values()):
            world.drop()


def in_processes(size: int, fn: Callable[..., Any], *args: Any, timeout: float = 90.0, **kwargs: Any) -> list[Any]:
    """`fn` on every rank of a kept process world over gloo."""
    return ProcessWorld.of(size).call(fn, *args, timeout=timeout, **kwargs)


def in_shm(size: int, fn: Callable[..., Any], *args: Any, timeout: float = 90.0, **kwargs: Any) -> list[Any]:
    """`fn` on every rank of a kept process world over shared memory."""
    return ProcessWorld.of(size, "shm").call(fn, *args, timeout=timeout, **kwargs)


def _serve(pipe: Any, rank: int, size: int, backend: str, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank),
                   "DPLAB_RENDEZVOUS": f"file://{folder}/rendezvous"}
    dplab.init(device="cpu", backend=backend)
    while True:
        try:
            fn, args, kwargs = cloudpickle.loads(pipe.recv())
        except EOFError:
            return
        try:
            answer = (True, fn(*args, **kwargs))
        except BaseException as error:
            error.add_note(f"on rank {rank} of {size} (processes):\n{traceback.format_exc()}")
            answer = (False, error)
        pipe.send(cloudpickle.dumps(answer))
