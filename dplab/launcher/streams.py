"""A rank's standard streams: what Python prints goes to the rank's file, and line by line into its events.

The events carry the moment, so that a board shows the lines of all ranks in one order, live and replayed. What C
libraries and child processes write is in the file alone.
"""

from __future__ import annotations

import io

from dplab.telemetry import recorder

LINES = 5000
"""Lines of a stream that become events; a program that prints more has them in its file."""
LETTERS = 400
"""Of a line."""


class Printed(io.TextIOWrapper):
    """The process's stream `name` on a descriptor that stays open."""

    def __init__(self, descriptor: int, name: str) -> None:
        super().__init__(open(descriptor, "wb", closefd=False), encoding="utf-8", errors="backslashreplace",  # noqa: SIM115
                         line_buffering=True)
        self._name, self._left, self._line = name, LINES, ""

    def write(self, text: str, /) -> int:
        """Writes, then notes every line that is whole."""
        written = super().write(text)
        if self._left > 0:
            *lines, self._line = (self._line + text).split("\n")
            for line in lines:
                self._note(line)
            self._line = self._line[-LETTERS:]
        return written

    def _note(self, line: str) -> None:
        self._left -= 1
        if self._left <= 0:
            line = f"(line {LINES}; from here on see {self._name}.log)"
        if self._left >= 0:
            moment = recorder.now()
            recorder.current().span("log", self._name, moment, moment, text=line[:LETTERS])
