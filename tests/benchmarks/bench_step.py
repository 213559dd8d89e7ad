"""Cost of a step against no wrapper, on one rank and no wire: what hooks, buckets and the ledger add.

    python -m tests.benchmarks.bench_step

Prints ratios to the plain model, from alternating blocks in one process; asserts nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

import dplab
from dplab.workloads import models

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")


def contender(strategy: str | None, x: torch.Tensor) -> Callable[[], None]:
    """One step of the benchmark GPT, plain or under a strategy."""
    torch.manual_seed(0)
    model = models.build("bench-gpt")
    if strategy is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

        def plain() -> None:
            model(x, x).backward()
            optimizer.step()
            optimizer.zero_grad()

        return plain
    engine = dplab.parallelize(model, lambda ps: torch.optim.AdamW(ps, lr=1e-3, fused=True), strategy)

    def ours() -> None:
        engine.backward(engine(x, x))
        engine.step()

    return ours


def main(rounds: int = 12, block: int = 2) -> None:
    """Alternates short blocks, so that a drifting machine hits all alike; medians of paired ratios."""
    torch.set_num_threads(1)
    x = torch.randint(0, 256, (1, 128))
    steps = {name or "plain": contender(name, x) for name in (None, *STRATEGIES)}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, step in steps.items():
            began = time.perf_counter()
            for _ in range(block):
                step()
            if turn:
                times[name].append((time.perf_counter() - began) / block)
    for name, taken in times.items():
        ratio = statistics.median(mine / base for mine, base in zip(taken, times["plain"], strict=True))
        print(f"{name:6} {1e3 * statistics.median(taken):8.1f} ms   ratio to plain {ratio:.3f}")


if __name__ == "__main__":
    main()
