"""Every notebook under nbval many times in a row: `python -m tests.soak.notebooks [NAME...] [--times 20] [-o FILE]`.

Each is run as CI does it. What failed is told as it happens, and with pytest's own words in the result, which is
written after every round, so that a soak that is cut short has told what it knows: `notebooks.json` beside this file.
Where some are named, what is written there of the others stays.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.notebooks.headless import processes_of, run_headless
from tests.notebooks.store import FOLDER

RESULT = Path(__file__).with_suffix(".json")
_LEAVES_S = 30.0
"""How long what a notebook started may take to end after it."""


def once(path: Path) -> tuple[float, str | None]:
    """Seconds that one run took, and what went wrong, None where nothing did."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        began = time.monotonic()
        try:
            done = run_headless(path, scratch)
            wrong = None if done.returncode == 0 else (done.stdout[-6000:] + done.stderr[-2000:])
        except subprocess.TimeoutExpired as error:
            wrong = f"did not end within {error.timeout:.0f} s"
        seconds = time.monotonic() - began
        while (left := processes_of(scratch / "runs")) and time.monotonic() - began - seconds < _LEAVES_S:
            time.sleep(0.1)
        if left:
            wrong = f"{wrong or ''}\nleft running: {[process.cmdline() for process in left]}".strip()
            for process in left:
                process.kill()
    return seconds, wrong


def told(seconds: dict[str, list[float]], failures: dict[str, list[dict[str, Any]]],
         rows: dict[str, Any]) -> dict[str, Any]:
    """The result so far; `rows` of notebooks that are not run this time stay."""
    rows = rows | {name: {"passed": len(taken) - len(failures[name]), "failed": len(failures[name]),
                   "seconds": {"median": round(statistics.median(taken), 1), "worst": round(max(taken), 1)},
                   "failures": failures[name]} for name, taken in seconds.items() if taken}
    return {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "cores": os.cpu_count(),
            "load_before": round(_LOAD, 1), "passed": sum(row["passed"] for row in rows.values()),
            "failed": sum(row["failed"] for row in rows.values()), "notebooks": rows}


_LOAD = os.getloadavg()[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="notebooks, such as 01-quickstart; all without")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("-o", "--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    paths = sorted(path for path in FOLDER.glob("*.ipynb") if not arguments.names or path.stem in arguments.names)
    if unknown := set(arguments.names) - {path.stem for path in paths}:
        parser.error(f"there is no notebook {', '.join(sorted(unknown))} in {FOLDER.name}/")
    seconds: dict[str, list[float]] = {path.stem: [] for path in paths}
    failures: dict[str, list[dict[str, Any]]] = {path.stem: [] for path in paths}
    before = arguments.output if arguments.names and arguments.output.exists() else None
    kept = json.loads(before.read_text())["notebooks"] if before is not None else {}
    for turn in range(1, arguments.times + 1):
        for path in paths:
            took, wrong = once(path)
            seconds[path.stem].append(took)
            said = "passed"
            if wrong is not None:
                text = re.sub(r"\x1b\[[0-9;]*m|[^\s\"']*/(?=notebooks/)", "", wrong)
                failures[path.stem].append({"turn": turn, "text": text})
                said = "FAILED"
            print(f"{turn}/{arguments.times} {path.stem} {said}, {took:.1f} s", flush=True)
        arguments.output.write_text(json.dumps(told(seconds, failures, kept), indent=1) + "\n")
    result = told(seconds, failures, kept)
    print(f"{result['passed']} passed, {result['failed']} failed; {arguments.output}")


if __name__ == "__main__":
    main()
