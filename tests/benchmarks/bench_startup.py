"""What starting costs: `import dplab`, `dplab --help`, `dplab estimate`. Prints medians; asserts nothing.

    python tests/benchmarks/bench_startup.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import dplab": ["-c", "import dplab"],
    "dplab --help": ["-m", "dplab", "--help"],
    "dplab estimate": ["-m", "dplab", "estimate", "--params", "7.5e9", "--world-size", "64"],
    "import torch": ["-c", "import torch"],
}
REPEATS = 7


def seconds(arguments: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def main() -> None:
    for name, arguments in COMMANDS.items():
        times = sorted(seconds(arguments) for _ in range(REPEATS))
        print(f"{name:16} {statistics.median(times):6.3f} s median of {REPEATS} ({times[0]:.3f} to {times[-1]:.3f})")


if __name__ == "__main__":
    main()
