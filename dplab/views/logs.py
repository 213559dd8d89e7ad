"""What all ranks printed, in one panel, in the order in which they did."""

from __future__ import annotations

import re
from collections import deque

from dplab.telemetry.events import Event
from dplab.views.records import Chart, Log, Text

KEPT_LINES = 200
"""Newest lines that are kept for a panel."""
STREAMS = ("stdout", "stderr", "capture")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class LogPanel:
    """The newest lines of all ranks, by the moment at which they were printed."""

    def __init__(self) -> None:
        self._lines: deque[tuple[int, int, str, str]] = deque(maxlen=KEPT_LINES)
        self._count = 0

    def feed(self, event: Event) -> None:
        """Takes the log events of the two streams, and what is said of recordings. Ranks' files are read one after the
        other: lines are put in order by their times here."""
        if event.kind != "log" or event.name not in STREAMS:
            return
        self._count += 1
        line = event.t0, event.rank, event.name, _plain(str(event.attrs.get("text", "")))
        late = 0
        while late < len(self._lines) and self._lines[-1 - late][0] > line[0]:
            late += 1
        if late == 0:
            self._lines.append(line)
            return
        if len(self._lines) == KEPT_LINES:
            self._lines.popleft()
        self._lines.insert(len(self._lines) - min(late, len(self._lines)), line)

    def chart(self) -> Chart:
        """Rank, stream and text of each line, oldest first."""
        if not self._lines:
            return Chart(key="logs", title="Printed by the ranks", x_label="", y_label="", note="nothing printed yet",
                         marks=(Text(text="nothing printed yet"),))
        lines = tuple((rank, stream, text) for _, rank, stream, text in self._lines)
        kept = f"{self._count} lines" if self._count <= len(lines) else f"the last {len(lines)} of {self._count} lines"
        if self._count == 1:
            kept = "1 line"
        rank, _, text = lines[-1]
        return Chart(key="logs", title="Printed by the ranks", x_label="", y_label="", marks=(Log(lines=lines),),
                     value=kept, note=f"{kept}; the last, of rank {rank}: {text[:80]}")


def _plain(text: str) -> str:
    """Without colours and cursor movements; of a line that overwrote itself (a progress bar) what was left."""
    shown = _ESCAPES.sub("", text).rstrip("\r").rpartition("\r")[2].expandtabs(4)
    return "".join(character if character.isprintable() else "?" for character in shown)
