"""A run as somebody looks at it: the newest step or a past one, alone or beside another run; as charts and in words.

No display of its own: the live board sends what stands here, a still picture draws it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dplab.diagnosis.hang import Stacks, hang
from dplab.errors import RunError, UsageError
from dplab.telemetry.rundir import ENDED, RunDirectory
from dplab.views.fold import Fold, chosen
from dplab.views.past import PIECE, Past
from dplab.views.records import Head
from dplab.views.svg import svg
from dplab.views.words import counted

_MOMENT = 0.3
_JUDGED_S = 2.0
"""The rules look at a run that goes on so often at most: more often nobody could read what they find."""
_OTHERS = 12
"""Earlier runs that are offered to compare with."""


class Watch:
    """Follows a run, given as a `Run` or as its directory or id. Safe to read from one thread while another feeds.

    `patient`: every `read` takes all there is; else as much as fits in a moment, so that who attaches to a long run
    sees a picture at once, and then how it catches up. `panels`: those that are looked at; None: all. UsageError for
    one that is not known.
    """

    def __init__(self, run: Any, *, patient: bool = True, panels: Sequence[str] | None = None) -> None:
        self.cells = chosen(panels)
        self._guard = threading.RLock()
        self._seconds = float("inf") if patient else _MOMENT
        self._take(_run(run))

    def _take(self, run: Any) -> None:
        self.run = run
        self.state: str = run.state
        """the run's, as of the last `read`: telling it takes several files"""
        self.problem: str | None = None
        """why the run's files could not be read the last time, None where they could"""
        self.notice: str | None = None
        """why what was asked for last could not be done"""
        self.step: int | None = None
        """the step that is looked at; None: the newest"""
        self.fold = self._new_fold()
        self._reader = _reader(run)
        self._past = Past(lambda: _reader(run), self._new_fold)
        self.compared = ""
        """directory of the run that stands beside this one"""
        self._others: tuple[int, list[tuple[str, str]]] = -1, []
        """when the folder of runs last changed, in ns, and those that can be compared with then"""
        self._judged_at = float("-inf")
        self._stacks: Stacks = {}

    def _new_fold(self) -> Fold:
        return Fold(self.run.spec.world_size, self.run.spec.strategy, os.cpu_count())

    def read(self, seconds: float | None = None) -> None:
        """Takes what the run has written since the last time, within so many seconds (None: the watch's own)."""
        until = time.monotonic() + (self._seconds if seconds is None else seconds)
        with self._guard:
            self.state = self.run.state      # first: of a run that is over then all is there to be read
            try:
                more = True
                while more and time.monotonic() < until:      # in pieces: a long run would not fit in memory at once
                    events = self._reader.poll(PIECE)
                    if any(event.kind == "restart" for event in events):      # steps of before are void: all anew
                        earlier, self.fold, self._reader = self.fold.earlier, self._new_fold(), _reader(self.run)
                        self.fold.earlier, events = earlier, self._reader.poll()
                        self._past.restarted()
                    self.fold.feed(events)
                    more = self._reader.more
                problem = self._reader.problem
            except (RunError, OSError) as error:
                problem = str(error)
            self.problem = None if problem is None else f"the run cannot be read: {problem}"
            self._judge(now=until == float("inf"))

    def _judge(self, *, now: bool) -> None:
        """Says on the findings' panel what the rules find, and which rank is missed where nothing moves."""
        findings, passed = self.fold.findings, time.monotonic() - self._judged_at
        if not now and findings.told is not None and findings.told.steps and passed < _JUDGED_S:
            return
        self._judged_at = time.monotonic()
        findings.told = findings.judged(hang(
            RunDirectory(self.run.path), self.run.spec.world_size, self.state, self._stacks))

    @property
    def behind(self) -> bool:
        """Whether the last `read` left some of what the run has written."""
        return bool(self._reader.more)

    def over(self) -> bool:
        """True where the run had ended by the last `read`; then everything that it wrote is read."""
        if self.state not in ENDED:
            return False
        self.read(float("inf"))  # written between the last read and the end
        return True

    # ---- what is looked at

    def seek(self, step: int) -> None:
        """Looks at the run as it was when every rank had ended its `step`-th step. UsageError outside of 1 to the
        last."""
        last = self.fold.pace.steps
        if not last:
            raise UsageError(f"seek({step!r}) is not allowed; there is no step yet that every rank has ended")
        if type(step) is not int or not 1 <= step <= last:
            raise UsageError(f"seek({step!r}) is not allowed; the run has ended {last} steps: give 1 to {last}")
        with self._guard:
            self.step = step

    def follow(self) -> None:
        """Back from the past to the newest step."""
        self.step = None

    def compare(self, other: Any) -> None:
        """Puts another run (a Run, its id or its directory; None: none) beside this one, in every panel that can."""
        fold, path = None, ""
        if other is not None:
            run = _run(other)
            path = str(run.path)
            fold = Fold(run.spec.world_size, run.spec.strategy)
            reader = _reader(run)
            fold.feed(reader.poll(PIECE))
            while reader.more:
                fold.feed(reader.poll(PIECE))
        with self._guard:
            self.fold.earlier, self.compared = fold, path

    def relaunch(self, strategy: Any = None) -> Any:
        """Stops the run, starts the same again under another strategy, follows that; returns the new run. The run
        before stays beside it. UsageError for a strategy that is not allowed, RunError where what the run called is
        not kept any more."""
        run, before, path = self.run.relaunch(strategy=strategy), self.fold, str(self.run.path)
        with self._guard:
            self._take(run)
            before.earlier, self.fold.earlier, self.compared = None, before, path
        return run

    @property
    def shown(self) -> Fold:
        """The fold that is looked at: the newest, or a past one."""
        if self.step is None:
            return self.fold
        with self._guard:
            past = self._past.at(self.step)
            past.earlier = self.fold.earlier
        return past

    # ---- how it looks

    def summary(self, rank: int = 0) -> str:
        """The board in words."""
        with self._guard:
            text = self.shown.summary(self.title, rank, self.cells)
        problem = self.trouble
        return f"{text}\n  {problem}" if problem else text

    def svg(self, rank: int = 0) -> str:
        """The board as a still picture."""
        with self._guard:
            return svg(self.shown.grid(rank, self.cells), title=self.title, head=self.head(),
                       columns=min(2, len(self.cells)))

    def figures(self, rank: int = 0) -> list[Any]:
        """The charts as plotly figures, to hover and zoom."""
        from dplab.views.figures import figure

        with self._guard:
            return [figure(chart) for chart in self.shown.charts(rank, self.cells)]

    @property
    def trouble(self) -> str | None:
        """What is wrong, in a sentence; None where nothing is."""
        return self.problem or self.notice or (self.run.failure if self.state in ("failed", "damaged") else None)

    @property
    def title(self) -> str:
        """The run in one line."""
        spec = self.run.spec
        ranks = counted(spec.world_size, "rank")
        label = f"{spec.label}: " if spec.label else ""
        past = "" if self.step is None else f", as after step {self.step}"
        return f"{label}{spec.strategy or 'its own strategy'}, {ranks}, {self.state}{past}"

    def head(self) -> Head:
        """The line above: state, facts, what is wrong."""
        spec = self.run.spec
        label = (("run", spec.label),) if spec.label else ()
        return Head(state=self.state, problem=self.trouble, facts=(
            *label, ("strategy", spec.strategy or "its own"), ("ranks", str(spec.world_size)), *self._restarted(),
            *self.shown.status().facts()))

    def _restarted(self) -> tuple[tuple[str, str], ...]:
        found = self.run.restarts
        return (("restarts", f"{len(found)}, last on {found[-1].world_size}: {found[-1].why}"),) if found else ()

    def status(self) -> dict[str, Any]:
        """The same in plain values, with what the page's controls need to know."""
        head = self.head()
        return {"state": head.state, "path": str(self.run.path), "problem": head.problem, "facts": head.facts,
                "others": self._offered(), "compared": self.compared,
                "relaunch": self.run.relaunchable, "cuda": self.fold.memory.cuda,
                "last": self.fold.pace.steps, "shown": self.step}

    def _offered(self) -> list[tuple[str, str]]:
        """Other runs, looked for anew when one has come or gone."""
        try:
            changed = self.run.path.parent.stat().st_mtime_ns
        except OSError:
            return []
        if changed != self._others[0]:
            self._others = changed, _others(self.run)
        return self._others[1]

    def message(self, feed: Any, *, keyframe: bool, rank: int | None = None,
                **more: Any) -> tuple[dict[str, Any], bytes]:
        """The feed's next message of what is looked at; `more` goes into its status."""
        with self._guard:
            message: tuple[dict[str, Any], bytes] = feed.message(
                self.shown, {**self.status(), **more}, keyframe=keyframe, rank=rank, cells=self.cells)
            return message


def _run(run: Any) -> Any:
    """A run, or what a path or an id stands for."""
    if not isinstance(run, str | Path):
        return run
    from dplab.launcher.run import attach

    return attach(run)


def _reader(run: Any) -> Any:
    return run.reader(recent=True, partial=True)


def _others(run: Any) -> list[tuple[str, str]]:
    """Path and words of the newest other runs beside this one."""
    from dplab.launcher.run import runs

    found = []
    for other in runs(run.path.parent):
        try:
            told = other.spec.label or other.spec.strategy or other.spec.function
        except RunError:  # a damaged one
            continue
        if other.path != run.path:
            found.append((str(other.path), f"{told}, {other.started:%d %b %H:%M:%S}"))
        if len(found) == _OTHERS:
            break
    return found
