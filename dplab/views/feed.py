"""The board's wire format: what changed since the last message, as one JSON object and one float32 buffer.

A message is `{seq, keyframe, sent, status, charts, parts}`. `charts` holds, by a chart's name, the words, scales and
marks that are not what they were: the page draws them and says nothing of its own. The columns of a mark are a part
`{id: "name#mark", columns, start, rows}`: `rows` floats a column (one column after the other in the buffer, parts one
after another) that belong at row `start`; `start` 0 replaces what was there. Parts of no columns any more are not
told. A page that misses rows asks for a keyframe, which carries everything.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dplab.views.fold import GRID, Cells, Fold
from dplab.views.panels import SHOWN_RANKS
from dplab.views.records import Chart, Lanes, Line, Log, Mark, StackedArea

_OTHERS = 4
"""Messages from one that holds all ranks' panels to the next."""
_WORDS = ("name", "title", "value", "caption", "legend", "x_label", "y_label", "alert", "rank", "choice")


class Feed:
    """Cursor over a fold: each message holds what the one before did not."""

    def __init__(self) -> None:
        self._sequence = 0
        self._sent: dict[str, NDArray[np.float32]] = {}
        self._said: dict[str, dict[str, Any]] = {}
        self._charts: dict[str, Chart] = {}

    def message(self, fold: Fold, status: dict[str, Any], *, keyframe: bool = False,
                rank: int | None = None, cells: Cells = GRID) -> tuple[dict[str, Any], bytes]:
        """The next message and its buffer. Another fold than last time is told by what differs, like everything.

        `rank`: whose panels are looked at; those of the others come with every fourth message. None: all come.
        `cells`: panels that there are on the page.
        """
        if keyframe:
            self._sent.clear()
            self._said.clear()
            self._charts.clear()
        self._sequence += 1
        parts: list[dict[str, Any]] = []
        blocks: list[bytes] = []
        changed: dict[str, dict[str, Any]] = {}
        every = keyframe or rank is None or self._sequence % _OTHERS == 0
        ranks = range(min(fold.world_size, SHOWN_RANKS)) if every else (rank or 0,)
        keys = {key for cell in cells for key in cell}
        for chart in [*fold.shared_charts(), *(chart for rank in ranks for chart in fold.rank_charts(rank))]:
            if chart.key not in keys or self._charts.get(chart.name) is chart:      # the very same: nothing is new
                continue
            self._charts[chart.name] = chart
            said, columns = _said(chart)
            before = self._said.get(chart.name, {})
            if said != before:
                changed[chart.name] = {key: value for key, value in said.items()
                                       if value != before.get(key, Ellipsis)}
                self._said[chart.name] = said
            for place, block in enumerate(columns):
                self._add(f"{chart.name}#{place}", block, parts, blocks)
        content = {"seq": self._sequence, "keyframe": keyframe, "sent": time.time() * 1000, "parts": parts,
                   "status": {**fold.status().to_dict(), **status}, "charts": changed}
        return content, b"".join(blocks)

    def _add(self, name: str, block: NDArray[np.float32], parts: list[dict[str, Any]], blocks: list[bytes]) -> None:
        """The rows that are new, where those before are as they were; else all."""
        before = self._sent.get(name)
        if before is not None and before.shape == block.shape and np.array_equal(before, block, equal_nan=True):
            return
        rows = 0
        if before is not None and np.array_equal(before, block[:, :before.shape[1]], equal_nan=True):
            rows = before.shape[1]
        parts.append({"id": name, "columns": len(block), "start": rows, "rows": block.shape[1] - rows})
        blocks.append(block[:, rows:].tobytes())
        self._sent[name] = block


def _said(chart: Chart) -> tuple[dict[str, Any], list[NDArray[np.float32]]]:
    """A chart without its columns, and the columns of each mark, shape (columns, rows)."""
    marks = [_mark(mark) for mark in chart.marks]
    words = {name: getattr(chart, name) for name in _WORDS}
    return {**words, "note": chart.words or chart.note, "words": chart.words, "x": chart.x_range, "y": chart.y_range,
            "marks": [said for said, _ in marks]}, [columns for _, columns in marks]


def _mark(mark: Mark) -> tuple[dict[str, Any], NDArray[np.float32]]:
    if isinstance(mark, Line):
        return {"kind": "line", "role": mark.role, "faint": mark.faint}, _columns(mark.x, mark.y)
    if isinstance(mark, StackedArea):
        return {"kind": "area", "roles": mark.roles}, _columns(mark.x, *mark.ys)
    if isinstance(mark, Lanes):
        return ({"kind": "lanes", "names": mark.names, "rows": mark.rows, "roles": mark.roles, "texts": mark.texts},
                _columns(mark.lane, mark.row, mark.start, mark.end, mark.kind))
    return {"kind": "log", "lines": mark.lines if isinstance(mark, Log) else ()}, _columns(())


def _columns(*columns: Any) -> NDArray[np.float32]:
    return np.array(columns, dtype=np.float32)
