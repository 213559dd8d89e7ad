"""Where two runs differ, as a heat map: parameters down, steps across, units in the last place in colour."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from dplab.views import theme

if TYPE_CHECKING:
    from dplab.telemetry.numerics import Comparison

_SHADES = ("#FFF0B8", "#FBCB6B", "#F09A3A", "#DB6A2E", "#B8404A", "#8A2A62")
"""Light to dark, so that the order is seen without colour too, and the last still stands out from a black page; a
shade stands for a factor of 64."""

_LEFT, _TOP, _ROW, _LARGEST_CELL = 190, 60, 15, 40


def shade(ulps: int) -> str | None:
    """The colour of a difference; None (blank) for none."""
    return None if ulps == 0 else _SHADES[min(len(_SHADES) - 1, (ulps.bit_length() - 1) // 6)]


def heat_map(comparison: Comparison, title: str = "", *, width: int = 760) -> str:
    """The text of an SVG: the largest difference of each parameter after each step. Equal weights stay blank.

    Each cell carries its number as a tooltip. No script, no network: it stays visible in a saved notebook.
    """
    steps, names = comparison.steps, comparison.parameters
    cell = min(_LARGEST_CELL, (width - _LEFT - 20) / len(steps))
    height = _TOP + _ROW * len(names) + 62
    title = title or "difference between two runs"
    parts = [f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='100%' "
             f"style='max-width:{width}px' role='img' aria-label='{escape(f'{title}. {comparison}', quote=True)}' "
             f"font-family='system-ui, sans-serif' font-size='11' fill='{theme.TEXT}'>",
             f"<text x='8' y='16' font-size='14' font-weight='600'>{escape(title)}</text>",
             *(f"<text x='8' y='{33 + 15 * line}'>{escape(text)}</text>"
               for line, text in enumerate(str(comparison).split("; ")))]
    for row, name in enumerate(names):
        y = _TOP + _ROW * row
        parts.append(f"<text x='{_LEFT - 6}' y='{y + 11}' text-anchor='end'>{escape(name)}</text>")
        for column, step in enumerate(steps):
            apart = int(comparison.ulps[column, row])
            fill = shade(apart) or "none"
            parts.append(f"<rect x='{_LEFT + cell * column:.1f}' y='{y}' width='{cell - 1:.1f}' height='{_ROW - 1}' "
                         f"fill='{fill}' stroke='{theme.GRID}'><title>{escape(name)}, step {step}: {apart:,} ulp"
                         f"</title></rect>")
    foot = _TOP + _ROW * len(names)
    parts += [f"<text x='{_LEFT + cell * (column + 0.5):.1f}' y='{foot + 13}' text-anchor='middle'>{step}</text>"
              for column, step in enumerate(steps) if column % math.ceil(len(steps) / 20) == 0]
    parts.append(f"<text x='{_LEFT}' y='{foot + 30}'>step</text>")
    for index, colour in enumerate(_SHADES):
        x = _LEFT + 92 * index
        text = f"2<tspan dy='-4' font-size='11'>{6 * index}</tspan>"
        parts.append(f"<rect x='{x}' y='{foot + 40}' width='12' height='12' fill='{colour}'/>"
                     f"<text x='{x + 17}' y='{foot + 50}'>{text}</text>")
    parts.append(f"<text x='{_LEFT - 6}' y='{foot + 50}' text-anchor='end'>ulp, from</text>")
    return "\n".join([*parts, "</svg>"])
