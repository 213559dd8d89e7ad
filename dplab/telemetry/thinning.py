"""Keeps the event files of a long run small: of later steps the spans are kept for one in n, and of the last ones.

`events.jsonl` holds every step, loss, batch and message. The spans of a step (what it computed, sent and gathered, and
its memory) are there for the first 2 x 200 steps, then for one step in 2 up to step 800, one in 4 up to 1600, and so
on: 200 more whenever the run has become twice as long. Of every other step the step event says in `thin` what was left
out: {"spans": how many, "wire": {collective: [count, bytes]}, "exposed": ns}. Those spans go to `recent-0.jsonl` and
`recent-1.jsonl` in turns of 200 steps, so that the last 200 to 400 are whole for whoever looks at the run meanwhile.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dplab.telemetry.event_file import EventFile, Record

FULL_STEPS = 200
DETAIL = frozenset({"forward", "backward", "optimizer", "collective", "unshard", "reshard", "recompute"})
"""Kinds that are left out of a thin step; and the gauge of its memory."""
RECENT_FILES = ("recent-0.jsonl", "recent-1.jsonl")


def keeps(step: int) -> bool:
    """Whether a step's spans stay for good."""
    return step % (1 << max(0, (step // FULL_STEPS).bit_length() - 1)) == 0


class Thinning:
    """Parts a rank's records, in the order in which they come, into what stays and what is only recent."""

    def __init__(self) -> None:
        self._left_out: dict[str, Any] | None = None

    def part(self, records: list[Record]) -> tuple[list[Record], list[Record]]:
        """(those that stay, those that are recent)."""
        kept: list[Record] = []
        recent: list[Record] = []
        for record in records:
            kind, name, step, t0, t1, attrs = record
            if kind == "step":
                if self._left_out is not None:
                    record, self._left_out = (kind, name, step, t0, t1, {**attrs, "thin": self._left_out}), None
                kept.append(record)
            elif (kind in DETAIL or (kind == "gauge" and name == "memory")) and not keeps(step):
                recent.append(record)
                self._note(record)
            else:
                kept.append(record)
        return kept, recent

    def _note(self, record: Record) -> None:
        kind, name, _, t0, t1, attrs = record
        told = self._left_out = self._left_out or {"spans": 0, "wire": {}, "exposed": 0}
        told["spans"] += t1 > t0
        if kind == "collective" and attrs.get("purpose") in ("grads", "params"):
            row = told["wire"].setdefault(name, [0, 0])
            row[0] += 1
            row[1] += attrs.get("bytes", 0)
            told["exposed"] += attrs.get("exposed", 0)


class RecentFiles:
    """The two files of a rank's recent spans; each begins anew when its turn comes."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._paths, self._rank = [directory / name for name in RECENT_FILES], rank
        self._file: EventFile | None = None
        self._turn, self._first = -1, 0

    def write(self, records: list[Record]) -> None:
        """Appends records; a file ends at the end of a step."""
        start = 0
        for place, record in enumerate(records):
            if self._file is None or record[2] >= self._first + FULL_STEPS:
                self._hand_over(records[start:place])
                start = place
                self._begin(record[2])
        self._hand_over(records[start:])

    def close(self) -> None:
        """Closes the file that is open."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _hand_over(self, records: list[Record]) -> None:
        if records and self._file is not None:
            self._file.write(records)

    def _begin(self, step: int) -> None:
        self.close()
        self._turn, self._first = (self._turn + 1) % 2, step
        path = self._paths[self._turn]
        path.unlink(missing_ok=True)      # a new file: whoever reads the old one sees that it is another
        self._file = EventFile(path, self._rank)
