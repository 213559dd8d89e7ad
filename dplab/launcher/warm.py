"""The warm parent: a process that has imported torch and dplab, and forks the supervisors of runs.

One a launching process, started at its first launch, told what to start through its standard input (a private
pipe, one job a line). It runs no tensor operation and touches no GPU: a fork made after either hangs or fails in
the child. It ends when its pipe closes, when the process at the other end is gone, or after ten idle minutes;
runs under way belong to their supervisors and go on.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import sys
import time
from typing import Any

from dplab.launcher import linux, supervisor
from dplab.launcher.job import Job
from dplab.telemetry.files import write_reserved

IDLE_SECONDS = 600.0

PRELOADED = (
    "numpy", "cloudpickle", "psutil",
    "torch", "torch.distributed",
    "torch._dynamo",  # what the first optimizer step of a process pulls in, seconds of it
    "dplab.launcher.worker", "dplab.wire.world", "dplab.engine", "dplab.workloads.loader",
)


def preload() -> None:
    """Imports what ranks need; what cannot be imported is left to the rank, whose own traceback will say why."""
    for name in PRELOADED:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    if "torch" in sys.modules:
        torch: Any = sys.modules["torch"]
        torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # a collection in a rank would write to every object's header and so copy every page


def serve(launcher: int) -> None:
    """Starts a supervisor for each line of standard input, until it closes or nothing comes for ten minutes."""
    pending, since = b"", time.monotonic()
    while time.monotonic() - since < IDLE_SECONDS:
        ready, _, _ = select.select([0], [], [], 1.0)
        if not ready:
            if os.getppid() != launcher:
                return
            continue  # what was handed over before the launcher went is in the pipe, and is started
        data = os.read(0, 1 << 16)
        if not data:
            return
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            start(Job.from_json(line))
        since = time.monotonic()


def start(job: Job) -> None:
    """Forks the supervisor of one run, in a session of its own."""
    try:
        pid = os.fork()
    except OSError as error:
        write_reserved(job.run.path / "exit.json", {
            "state": "failed", "first": None, "collateral": [], "ranks": [], "notes": [], "ended": time.time_ns(),
            "reason": f"no process could be started for it: {error.strerror}; end others, or raise the limit"})
        return
    if pid == 0:
        try:
            os.setsid()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            supervisor.main(job, supervisor.fork_rank)
        finally:
            os._exit(1)      # whatever was raised: a second warm parent must not go on from here


def main() -> None:
    """Entry of the process. Its argument is the launching process, which may be gone before this line."""
    launcher = int(sys.argv[1])
    linux.name_process("dplab-warm")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps supervisors: no zombie waits for us
    preload()
    serve(launcher)


if __name__ == "__main__":
    main()
