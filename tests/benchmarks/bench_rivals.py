"""Every strategy beside torch DDP, ZeroRedundancyOptimizer, FSDP2 and DeepSpeed 1, 2, 3 on the same work, in one run.

    python -m tests.benchmarks.bench_rivals [-o rivals.json] [--steps 200] [--ranks 2 4] [--micro-batches 1 4]

`dplab compare` gives the systems turns in short blocks; each has its own processes, the rivals talk over gloo as their
users have them. For each strategy: the paired ratio of its step to each rival's of the same stage, with the interval
of that median; what synchronisation costs (step less `single`) as a share of the rival's; peak memory of all ranks as
a share of the rival's. Prints ratios, asserts nothing. DeepSpeed compiles for a minute at its first start.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from dplab.commands.compare import paired_ratio

RIVALS = {"ddp": ("torch:ddp",), "zero1": ("torch:zero1", "deepspeed:1"), "zero2": ("torch:fsdp2", "deepspeed:2"),
          "zero3": ("torch:fsdp2", "deepspeed:3")}
"""By stage; FSDP2, which knows only whole sharding, stands for ZeRO-2 too."""
SYSTEMS = ("single", *RIVALS, *dict.fromkeys(name for names in RIVALS.values() for name in names))


def compared(ranks: int, micro_batch: int, steps: int) -> dict[str, dict[str, Any]]:
    """The rows of one comparison by system."""
    told = subprocess.run(
        [sys.executable, "-m", "dplab", "compare", *SYSTEMS, "--model", "bench-gpt", "--world-size", str(ranks),
         "--batch-size", str(micro_batch), "--steps", str(steps), "--json"], stdout=subprocess.PIPE, text=True,
        check=True).stdout
    return {row["strategy"]: row for row in json.loads(told)["rows"]}


def ratios(rows: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One a strategy and rival, and one a strategy against `single`."""
    blocks = {name: row["step_ms_blocks"] for name, row in rows.items()}
    told = []
    for ours, rivals in RIVALS.items():
        for name in ("single", *rivals):
            if name not in rows:
                continue
            row = {"ours": ours, "to": name, "step": paired_ratio(blocks[ours], blocks[name]),
                   "memory": rows[ours]["peak_total_bytes"] / rows[name]["peak_total_bytes"]}
            if name != "single":
                row["synchronisation_ms"] = [
                    statistics.median(mine - base for mine, base in zip(blocks[each], blocks["single"], strict=True))
                    for each in (ours, name)]
            told.append(row)
    return told


def line(row: dict[str, Any]) -> str:
    step = row["step"]
    interval = "" if step["low"] is None else f"[{step['low']:.2f}, {step['high']:.2f}]"
    text = f"{row['ours']:6} / {row['to']:12} step {step['median']:5.2f} {interval:14} memory {row['memory']:5.2f}"
    if "synchronisation_ms" in row:
        mine, its = row["synchronisation_ms"]
        text += f"   synchronisation {mine:7.1f} ms of {its:7.1f}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4])
    options = parser.parse_args()
    told = []
    for ranks in options.ranks:
        for micro_batch in options.micro_batches:
            rows = compared(ranks, micro_batch, options.steps)
            table = ratios(rows)
            print(f"\n{ranks} ranks, micro-batch {micro_batch}, {options.steps} steps; load average "
                  f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", *map(line, table), sep="\n", flush=True)
            told.append({"ranks": ranks, "micro_batch": micro_batch, "steps": options.steps, "ratios": table,
                         "rows": list(rows.values()), "load_average": os.getloadavg()})
            if options.output:
                options.output.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
