"""A run as it was: the fold of its events up to the end of a step, from the run's own files."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from dplab.telemetry.events import Event
from dplab.views.fold import Fold


class Reader(Protocol):
    """Hands out the events of a run, each once."""

    more: bool

    def poll(self, limit: int | None = None) -> list[Event]:
        """Those that are new since the last call; `limit`: of so many bytes a file at most, `more` says if some are
        left."""
        ...


PIECE = 1 << 18
"""Bytes of a rank's file that are read at once."""


class Past:
    """Goes back and forth in a run. Forth it reads on; back it begins anew, with a reader from the beginning."""

    def __init__(self, reader: Callable[[], Reader], fold: Callable[[], Fold]) -> None:
        self._new_reader, self._new_fold = reader, fold
        self._piece: int | None = PIECE
        self._begin()

    def at(self, step: int) -> Fold:
        """The fold as it was when every rank had just ended its `step`-th step (from 1 on); the latest, if none has."""
        if self._fold.pace.steps > step:
            self._begin()
        self._go(step)
        self._fold.feed(self._told_of(step))
        return self._fold

    def restarted(self) -> None:
        """Steps of before are void: begins anew, and from now on takes all there is at once, as only then a reader
        leaves them out."""
        self._piece = None
        self._begin()

    def _go(self, step: int) -> None:
        while self._fold.pace.steps < step:
            if not self._ahead and not self._more():
                break
            self._fold.feed((self._ahead.popleft(),))

    def _told_of(self, step: int) -> list[Event]:
        """Takes what tells of that step and those before, and was written just behind its end: loss and memory."""
        told, later = [], deque[Event]()
        while self._ahead or self._more():
            event = self._ahead.popleft()
            if event.kind == "gauge" and event.name in ("loss", "memory") and event.step < step:
                told.append(event)
            else:
                later.append(event)
            if event.kind == "step" and event.step >= step:      # a step further: so much has been told
                break
        self._ahead.extendleft(reversed(later))
        return told

    def _more(self) -> bool:
        """Whether there was more to read."""
        while not self._ahead:
            self._ahead.extend(self._reader.poll(self._piece))
            if not self._reader.more:
                break
        return bool(self._ahead)

    def _begin(self) -> None:
        self._reader, self._fold = self._new_reader(), self._new_fold()
        self._ahead: deque[Event] = deque()
