"""The board's wire format: what changed since the last message, as one JSON object and one float32 buffer.

A message is `{seq, keyframe, sent, status, charts, parts, sync}`. A part `{id, columns, start, rows, generation}` says
that `rows` rows (row-major in the buffer, parts one after another) belong at row `start` of a series; `start` 0
replaces it. `charts` holds the words and scales around each picture that are not what they were: the page draws the
columns and says nothing of its own. `sync` is there when its step changed: names and texts of the lanes, whose columns
are the part "sync". A page that misses rows asks for a keyframe, which carries everything.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from dplab.views.fold import Fold
from dplab.views.panels import SHOWN_RANKS
from dplab.views.records import Chart, Lanes
from dplab.views.series import Series

_LANE_COLUMNS = ("lane", "row", "start", "end", "kind")


class Feed:
    """Cursor over a fold: each message holds what the one before did not."""

    def __init__(self, fold: Fold) -> None:
        self._fold = fold
        self._sequence = 0
        self._sent: dict[str, tuple[int, int]] = {}
        self._sync_step: int | None = None
        self._said: dict[str, dict[str, Any]] = {}

    def message(self, status: dict[str, Any], *, keyframe: bool = False) -> tuple[dict[str, Any], bytes]:
        """The next message and its buffer."""
        if keyframe:
            self._sent.clear()
            self._sync_step = None
            self._said.clear()
        self._sequence += 1
        parts: list[dict[str, Any]] = []
        blocks: list[np.ndarray] = []
        for name, series in self._series().items():
            generation, start = self._sent.get(name, (series.generation, 0))
            if generation != series.generation:
                start = 0
            rows = series.rows(start)
            if len(rows) or keyframe:
                parts.append({"id": name, "columns": series.columns, "start": start, "rows": len(rows),
                              "generation": series.generation})
                blocks.append(rows.astype(np.float32).ravel())
            self._sent[name] = (series.generation, start + len(rows))
        content: dict[str, Any] = {"seq": self._sequence, "keyframe": keyframe, "sent": time.time() * 1000,
                                   "status": {**self._fold.status().to_dict(), **status}, "parts": parts,
                                   "charts": self._charts()}
        self._add_sync(content, blocks)
        return content, np.concatenate(blocks).tobytes() if blocks else b""

    def _series(self) -> dict[str, Series]:
        fold = self._fold
        named = {"loss": fold.loss.series}
        for kind, by_rank in (("steps", fold.steps.series), ("memory", fold.memory.series),
                              ("utilization", fold.memory.utilization)):
            named.update({f"{kind}/{rank}": series for rank, series in by_rank.items()})
        return named

    def _charts(self) -> dict[str, dict[str, Any]]:
        """By series name, what changed since the last message."""
        ranks = range(min(self._fold.world_size, SHOWN_RANKS))
        charts = [*self._fold.shared_charts(), *(chart for rank in ranks for chart in self._fold.rank_charts(rank))]
        changed = {}
        for chart in charts:
            name = chart.key if chart.rank is None else f"{chart.key}/{chart.rank}"
            said = {"title": chart.title, "value": chart.value, "note": chart.words or chart.note,
                    "words": chart.words, "caption": chart.caption, "legend": chart.legend,
                    "x_label": chart.x_label, "y_label": chart.y_label, "x": chart.x_range, "y": chart.y_range,
                    "lanes": self._lanes(chart)}
            before = self._said.get(name, {})
            if said != before:
                changed[name] = {key: value for key, value in said.items() if value != before.get(key, Ellipsis)}
                self._said[name] = said
        return changed

    @staticmethod
    def _lanes(chart: Chart) -> dict[str, Any] | None:
        """A few lanes travel with their words; those of the timeline, which are many, are a part of their own."""
        mark = chart.marks[0] if chart.marks else None
        if chart.key == "sync" or not isinstance(mark, Lanes):
            return None
        columns = {name: getattr(mark, name).tolist() for name in _LANE_COLUMNS}
        return {"names": mark.names, "rows": mark.rows, "roles": mark.roles, "texts": mark.texts, **columns}

    def _add_sync(self, content: dict[str, Any], blocks: list[np.ndarray]) -> None:
        step = self._fold.sync.step
        if step == self._sync_step:
            return
        mark = self._fold.sync.chart().marks[0]
        assert isinstance(mark, Lanes)
        self._sync_step = step
        content["sync"] = {"step": step, "names": mark.names, "rows": mark.rows, "roles": mark.roles,
                           "texts": mark.texts}
        columns = np.stack([getattr(mark, name) for name in _LANE_COLUMNS], axis=1)
        content["parts"].append({"id": "sync", "columns": _LANE_COLUMNS, "start": 0, "rows": len(columns),
                                 "generation": content["seq"]})
        blocks.append(columns.astype(np.float32).ravel())
