"""What a dashboard costs the run that it shows: `python -m tests.benchmarks.bench_board [-o board.json]`.

One run of two ranks goes on all the while. Beside it a kernel of its own follows the run with a live board, in blocks
of seconds, and stands still in as many (in the order on, off, off, on, ...): the board's own thread, reader, rules and
messages, whose front end is a page that acknowledges and draws nothing. Prints the paired ratio of the run's step with
the board to that without, with the interval of that median, and the processor time that the kernel takes, a second and
a step. What it missed while it stood still it reads at the start of a block: that second is left out of both. Prints
figures, asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from dplab.commands.compare import paired_ratio

PROGRAM = "dplab.workloads.train:train"
SETTLE_S = 1.0


def measure(*, ranks: int, pairs: int, seconds: float, hz: float, model: str) -> dict[str, Any]:
    """Figures of one run; it is stopped at the end."""
    import dplab

    with tempfile.TemporaryDirectory() as folder:
        os.environ["DPLAB_RUNS"] = folder
        run = dplab.launch(PROGRAM, world_size=ranks, strategy="zero2", kwargs={"steps": 10**9, "model": model},
                           detach=False)
        kernel = subprocess.Popen([sys.executable, "-m", "tests.benchmarks.bench_board", "--follow", str(run.path),
                                   "--hz", str(hz)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert kernel.stdout is not None
            kernel.stdout.readline()      # it has begun
            while (run.steps or 0) < 20 and run.state in ("starting", "running"):
                time.sleep(0.1)
            blocks = [_block(kernel, seconds, on=on) for pair in range(pairs)
                      for on in ((True, False) if pair % 2 == 0 else (False, True))]
            ends = [event.t1 for event in run.events() if event.kind == "step" and event.rank == 0]
        finally:
            kernel.kill()
            kernel.wait()
            run.stop(timeout=5)
    return figures(blocks, ends)


def _block(kernel: subprocess.Popen[str], seconds: float, *, on: bool) -> dict[str, Any]:
    """One block: when it was, and what the kernel took of a processor in it, in s, once it had caught up."""
    assert kernel.stdin is not None
    assert kernel.stdout is not None
    begin = time.monotonic_ns()
    if on:
        print("on", file=kernel.stdin, flush=True)
    time.sleep(seconds)
    end, took = time.monotonic_ns(), None
    if on:
        print("off", file=kernel.stdin, flush=True)
        took = json.loads(kernel.stdout.readline())      # from a second after `on`
    return {"on": on, "begin": begin, "end": end, "took": took}


def figures(blocks: list[dict[str, Any]], ends: list[int]) -> dict[str, Any]:
    """Step times (ms) of the blocks and their paired ratio; the kernel's processor time. `ends`: of rank 0's steps."""
    for block in blocks:
        inside = [end for end in ends if block["begin"] + SETTLE_S * 1e9 <= end < block["end"]]
        block["step_ms"] = statistics.fmean(later - before for before, later in pairwise(inside)) / 1e6
    on, off = ([block["step_ms"] for block in blocks if block["on"] is wanted] for wanted in (True, False))
    shares = [block["took"]["cpu"] / block["took"]["seconds"] for block in blocks if block["on"]]
    step, share = statistics.median(off), statistics.median(shares)
    return {"pairs": len(on), "seconds_a_block": (blocks[0]["end"] - blocks[0]["begin"]) / 1e9,
            "step_ms_off": step, "step_ms_on": statistics.median(on), "step_on_to_off": paired_ratio(on, off),
            "messages_a_block": statistics.median(block["took"]["messages"] for block in blocks if block["on"]),
            "kernel_cpu_ms_a_second": 1e3 * share, "kernel_cpu_ms_a_step": share * step,
            "kernel_cpu_of_one_core": share, "kernel_cpu_of_the_machine": share / (os.cpu_count() or 1),
            "cores": os.cpu_count(), "load_before": _LOAD, "step_ms_blocks": {"on": on, "off": off},
            "date": time.strftime("%Y-%m-%d")}


_LOAD = os.getloadavg()[0]


def follow(path: Path, hz: float) -> None:
    """The kernel: a board whose thread runs from `on` to `off`; tells what it took after each `off`."""
    import comm
    from comm.base_comm import BaseComm

    class Page(BaseComm):
        """Serialises as a kernel's session does, and acknowledges about once a second."""

        count, acknowledged = 0, 0.0

        def publish_msg(self, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None,
                        **keys: Any) -> None:
            json.dumps(data or {})
            b"".join(map(bytes, buffers or []))
            type(self).count += 1
            if time.monotonic() - self.acknowledged > 1:
                self.acknowledged = time.monotonic()
                self.handle_msg({"content": {"comm_id": self.comm_id, "data": {
                    "method": "custom", "content": {"type": "ack"}}}, "buffers": []})

    comm.create_comm = lambda *_, **options: Page(**options)      # type: ignore[assignment]
    from dplab.launcher.run import attach
    from dplab.widgets.board import Board

    board = Board(attach(path), hz=hz, live=True)
    print("begun", flush=True)
    began, cpu, messages = 0.0, 0.0, 0
    for line in sys.stdin:
        if line.strip() == "on":
            board._start()
            time.sleep(SETTLE_S)
            began, cpu, messages = time.monotonic(), time.process_time(), Page.count
        else:
            board._halt()
            print(json.dumps({"cpu": time.process_time() - cpu, "seconds": time.monotonic() - began,
                              "messages": Page.count - messages}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="JSON file for the figures")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=20, help="pairs of a block with the board and one without")
    parser.add_argument("--seconds", type=float, default=6, help="of a block")
    parser.add_argument("--hz", type=float, default=2, help="messages a second, as run.dashboard(hz=)")
    parser.add_argument("--model", default="tiny-gpt")
    parser.add_argument("--follow", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.follow is not None:
        follow(arguments.follow, arguments.hz)
        return
    told = measure(ranks=arguments.ranks, pairs=arguments.pairs, seconds=arguments.seconds, hz=arguments.hz,
                   model=arguments.model)
    text = json.dumps(told, indent=1)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
