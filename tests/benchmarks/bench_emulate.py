"""Emulated links against a real slow one: the same job over gloo, in two network namespaces and on emulated links.

    python -m tests.benchmarks.bench_emulate [-o emulate.json] [--rounds 12] [--model tiny-gpt] [--rate 200mbit]

Needs root, iproute2 and tc. The real link is a veth pair, each end limited by a token bucket (tbf); the emulated one
has the rate that this leaves for payload: 8948 of the 9014 bytes of a full jumbo frame (TCP with timestamps; small
frames would cost these ranks' own cores what a network card does for others). Its latency is what an all-reduce of one
value takes on the real link, by its two steps, measured before. The worlds of a strategy take turns of a few steps, and
a turn counts for as long as its slowest rank took. `ratio` is the median of emulated by real over paired turns; nothing
is fitted to the steps.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HOSTS = tuple(f"dplab-bench-{os.getpid()}-{side}" for side in "ab")
LINK = "lab0"
MTU = 9000
PAYLOAD = (MTU - 52) / (MTU + 14)
STRATEGIES = ("ddp", "ddp+bucket_mb=0.25", "ddp+wire=int8", "zero1", "zero2", "zero3")
ALONE = "latency"
"""In the place of a strategy: all-reduces of one value, each of which is two steps of the link and nothing else."""
UNITS = {"mbit": 1e6, "gbit": 1e9}


def rank(strategy: str, model: str) -> None:
    """One rank: reads a number of steps a line, makes them, writes the seconds that they took."""
    import torch

    import dplab
    from dplab.workloads import corpora, models

    dplab.init(device="cpu", backend="gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    engine = dplab.parallelize(models.build(model), lambda ps: torch.optim.AdamW(ps, lr=1e-3),
                               "ddp" if strategy == ALONE else strategy)
    batch = next(iter(dplab.loader(corpora.dataset(None, images=False), batch_size=1)))
    for line in sys.stdin:
        engine.mesh.world.barrier()
        begun = time.perf_counter()
        for _ in range(int(line)):
            if strategy == ALONE:
                engine.mesh.world.all_reduce(torch.ones(1), purpose="control").wait()
            else:
                engine.backward(engine(*batch))
                engine.step()
        print(json.dumps(time.perf_counter() - begun), flush=True)


class World:
    """Two ranks that wait for their turn."""

    def __init__(self, folder: Path, strategy: str, model: str, real: bool) -> None:
        self.ranks = []
        meeting = f"file://{folder}/{'real' if real else 'emulated'}"
        for number, host in enumerate(HOSTS):
            env = {**os.environ, "RANK": str(number), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                   "DPLAB_RENDEZVOUS": meeting, "GLOO_SOCKET_IFNAME": LINK if real else "lo", "OMP_NUM_THREADS": "1"}
            inside = ["ip", "netns", "exec", host] if real else []
            self.ranks.append(subprocess.Popen(
                [*inside, sys.executable, "-m", "tests.benchmarks.bench_emulate", "--rank", strategy, "--model", model],
                env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))

    def turn(self, steps: int) -> float:
        """Seconds a step of the slowest rank."""
        for each in self.ranks:
            assert each.stdin is not None
            each.stdin.write(f"{steps}\n")
            each.stdin.flush()
        answers = []
        for each in self.ranks:
            assert each.stdout is not None
            answers.append(float(each.stdout.readline()))
        return max(answers) / steps

    def close(self) -> None:
        for each in self.ranks:
            each.kill()
            each.wait()


def command(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def open_link(rate: str) -> None:
    """Two namespaces, and a link between them that carries `rate` in each direction."""
    for host in HOSTS:
        command("ip", "netns", "add", host)
    command("ip", "link", "add", "name", LINK, "netns", HOSTS[0], "type", "veth", "peer", "name", LINK, "netns",
            HOSTS[1])
    for number, host in enumerate(HOSTS, start=1):
        for words in (["addr", "add", f"10.78.0.{number}/24", "dev", LINK], ["link", "set", "lo", "up"],
                      ["link", "set", LINK, "mtu", str(MTU), "up"]):
            command("ip", "-n", host, *words)
        command("ip", "netns", "exec", host, "sysctl", "-q", "-w", "net.ipv4.tcp_slow_start_after_idle=0")
        # no bucket that hides the limit from small messages
        command("tc", "-n", host, "qdisc", "add", "dev", LINK, "root", "tbf", "rate", rate, "burst", "32kb", "latency",
                "200ms")


def close_link() -> None:
    for host in HOSTS:
        subprocess.run(["ip", "netns", "del", host], capture_output=True, check=False)


def interval(ratios: list[float]) -> tuple[float, float]:
    """95 % of the medians of resampled turns."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[1949]


def latency(model: str) -> float:
    """Seconds that a step of the real link takes for next to nothing."""
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder), ALONE, model, real=True)
        try:
            return statistics.median(world.turn(50) for _ in range(9)) / 2
        finally:
            world.close()


def links(rate: str, model: str) -> str:
    """The topology that stands for the real link."""
    number = float(rate[:-4]) * UNITS[rate[-4:].lower()]
    return f"2x1@{number * PAYLOAD / 8:.0f}B/s:{latency(model) * 1e6:.0f}us"


def measure(strategy: str, model: str, links: str, rounds: int, steps: int) -> dict[str, float | str]:
    with tempfile.TemporaryDirectory() as folder:
        worlds = [World(Path(folder), strategy, model, real=True),
                  World(Path(folder), f"{strategy}+topology={links}", model, real=False)]
        try:
            for world in worlds:
                world.turn(3)
            turns = [[world.turn(steps) for world in (worlds if turn % 2 else worlds[::-1])][:: 1 if turn % 2 else -1]
                     for turn in range(rounds)]
        finally:
            for world in worlds:
                world.close()
    ratios = [emulated / real for real, emulated in turns]
    low, high = interval(ratios)
    return {"strategy": strategy, "real_ms": 1e3 * statistics.median(real for real, _ in turns),
            "emulated_ms": 1e3 * statistics.median(emulated for _, emulated in turns),
            "ratio": statistics.median(ratios), "low": low, "high": high}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--model", default="tiny-gpt")
    parser.add_argument("--rate", default="200mbit", help="of the link, as tc writes it, in mbit or gbit")
    parser.add_argument("--strategies", nargs="*", default=STRATEGIES)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        rank(args.rank, args.model)
        return
    rows = []
    try:
        open_link(args.rate)
        topology = links(args.rate, args.model)
        print(f"a real link of {args.rate} against {topology}", flush=True)
        for strategy in args.strategies:
            rows.append(measure(strategy, args.model, topology, args.rounds, args.steps))
            print("{strategy:22} real {real_ms:7.1f} ms  emulated {emulated_ms:7.1f} ms  ratio {ratio:.3f} "
                  "[{low:.3f}, {high:.3f}]".format(**rows[-1]), flush=True)
    finally:
        close_link()
    if args.output:
        told = {"model": args.model, "rate": args.rate, "topology": topology, "rows": rows}
        Path(args.output).write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
