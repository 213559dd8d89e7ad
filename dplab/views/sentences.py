"""Sentences in a picture: a chart of prose, over its whole width and as high as it needs."""

from __future__ import annotations

from html import escape

from dplab.views.records import Chart, Log
from dplab.views.words import rows

_FIRST, _ROW, _INDENT, _CAPTION = 33, 15, 44, 20
_LETTER = 6.0
"""width of a letter at size 11, a guess"""


def of(cell: Chart | tuple[Chart, Chart]) -> bool:
    """Whether a cell is a chart of prose."""
    return isinstance(cell, Chart) and any(isinstance(mark, Log) and mark.prose for mark in cell.marks)


def height(chart: Chart, width: int) -> int:
    """Pixels that the chart needs."""
    return _FIRST + _ROW * len(_rows(chart, width)) + _CAPTION * bool(chart.caption)


def drawn(chart: Chart, width: int, below: int) -> str:
    """The sentences, as parts of an SVG; the caption ends where the cell does, `below`."""
    parts = []
    for place, (whose, kind, text) in enumerate(_rows(chart, width)):
        y = _FIRST + _ROW * place
        weight = " font-weight='600'" if kind == "what" else ""
        parts.append(f"<text x='8' y='{y}' font-weight='600'>{escape(whose)}</text>"
                     f"<text x='{_INDENT}' y='{y}'{weight}>{escape(text)}</text>")
    if chart.caption:
        parts.append(f"<text x='8' y='{below - 8}'>{escape(chart.caption)}</text>")
    return "".join(parts)


def _rows(chart: Chart, width: int) -> list[tuple[str, str, str]]:
    letters = int((width - _INDENT) / _LETTER)
    return [row for mark in chart.marks if isinstance(mark, Log) for row in rows(mark.lines, letters)]
