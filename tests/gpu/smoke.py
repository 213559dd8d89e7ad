"""What only a machine with a GPU can tell, one line a check, in under three minutes.

    python -m tests.gpu.smoke

Exit status 0 where all hold, 1 otherwise, 2 without a GPU. Needs one GPU; more are used where a check says so.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")


def steps(strategy: str, count: int = 5) -> dict[str, Any]:
    """What a rank runs: a few steps of a small model; losses, weights' checksum, memory as two sides tell it."""
    import torch
    from torch import nn

    import dplab
    from dplab.engine import _checksum

    world = dplab.init()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
    before = torch.cuda.memory_allocated()
    engine = dplab.parallelize(model, lambda ps: torch.optim.AdamW(ps, lr=1e-3), strategy)
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(world.rank)).to(world.device)
    losses = []
    for _ in range(count):
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    del loss, x
    memory = engine.memory()
    known = sum(memory[name] for name in ("params", "grads", "optimizer", "gathered", "buckets"))
    engine.check_agreement()
    return {"losses": losses, "backend": world.backend, "device": str(world.device), "known": known,
            "allocated": torch.cuda.memory_allocated() - before, "memory": memory,
            "weights": {name: _checksum(value) for name, value in engine.full_state_dict().items()}}


def overhead() -> dict[str, float]:
    """Median step of a GPT block stack with no wrapper and under each strategy at world size 1, in ms."""
    import statistics

    import torch

    import dplab
    from dplab.workloads import models

    world = dplab.init()

    def measure(make_step: Callable[[], Callable[[], None]]) -> float:
        step = make_step()
        times = []
        for turn in range(40):
            torch.cuda.synchronize()
            began = time.perf_counter()
            step()
            torch.cuda.synchronize()
            if turn >= 10:
                times.append(1e3 * (time.perf_counter() - began))
        return statistics.median(times)

    def plain() -> Callable[[], None]:
        model = models.build("bench-gpt").to(world.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

        def step() -> None:
            model(x, x).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    def ours(strategy: str) -> Callable[[], None]:
        engine = dplab.parallelize(models.build("bench-gpt"), lambda ps: torch.optim.AdamW(ps, lr=1e-3, fused=True),
                                   strategy)

        def step() -> None:
            engine.backward(engine(x, x))
            engine.step()

        return step

    x = torch.randint(0, 256, (32, 128), device=world.device)
    times = {"plain": measure(plain)}
    for strategy in STRATEGIES:
        times[strategy] = measure(lambda strategy=strategy: ours(strategy))
    return times


def launched(strategy: str, world_size: int, backend: str | None) -> list[dict[str, Any]]:
    import dplab

    results: list[dict[str, Any]] = dplab.launch(steps, world_size=world_size, args=(strategy,), backend=backend,
                                                 detach=False).wait(timeout=120)
    return results


def check_launch_after_cuda() -> str:
    import torch

    torch.ones(1, device="cuda").add_(1)
    result, = launched("ddp", 1, None)
    assert result["device"].startswith("cuda")
    return f"ranks on {result['device']}"


def check_nccl_at_one_rank() -> str:
    results = {strategy: launched(strategy, 1, "nccl")[0] for strategy in STRATEGIES}
    assert len({tuple(sorted(result["weights"].items())) for result in results.values()}) == 1
    return f"four strategies, the same weights to the bit, loss {results['ddp']['losses'][-1]:.4f}"


def check_two_ranks_on_one_gpu() -> str:
    results = {strategy: launched(strategy, 2, "gloo") for strategy in STRATEGIES}
    weights = {tuple(sorted(result["weights"].items())) for ranks in results.values() for result in ranks}
    assert len(weights) == 1
    return f"four strategies over {results['ddp'][0]['backend']}, the same weights to the bit"


def check_nccl_over_all_gpus() -> str:
    import torch

    count = torch.cuda.device_count()
    if count < 2:
        return "skipped: one GPU"
    for strategy in STRATEGIES:
        ranks = launched(strategy, count, "nccl")
        assert len({tuple(sorted(result["weights"].items())) for result in ranks}) == 1
    return f"four strategies on {count} GPUs"


def check_gauges() -> str:
    from dplab.telemetry.utilization import sources

    told = sources()
    for name in ("gpu", "gpu_memory"):
        assert told[name].measurable, str(told[name])
    return ", ".join(str(source) for source in told.values())


def check_ledger() -> str:
    lines = []
    for strategy in STRATEGIES:
        result, = launched(strategy, 1, "nccl")
        # the allocator rounds each tensor up to 512 bytes and torch keeps workspaces of its own
        slack = result["allocated"] - result["known"]
        assert -4096 <= slack <= 32 * 2**20, (strategy, result["allocated"], result["known"])
        lines.append(f"{strategy} {result['known'] / 1e6:.2f} of {result['allocated'] / 1e6:.2f} MB")
    return "; ".join(lines)


def check_overhead() -> str:
    import dplab

    times, = dplab.launch(overhead, world_size=1, detach=False).wait(timeout=120)
    return "ratio to no wrapper: " + ", ".join(f"{name} {value / times['plain']:.3f}" for name, value in times.items())


def main() -> int:
    """Runs every check; prints `ok` or `FAILED`, its name, its seconds and what it found."""
    import torch

    if not torch.cuda.is_available():
        print("no GPU here")
        return 2
    failed = 0
    for name, check in [(name, value) for name, value in globals().items() if name.startswith("check_")]:
        began = time.perf_counter()
        try:
            found, state = check(), "ok    "
        except Exception:
            found, state = traceback.format_exc(), "FAILED"
            failed += 1
        print(f"{state} {name.removeprefix('check_'):24} {time.perf_counter() - began:5.1f} s  {found}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
