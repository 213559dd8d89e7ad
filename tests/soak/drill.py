"""A hundred trials of the fault drill: `python -m tests.soak.drill`. What came of them is in drill.json beside it."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path

import torch

from dplab.workloads.drill import drill

SEEDS = 100


def main() -> int:
    rows, began = [], time.monotonic()
    for outcome in drill(range(SEEDS)):
        rows.append({"seed": outcome.trial.seed, "trial": str(outcome.trial), "seconds": round(outcome.seconds, 1),
                     "told": outcome.told.partition(" /")[0][:120], "problems": list(outcome.problems),
                     "skipped": outcome.skipped})
        print(rows[-1], file=sys.stderr, flush=True)
    bad = [row for row in rows if row["problems"]]
    told = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "cores": os.cpu_count(),
            "python": platform.python_version(), "trials": len(rows), "bad": len(bad),
            "skipped": sum(row["skipped"] is not None for row in rows), "minutes": round(
                (time.monotonic() - began) / 60, 1), "longest_s": max(row["seconds"] for row in rows), "rows": rows}
    lines = json.dumps(told, indent=1)
    Path(__file__).with_name("drill.json").write_text(lines + "\n")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
