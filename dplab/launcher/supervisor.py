"""The supervisor: starts the ranks of one run, outlives whoever launched it, and sees every rank to its end.

One thread. It reaps, samples utilization, looks at `control/`, and acts on three things: a rank that failed, a
wish to stop, a launching process that is gone (`detach=False`). Each leads through the same stages: a while to
end by themselves, then SIGTERM, then SIGKILL, then whatever the ranks had started. Last it writes exit.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import psutil

from dplab.launcher import linux, restarts
from dplab.launcher.job import CALL, Job
from dplab.launcher.sampling import Sampling
from dplab.launcher.verdict import RankEnd, decide
from dplab.telemetry.files import read_json, release, write_json, write_reserved
from dplab.telemetry.process import Identity

TICK_SECONDS = 0.1
SETTLE_SECONDS = 1.0
"""After a failure, how long peers may find out by themselves, so that their own errors are on record."""
TERM_SECONDS = 3.0
"""Between SIGTERM and SIGKILL."""
LEAVE_SECONDS = 10.0
"""How long a rank that has left its result or error may take to end."""

StartRank = Callable[[Job, int], int]


class Supervisor:
    """Looks after one run; `start_rank` forks or spawns one rank and returns its pid."""

    def __init__(self, job: Job, start_rank: StartRank) -> None:
        self._job = job
        self._start_rank = start_rank
        self._reason: str | None = None
        self._stop_requested = False
        self._stop_grace = float("inf")
        self._wakeup = _wake_on_signals(self._on_signal)
        self._signals: list[int] = []
        self._begin()

    def _begin(self) -> None:
        """What is known of the ranks that are about to start: nothing."""
        self._live: dict[int, int] = {}  # pid -> rank
        self._ends: list[RankEnd] = []
        self._left: dict[int, float] = {}  # rank -> when its result or error was first seen
        self._hurried: set[int] = set()
        self._term_at: float | None = None
        self._termed_ns: int | None = None
        self._kill_at: float | None = None

    def run(self) -> None:
        """From the first rank to exit.json, by way of restarts."""
        notes: list[str] = []
        while True:
            verdict = self._attempt(notes)
            job, why_not = restarts.again(self._job, verdict, self._ends)
            if job is None:
                break
            self._job = job
            self._begin()
        self._finish({**verdict, "reason": verdict["reason"] or why_not, "notes": notes})

    def _attempt(self, notes: list[str]) -> dict[str, Any]:
        """From the first rank's start to the last one's end; how they ended."""
        self._write_pids([])
        self._look_at_wishes()
        if not self._stop_requested:
            for rank in range(self._job.world_size):
                self._live[self._start_rank(self._job, rank)] = rank
        pids = list(self._live)
        self._write_pids(pids)
        sampling = Sampling(self._job, pids)
        while self._live:
            self._wait(TICK_SECONDS)
            self._reap()
            self._look_at_wishes()
            self._look_at_leavers()
            self._end_what_is_due()
            sampling.sample_if_due()
        sampling.close()
        notes += sampling.notes
        _kill_descendants()
        return decide(self._ends, stop_requested=self._stop_requested, reason=self._why())

    def fail(self, reason: str) -> None:
        """Ends what lives and records a failure of the supervisor itself."""
        _kill_descendants()
        self._finish({"state": "failed", "first": None, "collateral": [], "reason": reason, "ranks": [], "notes": []})

    def _why(self) -> str | None:
        """What stopped the run, and whom that did not reach: a program hears a stop only where it steps."""
        forced = sorted(end.rank for end in self._ends if end.forced)
        if self._reason is None or not forced or not self._stop_grace:
            return self._reason
        ranks = f"rank{'s' * (len(forced) > 1)} {', '.join(map(str, forced))}"
        return (f"{self._reason}; {ranks} did not end within {self._stop_grace:g} s and had to be ended by a signal, "
                f"without a result (a program hears the wish to stop in engine.step())")

    def _finish(self, values: dict[str, Any]) -> None:
        if not self._job.run.path.is_dir():
            return
        (self._job.run.path / CALL).unlink(missing_ok=True)
        for rank in range(self._job.launched or self._job.world_size):
            release(self._job.rank_directory(rank) / "error.json")
        write_reserved(self._job.run.path / "exit.json", {**values, "ended": time.time_ns()})

    def _write_pids(self, pids: list[int]) -> None:
        gone = Identity(0, 0.0)  # a rank that ended before it could be asked
        ranks = [Identity.of(pid) or gone._replace(pid=pid) for pid in pids]
        write_json(self._job.run.path / "pids.json", {"supervisor": Identity.of(os.getpid()), "ranks": ranks})

    def _on_signal(self, number: int, frame: object) -> None:
        self._signals.append(number)

    def _wait(self, seconds: float) -> None:
        ready, _, _ = select.select([self._wakeup], [], [], seconds)
        if ready:
            os.read(self._wakeup, 4096)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._live:  # else an orphan that was given to us
                self._note_end(self._live.pop(pid), os.waitstatus_to_exitcode(status))

    def _note_end(self, rank: int, status: int) -> None:
        directory = self._job.rank_directory(rank)
        error = read_json(directory / "error.json")
        when = time.monotonic_ns() if error is None else int(error["time"])
        end = RankEnd(rank=rank, status=status, time=when, error=error,
                      returned=(directory / "result.pkl").exists(), hurried=rank in self._hurried,
                      forced=self._termed_ns is not None and when >= self._termed_ns)
        self._ends.append(end)
        if end.failed:
            self._end_soon(SETTLE_SECONDS)

    def _look_at_wishes(self) -> None:
        if self._signals and any(number != signal.SIGCHLD for number in self._signals):
            number = next(number for number in self._signals if number != signal.SIGCHLD)
            self._stop(f"the supervisor received {signal.Signals(number).name}", 0.0)
        self._signals.clear()
        grace = self._job.run.stop_request()
        if grace is not None:
            self._stop("stop was asked for", grace)
        if not self._job.run.path.is_dir():      # nobody could look at the run any more, or stop it
            self._stop("the run's directory was removed", 0.0)
        if self._job.launcher is not None and not self._job.launcher.lives():
            self._stop("the launching process ended (detach=False)", 0.0)

    def _stop(self, reason: str, grace: float) -> None:
        if not self._stop_requested:
            self._reason = self._reason or reason
            self._stop_requested = True
        if self._termed_ns is None and (self._term_at is None or self._stop_grace > grace):
            self._stop_grace = grace
            self._end_soon(grace)

    def _look_at_leavers(self) -> None:
        """A rank that hangs on its way out, after its result or its error is on disk, is not waited for."""
        now = time.monotonic()
        for pid, rank in self._live.items():
            directory = self._job.rank_directory(rank)
            failed = (directory / "error.json").exists()
            if failed or (directory / "result.pkl").exists():
                since = self._left.setdefault(rank, now)
                if failed and since == now:
                    self._end_soon(SETTLE_SECONDS)
                if now - since > LEAVE_SECONDS:
                    self._hurried.add(rank)
                    os.kill(pid, signal.SIGKILL)

    def _end_soon(self, seconds: float) -> None:
        due = time.monotonic() + seconds
        if self._termed_ns is None:
            self._term_at = due if self._term_at is None else min(self._term_at, due)

    def _end_what_is_due(self) -> None:
        now = time.monotonic()
        if self._term_at is not None and now >= self._term_at:
            self._term_at, self._termed_ns, self._kill_at = None, time.monotonic_ns(), now + TERM_SECONDS
            for pid in self._live:
                os.kill(pid, signal.SIGTERM)  # ours and unreaped, so the pid is theirs
        elif self._kill_at is not None and now >= self._kill_at:
            for pid in self._live:
                os.kill(pid, signal.SIGKILL)


def fork_rank(job: Job, rank: int) -> int:
    """A rank as a fork of this preloaded process."""
    from dplab.launcher import worker

    supervisor = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            worker.main(job, rank, supervisor, forked=True)
        finally:
            os._exit(1)      # a rank never comes back from there; should it, none of the supervisor's code is its own
    return pid


def spawn_rank(job: Job, rank: int) -> int:
    """A rank as a fresh interpreter, on its way at once: the job waits for it in a pipe."""
    environ = job.rank_environ(rank)
    environ["PYTHONPATH"] = package_path(environ)
    process = subprocess.Popen([sys.executable, "-P", "-m", "dplab.launcher.worker"], env=environ,
                               stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert process.stdin is not None
    request = json.dumps({"job": job.to_json(), "rank": rank, "supervisor": os.getpid()}).encode()
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # it died at once; reaping says how
        pipe.write(request)
    process.returncode = 0  # reaped by the supervisor's waitpid, together with everything else
    return process.pid


def package_path(environ: dict[str, str]) -> str:
    """PYTHONPATH with which a fresh interpreter finds the very dplab that runs here."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return os.pathsep.join(filter(None, [environ.get("PYTHONPATH"), root]))


