"""The live board of a run: its panels on canvas that follow its files, and a still picture when it is over.

Life of a board: made (the files are read once) -> displayed (a thread reads on and sends what changed) -> frozen
(the run ended, or `freeze()`: the widget's place takes an SVG and words) -> closed. A board that looks at the past
(`seek`, or `replay=True` of a run that is over) stays until `freeze()`. Where nobody can watch a widget (nbval,
nbconvert, a script) no comm is opened and no thread runs; the picture is renewed after cells.
"""

from __future__ import annotations

import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dplab.errors import RunError, UsageError

try:
    import anywidget
    import traitlets
except ImportError as error:
    raise UsageError(f"the live board needs {error.name}, which is not installed; install dplab's extra 'lab' "
                     f"(pip install 'dplab[lab]'), or read the run with run.events()") from error

from dplab.launcher import linux
from dplab.launcher.watch import Watch
from dplab.telemetry.rundir import ENDED
from dplab.views import theme
from dplab.views.feed import Feed
from dplab.views.panels import SHOWN_RANKS
from dplab.widgets import frontend

MAX_HZ = 4.0
_KEYFRAME_S = 15.0
_QUIET_S, _QUIET_PERIOD_S, _GONE_S = 20.0, 60.0, 3600.0
_REDRAW_S = 2.0
_LEAST_PAUSE_S = 0.05
_shown: weakref.WeakValueDictionary[str, Board] = weakref.WeakValueDictionary()


class Ticker(threading.Thread):
    """Calls a board's `tick` until it returns None; holds no reference between ticks, so that it keeps none alive."""

    def __init__(self, board: Board) -> None:
        super().__init__(name="dplab-board", daemon=True)
        self.wake = threading.Event()
        self.ended = False
        self._board = weakref.ref(board)

    def run(self) -> None:
        linux.step_aside()  # the ranks may need every core there is
        while not self.ended:
            board = self._board()
            pause = board.tick() if board is not None else None
            del board
            if pause is None:
                return
            self.wake.wait(pause)
            self.wake.clear()


