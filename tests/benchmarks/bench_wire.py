"""Collectives over shared memory against gloo and against copying memory, at 2 and 4 ranks.

    python -m tests.benchmarks.bench_wire [-o wire.json] [--rounds 15]

One process world holds both backends; they take turns in short blocks of calls after a barrier, and a block counts
for as long as its slowest rank took. `shm` is torch.distributed's own call on it, `in_place` dplab's on a tensor that
lives in shared memory. `floor` is one memcpy of what the rank must receive at least (of the whole tensor for an
all-reduce: a half to reduce, a half to collect, at 2 ranks), by all ranks at the same time. Figures are medians;
`gloo/shm` above 1 means that shm is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import dplab
from dplab.telemetry.recorder import NULL
from dplab.wire.collectives import Collectives, Counters
from dplab.wire.groups import transport_for
from dplab.wire.shm.group import register
from tests.worlds import ProcessWorld

SIZES = {"10 KB": 10 << 10, "1 MB": 1 << 20, "25 MB": 25 << 20}
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def calls(name: str, nbytes: int, shm: dist.ProcessGroup) -> dict[str, Callable[[], Any]]:
    size = dist.get_world_size()
    each = max(128, nbytes // 4 // size // 128 * 128)
    axis = Collectives(transport_for(shm), Counters(), NULL)
    flat, own = torch.ones(each * size), torch.ones(each)
    housed = axis.empty(each * size, torch.float32, torch.device("cpu")).fill_(1)
    least = each * size if name == "all_reduce" else each * (size - 1)
    source, target = torch.ones(least), torch.ones(least)
    plain = {"all_reduce": lambda group: dist.all_reduce(flat, group=group),
             "reduce_scatter": lambda group: _reduce_scatter(own, flat, group=group),
             "all_gather": lambda group: _all_gather(flat, own, group=group)}[name]
    placed = {"all_reduce": lambda: axis.all_reduce(housed).wait(),
              "reduce_scatter": lambda: axis.reduce_scatter(housed).wait(),
              "all_gather": lambda: axis.all_gather(housed).wait()}[name]

    def again() -> None:
        for tensor in (flat, own, housed):
            tensor.fill_(0)

    return {"gloo": lambda: plain(dist.group.WORLD), "shm": lambda: plain(shm), "in_place": placed,
            "floor": lambda: target.copy_(source), "again": again}


def measure(name: str, nbytes: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each call on this rank, by what was called."""
    register()
    if "shm" not in GROUPS:
        GROUPS["shm"] = dist.new_group(backend="shm")
    chosen = calls(name, nbytes, GROUPS["shm"])
    again = chosen.pop("again")
    block = 30 if nbytes < 100_000 else 3  # where a call takes microseconds, a barrier's own skew would be measured
    seconds: dict[str, list[float]] = {kind: [] for kind in chosen}
    for turn in range(rounds + 2):
        for kind, call in chosen.items():
            again()
            dist.barrier(group=GROUPS["shm"])
            began = time.perf_counter()
            for _ in range(block):
                call()
            if turn >= 2:
                seconds[kind].append((time.perf_counter() - began) / block)
    return seconds


GROUPS: dict[str, Any] = {}


def row(size: int, name: str, nbytes: int, rounds: int) -> dict[str, Any]:
    every = ProcessWorld.of(size).call(measure, name, nbytes, rounds)
    ms = {kind: 1e3 * statistics.median(map(max, zip(*(rank[kind] for rank in every), strict=True)))
          for kind in every[0]}
    return {"ranks": size, "collective": name, "bytes": nbytes,
            "ms": {kind: round(value, 4) for kind, value in ms.items()},
            "gloo/shm": round(ms["gloo"] / ms["shm"], 2), "gloo/in_place": round(ms["gloo"] / ms["in_place"], 2),
            "shm/floor": round(ms["shm"] / ms["floor"], 2), "in_place/floor": round(ms["in_place"] / ms["floor"], 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", help="where the JSON goes")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    arguments = parser.parse_args()
    rows = []
    print(f"{'ranks':>5} {'collective':14} {'size':>6} {'gloo ms':>9} {'shm ms':>9} {'in place':>9} {'floor':>9} "
          f"{'gloo/shm':>9} {'gloo/in place':>13}")
    for size in arguments.ranks:
        for label, nbytes in SIZES.items():
            for name in COLLECTIVES:
                rows.append(row(size, name, nbytes, arguments.rounds))
                ms = rows[-1]["ms"]
                print(f"{size:5} {name:14} {label:>6} {ms['gloo']:9.3f} {ms['shm']:9.3f} {ms['in_place']:9.3f} "
                      f"{ms['floor']:9.3f} {rows[-1]['gloo/shm']:9.1f} {rows[-1]['gloo/in_place']:13.1f}", flush=True)
    ProcessWorld.drop_all()
    result = {"torch": torch.__version__, "dplab": dplab.__version__, "cores": os.cpu_count(),
              "load": os.getloadavg()[0], "rows": rows}
    if arguments.output:
        with open(arguments.output, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
