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
OFFLOADED = ("zero1+fp32+offload=optimizer", "zero2+fp32+offload=optimizer", "zero3+fp32+offload=all",
             "zero3+bf16+offload=optimizer", "zero3+bf16+offload=parameters",
             "zero2+bf16+accum2+offload=optimizer", "zero3+bf16+accum2+offload=all")


def steps(strategy: str, count: int = 5) -> dict[str, Any]:
    """What a rank runs: a few steps of a small model; losses, weights' checksum, memory as two sides tell it."""
    import torch
    from torch import nn

    import dplab
    from dplab.core.params import checksum

    world = dplab.init()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
    before = torch.cuda.memory_allocated()
    engine = dplab.parallelize(model, lambda ps: torch.optim.AdamW(ps, lr=1e-3), strategy)
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(world.rank)).to(world.device)
    x = x.to(next(model.parameters()).dtype)
    losses = []
    for _ in range(count):
        for _ in range(engine.strategy.accumulate):
            loss = engine(x).float().square().mean()
            engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    del loss, x
    memory = engine.memory()
    known = sum(memory[name] for name in ("params", "grads", "optimizer", "master", "gathered", "buckets"))
    pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    engine.check_agreement()
    return {"losses": losses, "backend": world.backend, "device": str(world.device), "known": known,
            "allocated": torch.cuda.memory_allocated() - before, "memory": memory,
            "pinned": pinned, "full": engine.full_state_dict(),
            "weights": {name: checksum(value) for name, value in engine.full_state_dict().items()}}


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


def overlapped() -> dict[str, float]:
    """Copies and kernels of one profiled step of the benchmark GPT under `zero2+offload=optimizer`."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    import dplab
    from dplab.workloads import models

    world = dplab.init()
    x = torch.randint(0, 256, (32, 128), device=world.device)
    result: dict[str, float] = {}
    for name, strategy in (("plain_ms", "zero2"), ("step_ms", "zero2+offload=optimizer")):
        engine = dplab.parallelize(models.build("bench-gpt"), lambda ps: torch.optim.AdamW(ps, lr=1e-3, fused=True),
                                   strategy)
        for turn in range(6):
            torch.cuda.synchronize()
            began = time.perf_counter()
            engine.backward(engine(x, x))
            engine.step()
            torch.cuda.synchronize()
            result[name] = 1e3 * (time.perf_counter() - began)
            del turn
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as told:
        engine.backward(engine(x, x))
        engine.step()
        torch.cuda.synchronize()
    device = [event for event in told.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    down = [event.time_range for event in device if "DtoH" in event.name]
    kernels = [event.time_range for event in device if "Memcpy" not in event.name and "Memset" not in event.name]
    spent = sum(copy.end - copy.start for copy in down)
    beside = sum(max((min(copy.end, kernel.end) - max(copy.start, kernel.start) for kernel in kernels), default=0.0)
                 for copy in down if any(k.start < copy.end and copy.start < k.end for k in kernels))
    owned = float(sum(bucket.layout.shard_numel * 4 for bucket in engine._buckets))
    return {**result, "beside": beside / spent if spent else 0.0, "owned_bytes": owned,
            "down_bytes": owned if spent else 0.0}


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


def check_offload() -> str:
    """The step runs on the host: the same numbers but for rounding, and the device holds what is predicted."""
    import torch

    import dplab

    lines = []
    for strategy in OFFLOADED:
        for ranks, backend in ((1, "nccl"), (2, None))[:2 if "fp32" in strategy else 1]:
            plain = launched(strategy.partition("+offload")[0], ranks, backend)
            moved = launched(strategy, ranks, backend)
            tight = {"rtol": 1e-4, "atol": 1e-6} if "bf16" not in strategy else {"rtol": 2e-2, "atol": 2e-3}
            for mine, theirs in zip(moved, plain, strict=True):
                torch.testing.assert_close(torch.tensor(mine["losses"]), torch.tensor(theirs["losses"]), **tight)
                torch.testing.assert_close(mine["full"], theirs["full"], **tight)
                told = dplab.estimate(8 * (256 * 256 + 256), ranks, strategy)
                assert told.host_bytes <= mine["memory"]["host"] <= 1.1 * told.host_bytes + 4096
                assert mine["pinned"] > 0, "nothing is pinned"
                assert mine["allocated"] < theirs["allocated"], (strategy, mine["allocated"], theirs["allocated"])
                assert -4096 <= mine["allocated"] - mine["known"] <= 32 * 2**20
        lines.append(f"{strategy} {moved[0]['known'] / 1e6:.2f} of {plain[0]['known'] / 1e6:.2f} MB, "
                     f"{moved[0]['memory']['host'] / 1e6:.2f} MB on the host")
    return "; ".join(lines)


def check_offload_hides_behind_backward() -> str:
    """Gradients leave on a stream of their own: a larger model's step, with what the profiler saw of the copies."""
    import dplab

    told, = dplab.launch(overlapped, world_size=1, detach=False).wait(timeout=120)
    assert told["down_bytes"] >= told["owned_bytes"], told
    assert told["beside"] > 0, "no copy to the host ran while the device computed"
    return (f"{told['beside']:.0%} of the copies' time beside kernels; step {told['step_ms']:.0f} ms, without "
            f"{told['plain_ms']:.0f} ms")


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
