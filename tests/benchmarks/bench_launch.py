"""From `dplab.launch` to the end of the first training step: `python tests/benchmarks/bench_launch.py`.

Two ranks, a small MLP, AdamW, gloo. `first`: the warm parent is started by this very launch. `warm`: it is there.
`cold`: fresh interpreters. A program that uses the engine; `--plain` uses torch's DDP.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import dplab


def engine_step() -> int:
    """One step on the engine; when it ended, in monotonic ns."""
    import torch

    dplab.init()
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    engine = dplab.parallelize(model, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3))
    engine.backward(engine(torch.randn(16, 64)).square().mean())
    engine.step()
    return time.monotonic_ns()


def plain_step() -> int:
    """The same on torch's DistributedDataParallel."""
    import os

    import torch

    torch.distributed.init_process_group("gloo", init_method=os.environ["DPLAB_RENDEZVOUS"],
                                         rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
    return time.monotonic_ns()


def main() -> None:
    """Prints milliseconds, the slower rank's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plain", action="store_true")
    function = plain_step if parser.parse_args().plain else engine_step
    with tempfile.TemporaryDirectory() as root:
        def launched(warm: bool) -> tuple[float, float]:
            start = time.monotonic_ns()
            run = dplab.launch(function, world_size=2, root=root, detach=False, warm=warm)
            returned = time.monotonic_ns()
            return (returned - start) / 1e6, (max(run.wait(120)) - start) / 1e6

        for name, count, warm in (("first", 1, True), ("warm", 10, True), ("cold", 3, False)):
            pairs = [launched(warm) for _ in range(count)]
            print(f"{name:<6} launch returns after {statistics.median(pair[0] for pair in pairs):7.1f} ms, first step "
                  f"ends after {statistics.median(pair[1] for pair in pairs):7.1f} ms (median of {count})")


if __name__ == "__main__":
    main()