def main(job: Job, start_rank: StartRank) -> NoReturn:
    """Supervises one run in this process, which is the leader of its own session; never returns."""
    status = 1
    try:
        log = os.open(job.run.path / "supervisor.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for target in (1, 2):
            os.dup2(log, target)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.closerange(3, 65536)  # the pipe of whoever started us above all: its closing must be seen
        os.chdir("/")
        linux.name_process("dplab-supervise")
        linux.adopt_orphans()
        supervisor = Supervisor(job, start_rank)
        try:
            supervisor.run()
            status = 0
        except OSError as error:  # a full disk, no process to be had
            traceback.print_exc()
            supervisor.fail(f"its supervisor could not go on: {error}; free what is short there and launch again")
        except BaseException as error:
            traceback.print_exc()
            supervisor.fail(f"the supervisor failed ({type(error).__name__}: {error}); supervisor.log in the run's "
                            f"directory holds its traceback")
    except BaseException:  # no exit.json could be written: readers find the supervisor vanished
        traceback.print_exc()
    finally:
        os._exit(status)


def _wake_on_signals(handler: Callable[[int, object], None]) -> int:
    reading, writing = os.pipe()
    for end in (reading, writing):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, handler)
    return reading


def _kill_descendants(limit: float = 5.0) -> None:
    """Ends whatever the ranks started and left; `adopt_orphans` made all of it ours."""
    until = time.monotonic() + limit
    while time.monotonic() < until:
        found = psutil.Process().children(recursive=True)
        if not found:
            return
        for process in found:
            with contextlib.suppress(psutil.Error):  # it ended by itself
                process.kill()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


if __name__ == "__main__":
    main(Job.from_json(sys.stdin.buffer.read()), spawn_rank)
