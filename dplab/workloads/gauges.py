"""What `dplab.calibrate` runs on every rank: how fast this machine computes, copies and sends.

All ranks measure the same thing at the same moment, as they train: what they take from each other (cores, caches,
memory) is in the figures. A figure is a list of seconds, one a repetition, the slowest rank's each time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import dplab
from dplab.core import saved
from dplab.layout import CACHED
from dplab.telemetry.recorder import NULL
from dplab.wire.collectives import Collectives, Counters, Pending
from dplab.wire.world import World, adopt
from dplab.workloads import models

GEMMS = ((64, 64, 64), (128, 128, 128), (256, 256, 256), (512, 512, 512), (1024, 512, 1024))
"""Rows, depth and columns of the products on the curve."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
COPIED = 4 * 2**20
"""Elements of the copy, far more than a cache holds."""
SIZES = (16 * 2**10, 256 * 2**10, 2**20, 4 * 2**20, 16 * 2**20)
"""Bytes of the full buffers that are sent."""
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")
OPTIMIZED = (2**18, 2**21)
"""Parameters that the optimizer steps."""
MODEL = "bench-gpt"
DEPTHS = (1, 3)
"""Layers of the two nets whose passes are timed."""
_MOST = 400
"""Repetitions of one figure."""


@dataclass
class _Bench:
    """The ranks in step with each other. `budget`: seconds for one figure, which has `least` repetitions at least."""

    axis: Collectives
    budget: float
    least: int

    def seconds(self, call: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> list[float]:
        """Of one call, again and again within the budget; as often on every rank."""
        once = self._timed(call, before)
        once = max(self.axis.gather_objects(min(once, self._timed(call, before))))
        times = max(self.least, min(_MOST, int(self.budget / max(once, 1e-7))))
        self.axis.barrier()
        mine = [self._timed(call, before) for _ in range(times)]
        return [max(each) for each in zip(*self.axis.gather_objects(mine), strict=True)]

    def turns(self, calls: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
        """Of several calls, one after the other again and again, so that a drifting machine hits all alike."""
        once = max(self.axis.gather_objects(sum(self._timed(call, lambda: None) for call in calls.values())))
        mine: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(max(self.least, min(_MOST, int(3 * self.budget / max(once, 1e-7))))):
            for name, call in calls.items():
                self.axis.barrier()
                mine[name].append(self._timed(call, lambda: None))
        every = self.axis.gather_objects(mine)
        return {name: [max(each) for each in zip(*(told[name] for told in every), strict=True)] for name in calls}

    @staticmethod
    def _timed(call: Callable[[], Any], before: Callable[[], Any]) -> float:
        before()
        began = time.perf_counter()
        call()
        return time.perf_counter() - began


def measure(*, budget: float, micro_batches: tuple[int, int] | None, least: int = 5) -> dict[str, Any]:
    """Everything: `budget` seconds a figure, `least` repetitions of it at least. `micro_batches`: samples of the
    benchmark GPT's two passes; None: the wire alone."""
    world = dplab.init()
    torch.manual_seed(0)
    bench = _Bench(Collectives(world.transport([list(range(world.size))]), Counters(), NULL), budget, least)
    told: dict[str, Any] = {"backend": world.backend, "ranks": world.size, "torch": torch.__version__,
                            "threads": torch.get_num_threads()}
    if micro_batches is not None:
        told |= {"gemm": _gemm(bench), "copy": _copy(bench), "units": _units(bench, micro_batches),
                 "optimizer": _optimizer(bench)}
    return told | {"wire": _wire(bench), "overlap": _overlap(bench)}


def _gemm(bench: _Bench) -> dict[str, list[dict[str, Any]]]:
    curves: dict[str, list[dict[str, Any]]] = {}
    for name, dtype in DTYPES.items():
        for rows, depth, columns in GEMMS:
            a, b = torch.randn(rows, depth).to(dtype), torch.randn(depth, columns).to(dtype)
            out = torch.empty(rows, columns, dtype=dtype)
            taken = bench.seconds(partial(torch.mm, a, b, out=out))
            curves.setdefault(name, []).append({"flops": 2 * rows * depth * columns, "seconds": taken})
    return curves


def _copy(bench: _Bench) -> dict[str, Any]:
    source, target = torch.ones(COPIED), torch.empty(COPIED)
    return {"bytes": 2 * source.nbytes, "seconds": bench.seconds(lambda: target.copy_(source))}


def _units(bench: _Bench, micro_batches: tuple[int, int]) -> dict[str, Any]:
    """Passes of the benchmark GPT at two depths and two micro-batches, the depths in turns; what they differ by is the
    layers. And the bytes that autograd saves in a layer for one sample."""
    rows = []
    for micro_batch in micro_batches:
        nets = {depth: _Training(depth, micro_batch) for depth in DEPTHS}
        turns = bench.turns({f"{depth} {call.__name__}": call for depth, net in nets.items()
                             for call in (net.forward, net.backward, net.step)})
        rows += [{"micro_batch": micro_batch, "layers": depth, "forward": turns[f"{depth} forward"],
                  "backward": turns[f"{depth} backward"]} for depth in DEPTHS]
    return {"passes": rows, "saved_bytes": _saved_bytes()}


class _Training:
    """A benchmark GPT in the engine, as it trains, but with no other rank in its world: nothing is sent."""

    def __init__(self, layers: int, micro_batch: int) -> None:
        context = copy_context()
        context.run(adopt, World(0, 1, 0, torch.device("cpu"), "solo"))
        net = models.build(MODEL, layers=layers)
        assert isinstance(net, models.GPT)
        self.engine = context.run(dplab.parallelize, net, partial(torch.optim.AdamW, lr=1e-6), "ddp")
        self.tokens = torch.randint(0, 256, (micro_batch, net.sequence))

    def forward(self) -> None:
        self.loss = self.engine(self.tokens, self.tokens)

    def backward(self) -> None:
        self.engine.backward(self.loss)

    def step(self) -> None:
        self.engine.step()


def _saved_bytes() -> int:
    """Of a layer for one sample, besides its weights and its input."""
    net = models.build(MODEL, layers=1)
    assert isinstance(net, models.GPT)
    hidden = torch.randn(1, net.sequence, net.norm.weight.numel()).requires_grad_()
    own = {tensor.untyped_storage().data_ptr() for tensor in (*net.parameters(), hidden)}
    kept: dict[int, int] = {}

    def take(tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()

    with saved.hooks(take):
        net.blocks[0](hidden)
    return sum(kept.values())


def _optimizer(bench: _Bench) -> list[dict[str, Any]]:
    rows = []
    for numel in OPTIMIZED:
        # cut as an engine cuts what a rank steps
        params = [torch.nn.Parameter(part) for part in torch.split(torch.randn(numel), CACHED)]
        for param in params:
            param.grad = torch.randn(param.numel())
        stepper = torch.optim.AdamW(params, lr=1e-6)
        rows.append({"parameters": numel, "seconds": bench.seconds(stepper.step)})
    return rows


def _wire(bench: _Bench) -> dict[str, list[dict[str, Any]]]:
    curves: dict[str, list[dict[str, Any]]] = {}
    for size in SIZES:
        flat = bench.axis.empty(size // 4, torch.float32, torch.device("cpu")).zero_()
        for name in COLLECTIVES:
            issue = getattr(bench.axis, name)

            def call(issue: Callable[[torch.Tensor], Pending] = issue, flat: torch.Tensor = flat) -> None:
                issue(flat).wait()

            curves.setdefault(name, []).append({"bytes": size, "seconds": bench.seconds(call)})
    return curves


def _overlap(bench: _Bench) -> dict[str, list[float]]:
    """The same products alone, and with an all-reduce under way; the products take a few times as long as that."""
    a, flat = torch.randn(256, 256), bench.axis.empty(2**20, torch.float32, torch.device("cpu")).zero_()
    out = torch.empty(256, 256)

    def compute() -> None:
        for _ in range(60):
            torch.mm(a, a, out=out)

    def both() -> None:
        pending = bench.axis.all_reduce(flat)
        compute()
        pending.wait()

    return bench.turns({"compute": compute, "wire": lambda: bench.axis.all_reduce(flat).wait(), "both": both})