class Board(anywidget.AnyWidget):
    """Live board of a run, given as a `Run` or as its directory.

    `hz`: messages a second, at most 4. `live`: True opens a widget, False shows still pictures; None finds out
    whether somebody watches. `replay`: True keeps the widget of a run that is over, to go through its past. `panels`:
    some of them, as `["sync", "memory"]`; None: all. Raises UsageError for a rate that is not allowed and for a panel
    that is not known, RunError where there is no run.
    """

    # text, not paths: anywidget ties every instance to a path's watcher, which would hold it for ever
    _esm = Path(__file__).with_name("board.js").read_text(encoding="utf-8")
    _css = Path(__file__).with_name("board.css").read_text(encoding="utf-8")
    layout = traitlets.Any(None).tag(sync=True)  # ipywidgets' default is a widget of its own, with a comm of its own
    spec = traitlets.Dict().tag(sync=True)
    snapshot = traitlets.Dict().tag(sync=True)
    _ticker: Ticker | None = None

    def __init__(self, run: Any, *, hz: float = 2.0, live: bool | None = None, replay: bool = False,
                 panels: Sequence[str] | None = None) -> None:
        if not 0 < hz <= MAX_HZ:
            raise UsageError(f"Board(hz={hz!r}) is not allowed; hz is a number of messages a second above 0 "
                             f"and at most {MAX_HZ:g}")
        self.live = frontend.watched() if live is None else live
        self.replay = replay
        self.frozen = self.closed = False
        self._feed = Feed()
        self._period = 1 / hz
        self._display_id = f"dplab-{uuid.uuid4().hex}"
        self._rank = 0
        """chosen on the page; still pictures show it too"""
        self._asked: deque[tuple[str, Any]] = deque()
        self._done = 0
        self._keyframe_asked = False
        self._hellos = 0
        self._heard_at = self._keyframe_at = self._drawn_at = time.monotonic()
        self._watch = Watch(run, patient=not self.live, panels=panels)
        self._watch.read()
        content, data = self._watch.message(self._feed, keyframe=True, done=0)
        super().__init__(spec=self._spec(), snapshot={"content": content, "data": data} if self.live else {})
        self.on_msg(self._on_message)

    @property
    def run(self) -> Any:
        """The run that is followed; another one after `relaunch`."""
        return self._watch.run

    def open(self) -> None:
        """Opens the comm, where somebody watches: a comm that nobody reads would only swell the saved notebook."""
        if self.live:
            super().open()

    # ---- pictures ------------------------------------------------------------------------------------------------

    def summary(self, rank: int = 0) -> str:
        """The board in words."""
        return self._watch.summary(rank)

    def svg(self, rank: int = 0) -> str:
        """The board as a still picture."""
        return self._watch.svg(rank)

    def figures(self, rank: int = 0) -> list[Any]:
        """The board's charts as plotly figures, to hover and zoom."""
        return self._watch.figures(rank)

    def __repr__(self) -> str:
        return self.summary()

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return self._bundle()

    def _bundle(self) -> dict[str, Any]:
        self._drawn_at = time.monotonic()
        bundle = {"text/plain": self.summary(self._rank), "image/svg+xml": self.svg(self._rank)}
        if self.live and not self.frozen and not self.closed:
            bundle["application/vnd.jupyter.widget-view+json"] = {
                "version_major": 2, "version_minor": 0, "model_id": self.model_id}
        return bundle

    def _ipython_display_(self) -> None:
        key = frontend.cell_id() or str(self.run.path)
        before = _shown.get(key)
        if before is not None and before is not self:
            before.close()  # the cell ran again: its old comm would stay open, its thread would go on
        _shown[key] = self
        if self.frozen or self.closed:  # a picture of its own: what stands elsewhere keeps its moment
            self._display_id = f"dplab-{uuid.uuid4().hex}"
        self._watch.read()
        if self._done_with():
            self._end()
        frontend.show(self._bundle(), self._display_id)
        if self.frozen or self.closed:
            return
        if self.live:
            self._start()
        elif frontend.in_kernel():
            frontend.cells().after_each(self)

    def after_cell(self) -> None:
        """Renews the still picture; called after each cell where nobody watches."""
        self._watch.read()
        over = self._watch.over()
        if over or time.monotonic() - self._drawn_at > _REDRAW_S:
            frontend.show(self._bundle(), self._display_id, update=True)
        if over:
            self._end()

    def freeze(self) -> None:
        """Puts a still picture of this moment in the board's place. The run goes on; nothing else does."""
        if self.frozen or self.closed:
            return
        self._watch.read()
        self._end(show=True)

    def close(self) -> None:
        """Ends the thread and the comm; the run goes on. A closed board can still be asked for its summary."""
        self.closed = True
        self._halt()
        super().close()

    def _halt(self) -> None:
        if self._ticker is not None:
            self._ticker.ended = True
            self._ticker.wake.set()
            self._ticker = None

    def _end(self, *, show: bool = False) -> None:
        self.frozen = True
        if show:
            frontend.show(self._bundle(), self._display_id, update=True)
        if self._hellos > 1:  # a reloaded page has forgotten the display's id: there the board stays, and stands still
            self._halt()
        else:
            self.close()

    # ---- the run -------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stops the run, as `Run.stop` does."""
        self.run.stop()

    def relaunch(self, strategy: Any = None) -> Any:
        """Stops the run, starts the same again under another strategy and follows that; see `Run.relaunch`."""
        run = self._watch.relaunch(strategy)
        self._keyframe_asked = True
        return run

    def compare(self, other: Any) -> None:
        """Puts another run (a Run, its id or its directory; None: none) beside this one, in every panel that can."""
        self._watch.compare(other)

    def seek(self, step: int) -> None:
        """Shows the run as it was when every rank had ended its `step`-th step. UsageError outside of 1 to the last."""
        self._watch.seek(step)

    def follow(self) -> None:
        """Back from the past to the newest step."""
        self._watch.follow()

    def _done_with(self) -> bool:
        """True where a still picture takes the board's place: the run is over, and nobody goes through its past."""
        past = self.live and (self.replay or self._watch.step is not None)
        return self._watch.over() and not (self.frozen or self.closed or past)

    def _spec(self) -> dict[str, Any]:
        return {"ranks": min(self.run.spec.world_size, SHOWN_RANKS), "final": ENDED,
                "roles": theme.ROLES, "hatched": theme.HATCHED, "states": theme.STATES, "grid": self._watch.cells,
                "strategies": tuple(dict.fromkeys((self.run.spec.strategy or "ddp", *_STRATEGIES)))}

    # ---- the page ------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._ticker is None or not self._ticker.is_alive():
            self._ticker = Ticker(self)
            self._ticker.start()

    def tick(self) -> float | None:
        """Reads on, sends what changed, and says after how many seconds to come again; None: never."""
        began, used = time.monotonic(), time.thread_time()
        while self._asked:
            self._perform(*self._asked.popleft())
        self._watch.read()
        if self._done_with() or self.frozen:
            if not self.closed:
                self._transmit(keyframe=True)
            if not self.frozen:
                self._end(show=True)
            return None
        cells = frontend.cells()
        quiet = 0.0 if cells.running else began - max(self._heard_at, cells.ended_at)
        if quiet > _GONE_S:
            return None  # a hello starts a new thread
        unread = quiet > _QUIET_S  # the server keeps all that nobody fetches
        if not (unread and self._watch.behind):
            self._transmit(keyframe=self._keyframe_asked or unread or began - self._keyframe_at > _KEYFRAME_S)
        period = min(quiet / 2, _QUIET_PERIOD_S) if unread else self._period
        # by what a tick costs, not by how long others kept the processor: a fifth of a core, half to catch up
        rest = (1 if self._watch.behind else 4) * (time.thread_time() - used)
        return max(0 if self._watch.behind else period - (time.monotonic() - began), rest, _LEAST_PAUSE_S)

    def _perform(self, kind: str, value: Any) -> None:
        """Does what a button asked for; what cannot be done is said on the board."""
        try:
            self._watch.notice = None
            if kind == "relaunch":
                self.relaunch(value)
            elif kind == "compare":
                self.compare(value or None)
            elif kind == "seek":
                self.seek(value) if value is not None else self.follow()
            else:
                getattr(self.run, f"request_{kind}")()
        except (RunError, UsageError, OSError) as error:
            self._watch.notice = str(error)
        self._done += 1

    def _transmit(self, *, keyframe: bool) -> None:
        content, data = self._watch.message(self._feed, keyframe=keyframe, rank=self._rank, done=self._done)
        if keyframe:
            self._keyframe_asked, self._keyframe_at = False, time.monotonic()
        self.send(content, buffers=[data])

    def _on_message(self, _: Any, content: dict[str, Any], __: list[Any]) -> None:
        """The page speaks: on any thread, early or late, so that this only notes what it says."""
        self._heard_at = time.monotonic()
        kind = content.get("type")
        if kind == "hello":
            self._keyframe_asked = True
            self._hellos += bool(content.get("fresh"))
        elif kind == "rank" and content.get("rank") in range(min(self.run.spec.world_size, SHOWN_RANKS)):
            self._rank = int(content["rank"])
        elif kind in _ACTIONS:
            if kind == "seek" and self._asked and self._asked[-1][0] == "seek":
                self._asked.pop()  # a slider that moves says more than anybody can follow
            self._asked.append((kind, content.get(_ACTIONS[kind])))
        if kind in ("hello", "rank", *_ACTIONS) and not self.closed:
            self._start()
            if self._ticker is not None:
                self._ticker.wake.set()


_STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
_ACTIONS = {**dict.fromkeys(("stop", "pause", "step", "resume", "profile", "snapshot"), ""), "relaunch": "strategy",
            "compare": "run", "seek": "step"}
"""What the page may ask for, and which field says more about it."""
