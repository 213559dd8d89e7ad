"""The controller's side of a kept process world: gives it turns, and looks at its memory meanwhile."""

from __future__ import annotations

import json
import os
import select
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dplab.errors import RunFailed
from dplab.peers.catalog import ANSWERS, TURNS
from dplab.telemetry.rundir import ENDED, RunDirectory

if TYPE_CHECKING:
    from dplab.launcher.run import Run

_SAMPLE_SECONDS = 0.02
_START_SECONDS = 180.0


class KeptWorld:
    """One system's ranks. `peak_bytes` by rank is private memory, `peak_total_bytes` theirs together with shared
    pages counted once, both at their peak over the turns that were watched."""

    def __init__(self, run: Run, world_size: int) -> None:
        self.run = run
        self.peak_bytes = [0] * world_size
        self.peak_total_bytes = 0
        self._directory = RunDirectory(run.path)
        self._turns: list[int] = []
        self._answers: list[int] = []

    def connect(self) -> None:
        """Waits until every rank has built its trainer and listens; raises what a rank failed with."""
        deadline = time.monotonic() + _START_SECONDS
        for rank in range(len(self.peak_bytes)):
            folder = self._directory.rank(rank)
            self._turns.append(self._open(folder / TURNS, os.O_WRONLY, deadline))
            self._answers.append(self._open(folder / ANSWERS, os.O_RDONLY, deadline))

    def _open(self, pipe: Path, mode: int, deadline: float) -> int:
        while True:
            try:
                return os.open(pipe, mode | os.O_NONBLOCK)
            except OSError:      # not made yet, or nobody reads it yet
                self._require_alive()
                if time.monotonic() > deadline:
                    raise RunFailed(f"run {self.run.path} did not get ready in {_START_SECONDS:.0f} s; "
                                    f"its ranks' logs tell where they are") from None
                time.sleep(0.01)

    def turn(self, steps: int, *, watched: bool) -> list[dict[str, Any]]:
        """Makes every rank train `steps` steps and returns what each answered. `watched`: looks at their memory
        meanwhile, for which the kernel walks all their pages and holds up who wants a new one (about 10 ms a look)."""
        self._tell(steps)
        texts = dict.fromkeys(self._answers, b"")
        while not all(text.endswith(b"\n") for text in texts.values()):
            waiting = [pipe for pipe, text in texts.items() if not text.endswith(b"\n")]
            ready, _, _ = select.select(waiting, [], [], _SAMPLE_SECONDS if watched else None)
            for pipe in ready:
                data = os.read(pipe, 65536)
                if not data:
                    self._require_alive()
                    time.sleep(0.01)      # end of file before the run's end is written
                texts[pipe] += data
            if watched:
                self._sample()
        return [json.loads(texts[pipe]) for pipe in self._answers]

    def end(self) -> list[Any]:
        """Lets the ranks return; their results."""
        self._tell(0)
        results: list[Any] = self.run.wait()
        return results

    def close(self) -> None:
        """Closes the pipes, and stops the run where it still goes."""
        for pipe in (*self._turns, *self._answers):
            os.close(pipe)
        self._turns, self._answers = [], []
        self.run.stop()

    def _tell(self, steps: int) -> None:
        try:
            for pipe in self._turns:
                os.write(pipe, b"%d\n" % steps)
        except BrokenPipeError:      # a rank has gone; the run's end, which tells why, may still be on its way
            self.run.wait(timeout=_START_SECONDS)
            raise

    def _require_alive(self) -> None:
        if self.run.state in ENDED:
            self.run.wait()      # raises what a rank failed with
            raise RunFailed(f"run {self.run.path} ended before its turn")

    def _sample(self) -> None:
        processes = self._directory.processes()
        sizes = [_memory(identity.pid) for identity in processes["ranks"]] if processes else []
        for rank, (private, _) in enumerate(sizes):
            self.peak_bytes[rank] = max(self.peak_bytes[rank], private)
        total = sum(private for private, _ in sizes) + max((shared for _, shared in sizes), default=0)
        self.peak_total_bytes = max(self.peak_total_bytes, total)


def _memory(pid: int) -> tuple[int, int]:
    """Private and shared resident bytes of a process; zeros where this system does not tell or it has ended."""
    private = shared = 0
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0, 0
    for line in lines:
        name, _, value = line.partition(":")
        if name.startswith("Private_"):
            private += int(value.split()[0]) * 1024
        elif name.startswith("Shared_"):
            shared += int(value.split()[0]) * 1024
    return private, shared
