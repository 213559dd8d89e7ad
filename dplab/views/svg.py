"""Charts as one SVG text: a static picture that needs no script, no network and no browser to be made.

It is what stays in a saved notebook: GitHub, nbviewer and nbconvert show it, a diff can read it. The ground is
transparent and the ink grey, so that it is legible on light and on dark pages.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from html import escape

import numpy as np

from dplab.views import theme
from dplab.views.records import Bars, Chart, Floats, Lanes, Line, StackedArea, Text

WIDTH, HEIGHT = 480, 285
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 44, 62
_SMALL_TOP, _SMALL_BOTTOM = 24, 34
_UPPER_SHARE = 0.62
_MAX_POINTS = 300
_FONT = "font-family='system-ui, sans-serif'"


def svg(cells: Sequence[Chart | tuple[Chart, Chart]], *, title: str = "", columns: int = 2) -> str:
    """Charts in a grid below a title, as the text of an SVG document; a pair shares a cell, the second is smaller."""
    head = 26 if title else 0
    rows = math.ceil(len(cells) / columns)
    width, height = WIDTH * columns, head + HEIGHT * rows
    charts = [chart for cell in cells for chart in (cell if isinstance(cell, tuple) else (cell,))]
    alt = escape(". ".join([title, *(f"{chart.title}: {chart.note}" for chart in charts)]), quote=True)
    parts = [f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='100%' "
             f"style='max-width:{width}px' role='img' aria-label='{alt}' {_FONT} font-size='11' "
             f"fill='{theme.TEXT}'>", _HATCH]
    if title:
        parts.append(f"<text x='8' y='17' font-size='14' font-weight='600'>{escape(title)}</text>")
    for index, cell in enumerate(cells):
        x, y = WIDTH * (index % columns), head + HEIGHT * (index // columns)
        if isinstance(cell, tuple):
            upper = round(HEIGHT * _UPPER_SHARE)
            drawn = (f"{_chart(cell[0], upper)}<g transform='translate(0 {upper})'>"
                     f"{_chart(cell[1], HEIGHT - upper, small=True)}</g>")
        else:
            drawn = _chart(cell, HEIGHT)
        parts.append(f"<g transform='translate({x} {y})'>{drawn}</g>")
    return "\n".join([*parts, "</svg>"])


_HATCH = ("<defs><pattern id='hatch' width='5' height='5' patternUnits='userSpaceOnUse' "
          "patternTransform='rotate(45)'><line x1='0' y1='0' x2='0' y2='5' stroke='#fff' stroke-width='2' "
          "stroke-opacity='.65'/></pattern></defs>")


class _Axis:
    """Values to pixels along one axis, and round tick values."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        if not high > low:
            low, high = low - 0.5, high + 0.5
        self.low, self.high, self.start, self.end = low, high, start, end

    def __call__(self, values: Floats | float) -> Floats:
        share = (np.asarray(values, dtype=np.float64) - self.low) / (self.high - self.low)
        return np.round(self.start + share * (self.end - self.start), 1)

    def ticks(self, about: int = 5) -> list[float]:
        raw = (self.high - self.low) / about
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(nice * power for nice in (1, 2, 5, 10) if nice * power >= raw)
        first = math.ceil(self.low / step - 1e-9)
        return [tick * step for tick in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _chart(chart: Chart, height: int, *, small: bool = False) -> str:
    parts = [f"<text x='8' y='15' font-size='12' font-weight='600'>{escape(chart.title)}</text>"]
    if small:  # no room for a legend and a caption: what they say stands beside the title
        parts.append(f"<text x='{WIDTH - _RIGHT}' y='15' text-anchor='end'>{escape(chart.note)}</text>")
    else:
        for line, text in enumerate(textwrap.wrap(chart.note, 84)[:2]):
            parts.append(f"<text x='8' y='{height - 20 + 13 * line}'>{escape(text)}</text>")
    words = next((mark.text for mark in chart.marks if isinstance(mark, Text)), None)
    if words is not None:
        return "".join([*parts, f"<text x='{WIDTH / 2}' y='{height / 2}' text-anchor='middle' "
                                f"font-style='italic'>{escape(words)}</text>"])
    top, bottom = (_SMALL_TOP, height - _SMALL_BOTTOM) if small else (_TOP, height - _BOTTOM)
    x, y = _axes(chart, top, bottom)
    parts.append(_grid(chart, x, y, small=small))
    roles: list[str] = []
    for mark in chart.marks:
        if isinstance(mark, Line):
            roles.append(mark.role)
            parts.append(_line(mark, x, y))
        elif isinstance(mark, StackedArea):
            roles += mark.roles
            parts.append(_area(mark, x, y))
        elif isinstance(mark, Lanes):
            roles += [mark.roles[int(kind)] for kind in np.unique(mark.kind)]
            parts.append(_lanes(mark, x, y))
        elif isinstance(mark, Bars):
            roles += mark.roles
            parts.append(_bars(mark, y))
    return "".join([*parts, "" if small else _legend(roles)])


def _axes(chart: Chart, top: int, bottom: int) -> tuple[_Axis, _Axis]:
    xs: list[float] = []
    ys: list[float] = []
    for mark in chart.marks:
        if isinstance(mark, Line):
            xs += [np.nanmin(mark.x), np.nanmax(mark.x)]
            finite = mark.y[np.isfinite(mark.y)]
            if len(finite):
                low = finite.min() if chart.key == "loss" else min(0.0, finite.min())
                ys += [low, finite.max() * (1 if chart.key == "loss" else 1.05)]
        elif isinstance(mark, StackedArea):
            xs += [mark.x.min(), mark.x.max()]
            ys += [0.0, 1.08 * float(mark.ys.sum(axis=0).max(initial=0.0))]
        elif isinstance(mark, Lanes):
            xs += [0.0, float(mark.end.max(initial=1.0))]
        elif isinstance(mark, Bars):
            ys += [0.0, 1.08 * float(mark.values.sum(axis=0).max(initial=0.0))]
    return (_Axis(min(xs, default=0), max(xs, default=1), _LEFT, WIDTH - _RIGHT),
            _Axis(min(ys, default=0), chart.y_max or max(ys, default=1), bottom, top))


def _grid(chart: Chart, x: _Axis, y: _Axis, *, small: bool) -> str:
    parts = []
    bars = any(isinstance(mark, Bars) for mark in chart.marks)
    if not any(isinstance(mark, Lanes) for mark in chart.marks):
        for tick in y.ticks(2 if small else 4):
            parts.append(f"<path d='M{_LEFT} {y(tick)}H{WIDTH - _RIGHT}' stroke='{theme.GRID}'/>"
                         f"<text x='{_LEFT - 5}' y='{y(tick) + 4}' text-anchor='end'>{tick:g}</text>")
        parts.append(f"<text x='8' y='{y.end + 4}'>{escape(chart.y_label)}</text>")
    if not bars:
        for tick in x.ticks(7):
            parts.append(f"<path d='M{x(tick)} {y.end}V{y.start}' stroke='{theme.GRID}'/>"
                         f"<text x='{x(tick)}' y='{y.start + 13}' text-anchor='middle'>{tick:g}</text>")
        parts.append(f"<text x='8' y='{y.start + 13}'>{escape(chart.x_label)}</text>")
    return "".join(parts)


def _fewer(count: int) -> slice:
    return slice(None, None, max(1, math.ceil(count / _MAX_POINTS)))


def _points(xs: Floats, ys: Floats) -> str:
    return " ".join(f"{x:g},{y:g}" for x, y in zip(xs, ys, strict=True))


def _line(mark: Line, x: _Axis, y: _Axis) -> str:
    seen = np.flatnonzero(np.isfinite(mark.y))[_fewer(len(mark.y))]
    if len(seen) == 1:
        return f"<circle cx='{x(mark.x[seen[0]])}' cy='{y(mark.y[seen[0]])}' r='3' fill='{theme.color(mark.role)}'/>"
    return (f"<polyline points='{_points(x(mark.x[seen]), y(mark.y[seen]))}' fill='none' "
            f"stroke='{theme.color(mark.role)}' stroke-width='{1 if mark.faint else 2}' "
            f"stroke-opacity='{0.55 if mark.faint else 1}'/>")


def _area(mark: StackedArea, x: _Axis, y: _Axis) -> str:
    some = _fewer(len(mark.x))
    xs, tops = mark.x[some], np.minimum(np.cumsum(mark.ys[:, some], axis=0), y.high)
    if len(xs) == 1:  # one column is a bar of the whole width
        xs, tops = np.array([x.low, x.high]), np.repeat(tops, 2, axis=1)
    floor = np.zeros(len(xs))
    parts = []
    for role, top in zip(mark.roles, tops, strict=True):
        points = _points(x(np.concatenate([xs, xs[::-1]])), y(np.concatenate([top, floor[::-1]])))
        parts.append(_filled(f"<polygon points='{points}'", role))
        floor = top
    return "".join(parts)


def _lanes(mark: Lanes, x: _Axis, y: _Axis) -> str:
    starts = np.concatenate([[0], np.cumsum(mark.rows)])
    height = (y.start - y.end) / starts[-1]
    parts = []
    for lane, name in enumerate(mark.names):
        middle = y.end + height * (starts[lane] + mark.rows[lane] / 2)
        parts.append(f"<text x='{_LEFT - 5}' y='{middle + 4:.1f}' text-anchor='end'>{escape(name)}</text>")
    for index in range(len(mark.lane)):
        role = mark.roles[int(mark.kind[index])]
        left, right = x(mark.start[index]), x(mark.end[index])
        thin = 0.5 if role == "waiting" else 0.84
        top = y.end + height * (starts[int(mark.lane[index])] + mark.row[index] + (1 - thin) / 2)
        text = f"<title>{escape(mark.texts[index])}</title>" if mark.texts else ""
        parts.append(_filled(f"<rect x='{left:g}' y='{top:.1f}' width='{max(0.6, right - left):.1f}' "
                             f"height='{height * thin:.1f}'", role, text))
    return "".join(parts)


def _bars(mark: Bars, y: _Axis) -> str:
    slot = (WIDTH - _LEFT - _RIGHT) / len(mark.names)
    parts = []
    for index, name in enumerate(mark.names):
        left, floor = _LEFT + slot * (index + 0.2), 0.0
        for role, value in zip(mark.roles, mark.values[:, index], strict=True):
            top, bottom = y(floor + value), y(floor)
            parts.append(_filled(f"<rect x='{left:.1f}' y='{top}' width='{0.6 * slot:.1f}' "
                                 f"height='{bottom - top:.1f}'", role))
            floor += value
        middle = left + 0.3 * slot
        parts.append(f"<text x='{middle:.1f}' y='{y(floor) - 3}' text-anchor='middle'>{floor:.3g}</text>"
                     f"<text x='{middle:.1f}' y='{y.start + 13}' text-anchor='middle'>{escape(name)}</text>")
    return "".join(parts)


def _filled(shape: str, role: str, inside: str = "") -> str:
    end = f">{inside}</{shape[1:].split()[0]}>" if inside else "/>"
    filled = f"{shape} fill='{theme.color(role)}'{end}"
    return filled + f"{shape} fill='url(#hatch)'{end}" if role in theme.HATCHED else filled


def _legend(roles: list[str]) -> str:
    """One line of text, so that entries follow each other in whatever font there is."""
    entries = "".join(f"<tspan fill='{theme.color(role)}' dx='{4 * (index > 0)}'>"
                      f"{'▨' if role in theme.HATCHED else '■'}</tspan> {escape(theme.label(role))}"
                      for index, role in enumerate(dict.fromkeys(roles)))
    return f"<text x='8' y='31' font-size='10'>{entries}</text>"
