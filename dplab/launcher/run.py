"""`Run`: a handle on a run in the background, wherever it was started. All it knows it reads from the directory."""

from __future__ import annotations

import html
import os
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dplab.errors import RunError, RunFailed, UsageError
from dplab.launcher import payload, steer
from dplab.launcher.compare import Comparison, compare
from dplab.launcher.failure import failure_of, headline, stop_reason
from dplab.launcher.job import CALL
from dplab.specs import RunSpec, Strategy
from dplab.telemetry.events import Event
from dplab.telemetry.lookup import find_run, run_names
from dplab.telemetry.reader import RunReader
from dplab.telemetry.restarts import Restart, times
from dplab.telemetry.rundir import DAMAGED, ENDED, STOP_SECONDS, RunDirectory, runs_root
from dplab.telemetry.summary import Summary

if TYPE_CHECKING:
    from dplab.diagnosis.findings import Diagnosis
    from dplab.launcher.launch import Call
    from dplab.widgets.board import Board

EXPORTED = ("json", "csv", "trace", "svg", "html")
"""What `Run.export` writes where nobody says otherwise: all that needs no browser."""
_POLL_SECONDS = 0.02
_END_SECONDS = 10.0
"""How long the supervisor may take from its last signal to the end of the run."""


class Run:
    """One run: made by `dplab.launch`, found again by `dplab.attach` and `dplab.runs`.

    Dropping the handle, restarting the kernel or interrupting `wait` leaves a detached run as it is.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._spec: RunSpec | None = None
        self._reader: RunReader | None = None
        self._summary = Summary()
        self._call: Call | None = None
        """what was called, where this process launched it"""

    @property
    def id(self) -> str:
        """The run's name, which `attach` takes."""
        return self.path.name

    @property
    def path(self) -> Path:
        """The run's directory."""
        return self._directory.path

    @property
    def spec(self) -> RunSpec:
        """What `launch` was asked for; RunError where the run's directory no longer tells."""
        if self._spec is None:
            self._spec = self._directory.spec
        return self._spec

    @property
    def started(self) -> datetime:
        """When it was launched, in this machine's time zone."""
        return datetime.fromtimestamp(self._directory.info()["created"] / 1e9).astimezone()

    @property
    def steps(self) -> int | None:
        """Optimizer steps that every rank has ended, by their state pages; None before any rank stepped."""
        return steer.steps_of(self._directory, min) or None

    @property
    def state(self) -> str:
        """`starting`, `running`, `restarting`, `paused`, `stopping`; at the end `finished`, `failed` or
        `stopped`; `damaged` where its files cannot be read, or were written by another version."""
        return self._directory.state()

    @property
    def restarts(self) -> list[Restart]:
        """Restarts so far: when, why, and how many ranks went on."""
        return self._directory.restarts()

    @property
    def failure(self) -> str | None:
        """Why the run failed or is damaged, in one line; None otherwise."""
        return headline(self._directory)

    @property
    def stopped_by(self) -> str | None:
        """What stopped the run, and which ranks had to be forced, in one line; None where it was not stopped."""
        return stop_reason(self._directory)

    def wait(self, timeout: float | None = None) -> list[Any]:
        """What each rank returned, in rank order, once the run has ended; after a restart, of the ranks that went on.

        Of a stopped run: what there is, None for a rank that was stopped before its function returned.
        `timeout` in seconds: TimeoutError when the run is not over by then; the run goes on, as it does when
        the wait is interrupted. RankFailed: a rank failed; the message starts with the first that did, and its
        own traceback. RunFailed: the run itself failed. RunError: the run is damaged, or its results could have been
        written by another user.
        """
        if timeout is not None and not (isinstance(timeout, int | float) and timeout >= 0):
            raise UsageError(f"wait(timeout={timeout!r}) is not allowed; timeout is a number of seconds >= 0, or None")
        deadline = None if timeout is None else time.monotonic() + timeout
        while (state := self.state) not in ENDED:
            if deadline is not None and time.monotonic() >= deadline:
                goes = "it waits for resume()" if state == "paused" else "it goes on"
                raise TimeoutError(f"run {self.id} is {state} after {timeout:g} s; {goes}: wait again, or stop() it")
            time.sleep(_POLL_SECONDS)
        if state == "failed":
            raise failure_of(self._directory)
        self._require_whole(state)
        return [payload.load_result(self._directory, rank) for rank in range(self._directory.world_size)]

    def _require_whole(self, state: str) -> None:
        if state == DAMAGED:
            raise RunError(self._directory.damage() or f"run {self.path} was damaged a moment ago; look at it again")
        for end in (self._directory.exit() or {"ranks": []})["ranks"]:
            path = self._directory.rank(end["rank"]) / "result.pkl"
            if end["how"] == "returned" and not path.exists():
                raise RunError(f"{path} is gone: what rank {end['rank']} returned cannot be had any more; its events "
                               f"and logs are still read")

    def request_stop(self, timeout: float = STOP_SECONDS) -> None:
        """Asks the run to stop and returns at once; what `stop` does from then on happens without this process."""
        if not isinstance(timeout, int | float) or not 0 <= timeout < float("inf"):
            raise UsageError(f"stop(timeout={timeout!r}) is not allowed; timeout is a number of seconds >= 0")
        if self.state not in ENDED:
            self._directory.request_stop(timeout)

    def stop(self, timeout: float = STOP_SECONDS) -> str:
        """Ends the run and returns its state once it has ended (`stopped`, or what it came to before).

        Ranks that use the engine end together at the end of a step; what has not ended after `timeout` seconds
        is told to (SIGTERM) and three seconds later made to (SIGKILL). RunError if even that does not help.
        """
        self.request_stop(timeout)
        deadline = time.monotonic() + timeout + 2 * _END_SECONDS
        while (state := self.state) not in ENDED:
            if time.monotonic() > deadline:
                raise RunFailed(f"run {self.id} is still {state} {timeout + 2 * _END_SECONDS:g} s after it was asked "
                                f"to stop; see {self.path}/supervisor.log")
            time.sleep(_POLL_SECONDS)
        return state

    def request_pause(self) -> None:
        """Asks the run to pause and returns at once."""
        steer.request_pause(self._directory)

    def pause(self, timeout: float = steer.PAUSE_SECONDS) -> str:
        """Makes all ranks wait together, at the end of a step; returns `paused`, or the state in which the run ended.

        A paused run can be stepped, resumed, stopped, attached to. TimeoutError where no step ended within `timeout`
        seconds: a program pauses in engine.step(), and will there.
        """
        self.request_pause()
        return steer.wait_until_paused(self._directory, 0, timeout)

    def request_resume(self) -> None:
        """Lets a paused run go on and returns at once."""
        steer.request_resume(self._directory)

    def resume(self) -> None:
        """Lets a paused run go on."""
        self.request_resume()

    def request_step(self, steps: int = 1) -> int:
        """Lets a paused run do some steps and returns at once: how many will have ended when it is paused again."""
        return steer.request_step(self._directory, steps)

    def step(self, steps: int = 1, timeout: float = steer.PAUSE_SECONDS) -> int | None:
        """Lets a paused run (one that goes is paused first) do some steps; returns how many have ended, once it is
        paused again. TimeoutError as of `pause`."""
        if self.pause(timeout) not in ENDED:
            steer.wait_until_paused(self._directory, self.request_step(steps), timeout)
        return self.steps

    @property
    def relaunchable(self) -> bool:
        """Whether what the run called is still kept: by the process that launched it, and by the run while it goes."""
        return self._call is not None or (self.path / CALL).exists()

    def relaunch(self, strategy: Strategy | str | None = None, *, world_size: int | None = None,
                 label: str | None = None) -> Run:
        """Stops this run where it still goes and launches the same again; returns the new run.

        None: as it was. A program that names a strategy itself refuses another. UsageError for what `launch` does not
        allow (this run goes on then), RunError where what the run called is not kept any more.
        """
        from dplab.launcher.launch import launch_again

        return launch_again(self, strategy=strategy, world_size=world_size, label=label)

    def profile(self, steps: tuple[int, int], *, memory: bool = False) -> list[Path]:
        """Has every rank record the steps from the first to the last, both included, with torch's profiler (a trace for
        Perfetto); `memory=True`: a snapshot of CUDA's memory instead. Steps count from 1, as on the board and in
        `table`: `run.steps + 1` is the next one. Returns at once, with the files to come, one a rank; the ranks' log
        tells when they are there. UsageError for steps that are not ahead, RunError where the run has ended."""
        name = steer.request_capture(self._directory, steps, memory=memory).name
        return [self._directory.rank(rank) / name for rank in range(self.spec.world_size)]

    def request_profile(self) -> None:
        """Has the next three steps recorded, as `profile` does; the ranks' log tells when and where."""
        steer.request_next_capture(self._directory, memory=False)

    def request_snapshot(self) -> None:
        """The same with a snapshot of CUDA's memory."""
        steer.request_next_capture(self._directory, memory=True)

    def logs(self, rank: int | None = None) -> str:
        """What a rank printed, standard output before standard error; of all ranks under a heading each."""
        if rank is None:
            return "\n".join(f"--- rank {rank}\n{self.logs(rank)}" for rank in range(self.spec.world_size))
        if not isinstance(rank, int) or not 0 <= rank < self.spec.world_size:
            raise UsageError(f"logs(rank={rank!r}) is not allowed; run {self.id} has the ranks 0 to "
                             f"{self.spec.world_size - 1}")
        files = (self._directory.rank(rank) / name for name in ("stdout.log", "stderr.log"))
        return "".join(file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file())

    def reader(self, *, recent: bool = False, partial: bool = False) -> RunReader:
        """A reader of its own, from the beginning. `recent`: also the spans of the last steps that will not stay;
        `partial`: what can be read of a damaged run."""
        return RunReader(self.path, recent=recent, partial=partial)

    def events(self) -> list[Event]:
        """All events recorded so far, of all ranks, by the time at which they ended. Of a run of more than 400 steps
        the spans of some (`dplab.telemetry.thinning`), and every step, loss and message."""
        return self.reader().poll()

    def memory(self) -> dict[int, dict[str, int]]:
        """Bytes by category as last recorded, by rank; empty where no rank records any."""
        return self._fold().memory

    def timeline(self) -> Any:
        """The latest complete step, rank by rank, as a plotly Figure: computing, and synchronising what."""
        try:
            from dplab.views.figures import timeline_figure
        except ModuleNotFoundError as error:
            raise UsageError(f"the timeline needs {error.name}, which is not installed; install dplab's extra 'lab' "
                             f"(pip install 'dplab[lab]'), or read run.events()") from error
        return timeline_figure(self.events())

    def dashboard(self, **options: Any) -> Board:
        """The live board; a static picture where there is no front end. Options are the board's:
        `panels=["sync", "memory"]` for these alone, `replay=True` to go through a run that is over, `hz`, `live`."""
        from dplab.widgets.board import Board

        return Board(self, **options)

    def table(self) -> list[dict[str, Any]]:
        """A row for each step of each rank (`dplab.views.table.COLUMNS`): loss, ms by part, bytes sent, memory."""
        from dplab.views.table import table

        return table(self.events())

    def frame(self) -> Any:
        """The table as a pandas DataFrame; UsageError where pandas is not installed."""
        from dplab.launcher.export import frame

        return frame(self)

    def summary(self) -> dict[str, Any]:
        """The run in plain values, ready for JSON: what was asked for, how far it came, its figures."""
        from dplab.launcher.export import summary

        return summary(self)

    def export(self, folder: str | os.PathLike[str], formats: Sequence[str] = EXPORTED) -> list[Path]:
        """Writes the run into a folder and returns what was written: `json` its summary, `csv` its table, `trace` for
        Perfetto, `svg`, `html` and `png` every picture. UsageError for a format that is not known or needs what is
        not installed (`png`: kaleido), RunError where it cannot be written."""
        from dplab.launcher.export import export

        return export(self, folder, formats)

    def diagnose(self) -> Diagnosis:
        """Where the run's time and memory go and what would help; where its ranks stand, if nothing moves."""
        from dplab.diagnosis.diagnose import diagnose

        return diagnose(self.path, cores=os.cpu_count())

    def compare(self, other: Run) -> Comparison:
        """What differs between this run and another: strategy, step, synchronisation, memory, bytes sent."""
        if not isinstance(other, Run):
            raise UsageError(f"compare was given a {type(other).__name__}; give another run, such as dplab.attach(id)")
        return compare(self.path, other.path)

    def __repr__(self) -> str:
        return f"<Run {' · '.join(self._facts())}>"

    def _repr_html_(self) -> str:
        name, *facts = map(html.escape, self._facts())
        return f"<div><b>Run {name}</b><br>{' · '.join(facts)}</div>"

    def _facts(self) -> list[str]:
        state = self.state
        try:
            spec = self.spec
        except RunError:
            return [self.id, state, self.failure or "", str(self.path)]
        what = f"{spec.strategy or spec.function} on {spec.world_size} rank{'s' if spec.world_size > 1 else ''}"
        try:
            figures: str | None = self._fold().line()
        except RunError as error:
            figures = str(error)
        facts = [self.id, spec.label, what, state, self._restarted(), figures, self.failure, self.stopped_by,
                 str(self.path)]
        return [fact for fact in dict.fromkeys(facts) if fact]

    def _restarted(self) -> str | None:
        try:
            again = self.restarts
        except RunError as error:
            return str(error)
        if not again:
            return None
        last = again[-1]
        return f"restarted {times(len(again))}, last on {last.world_size} of {last.ranks} ranks: {last.why}"

    def _fold(self) -> Summary:
        if self._reader is None:
            self._reader = self.reader()
        return self._summary.feed(self._reader.poll())


def attach(path_or_id: str | os.PathLike[str]) -> Run:
    """The run of a directory or of an id (or its unmistakable beginning), whoever started it.

    RunError where there is no such run or the directory is not one.
    """
    return Run(find_run(path_or_id))


def runs(root: str | os.PathLike[str] | None = None) -> list[Run]:
    """This user's runs, newest first, damaged ones included; `root`: folder to look in, None: where `launch` puts
    them."""
    folder = runs_root() if root is None else Path(root)
    return [Run(RunDirectory(folder / name)) for name in sorted(run_names(folder), reverse=True)]
