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

from dplab.views import sentences, theme
from dplab.views.records import Bars, Chart, Floats, Head, Lanes, Line, Log, StackedArea
from dplab.views.words import COUNTED, short

WIDTH, HEIGHT = 480, 285
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 14, 56, 22
_SMALL_TOP = 38
_SMALL_HEIGHT, _SMALL_LANES, _LANE = 110, 46, 15
_LABEL = 10
"""height of a lane's name; one that would lie on the name above is left out"""
_LOG_LINES, _LOG_LETTERS = 16, 66
_LANES_UP = 14
"""what a chart of lanes saves at its top: it has no unit there"""
_LETTER = 6.6
"""width of a letter at size 12, a guess: whatever font there is, a little room is left"""
_LEGEND_LINE, _ENTRY, _WIDE_LETTER, _PROSE = 13, 14, 7, 6.3
"""height of a legend's line, room of an entry beside its text, and of a letter of that at size 11 in a wide font; and
of a letter of a sentence"""
_FACTS = 15
"""height of a line of facts"""
_MAX_POINTS = 300
_FONT = "font-family='system-ui, sans-serif'"


def svg(cells: Sequence[Chart | tuple[Chart, Chart]], *, title: str = "", head: Head | None = None,
        columns: int = 2) -> str:
    """Charts in a grid, as the text of an SVG document; a pair shares a cell, the second is smaller.

    `head` is the line above; without one it is the title, which else is only told in the alternative text.
    """
    width = WIDTH * columns
    above = _head(head, width) if head else []
    top = _FACTS * max(0, len(above) - 1) + 30 if head or title else 0
    lying: list[list[Chart | tuple[Chart, Chart]]] = []
    for cell in cells:
        if not lying or len(lying[-1]) == columns or sentences.of(cell) or sentences.of(lying[-1][0]):
            lying.append([])
        lying[-1].append(cell)
    heights = [max(_height(cell, width) for cell in row) for row in lying]
    height = top + sum(heights)
    charts = [chart for cell in cells for chart in (cell if isinstance(cell, tuple) else (cell,))]
    said = [*([title] if title else []), *(f"{chart.title}: {chart.words or chart.note}" for chart in charts)]
    alt = escape(". ".join(said), quote=True)
    parts = [f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='100%' "
             f"style='max-width:{width}px' role='img' aria-label='{alt}' {_FONT} font-size='11' "
             f"fill='{theme.TEXT}'>", _HATCH]
    if head is not None:
        parts += above
    elif title:
        parts.append(f"<text x='8' y='17' font-size='14' font-weight='600'>{escape(title)}</text>")
    for row, whole in zip(lying, heights, strict=True):
        for column, cell in enumerate(row):
            if isinstance(cell, tuple):
                upper = whole - _small_height(cell[1])
                drawn = (f"{_chart(cell[0], upper)}<g transform='translate(0 {upper})'>"
                         f"{_chart(cell[1], whole - upper, small=True)}</g>")
            else:
                drawn = _chart(cell, whole, width=width if sentences.of(cell) else WIDTH)
            parts.append(f"<g transform='translate({WIDTH * column} {top})'>{drawn}</g>")
        top += whole
    return "\n".join([*parts, "</svg>"])


def _small_height(chart: Chart) -> int:
    """Of the second chart in a cell: as high as its lanes need."""
    bars = sum(sum(mark.rows) for mark in chart.marks if isinstance(mark, Lanes))
    return _SMALL_LANES + _LANE * bars + 13 * bool(chart.caption) if bars else _SMALL_HEIGHT


def _height(cell: Chart | tuple[Chart, Chart], width: int) -> int:
    """Of a cell; what goes over the whole width is as high as it needs."""
    if isinstance(cell, Chart) and sentences.of(cell):
        return sentences.height(cell, width)
    return HEIGHT + (max(0, _small_height(cell[1]) - _SMALL_HEIGHT) if isinstance(cell, tuple) else 0)


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

    def ticks(self, about: int, least: float = 0.0) -> list[float]:
        """Round values `least` or more apart, about as many as asked for; the live board's rule."""
        raw = (self.high - self.low) / about
        power = 10.0 ** math.floor(math.log10(raw))
        step = max(least, next(nice * power for nice in (1, 2, 5, 10) if nice * power >= 0.75 * raw))
        first = math.ceil(self.low / step - 1e-9)
        return [tick * step for tick in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _head(head: Head, width: int) -> list[str]:
    """The live board's first line: a pill with the state, then facts, and below them what is wrong; line by line."""
    pill = _LETTER * len(head.state) + 20
    rows: list[list[tuple[str, str]]] = [[]]
    room = width - pill - 22
    for name, value in head.facts:
        room -= _WIDE_LETTER * len(f"{name} {value}") + 16
        if room < 0 and rows[-1]:
            rows.append([])
            room = width - _WIDE_LETTER * len(f"{name} {value}") - 24
        rows[-1].append((name, value))
    lines = [f"<text x='{8 if row else pill + 22:.0f}' y='{16 + _FACTS * row}' font-size='12'>" + "".join(
        f"<tspan dx='{16 * (index > 0)}'>{escape(name)} </tspan><tspan font-weight='600'>{escape(value)}</tspan>"
        for index, (name, value) in enumerate(facts)) + "</text>" for row, facts in enumerate(rows)]
    lines[0] = (f"<rect x='8' y='3' width='{pill:.0f}' height='18' rx='9' "
                f"fill='{theme.STATES.get(head.state, theme.OTHER_STATE)}'/><text x='{8 + pill / 2:.0f}' y='16' "
                f"text-anchor='middle' font-weight='600' fill='#fff'>{escape(head.state)}</text>{lines[0]}")
    wrong = textwrap.wrap(head.problem or "", int((width - 16) / _PROSE))[:3 * (2 * WIDTH) // width]
    return lines + [f"<text x='8' y='{22 + _FACTS * (len(lines) + line)}' fill='{theme.STATES['failed']}'>"
                    f"{escape(text)}</text>" for line, text in enumerate(wrong)]


def _chart(chart: Chart, height: int, *, small: bool = False, width: int = WIDTH) -> str:
    parts = [f"<text x='8' y='15' font-size='12' font-weight='600'>{escape(chart.title)}</text>"]
    if chart.value:
        red = f" font-weight='600' fill='{theme.ALERT}'" if chart.alert else ""
        parts.append(f"<text x='{width - _RIGHT}' y='15' text-anchor='end'{red}>{escape(chart.value)}</text>")
    if sentences.of(chart):
        return "".join([*parts, sentences.drawn(chart, width, height)])
    if chart.words is not None:
        return "".join([*parts, f"<text x='{WIDTH / 2}' y='{height / 2 + 10}' text-anchor='middle' "
                                f"font-style='italic'>{escape(chart.words)}</text>"])
    if isinstance(chart.marks[0], Log):
        return "".join([*parts, _log(chart.marks[0])])
    caption = textwrap.wrap(chart.caption, 84)[:2]
    for line, text in enumerate(caption):
        parts.append(f"<text x='8' y='{height - 6 - 13 * (len(caption) - 1 - line)}' font-size='11'>"
                     f"{escape(text)}</text>")
    bottom = height - _BOTTOM - 13 * len(caption) - 4 * bool(caption)
    lanes = any(isinstance(mark, Lanes) for mark in chart.marks)
    top = _SMALL_TOP if small else _TOP
    if lanes:
        top += _LEGEND_LINE * (not small and len(_legend_lines(chart.legend)) > 1) - _LANES_UP
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
            roles += mark.roles
            parts.append(_lanes(mark, x, y))
        elif isinstance(mark, Bars):
            roles += mark.roles
            parts.append(_bars(mark, y))
    legend = chart.legend or tuple((role, theme.label(role)) for role in dict.fromkeys(roles))
    return "".join([*parts, "" if small else _legend(legend)])


def _log(mark: Log) -> str:
    """The newest lines; each whole in its tooltip."""
    return "".join(
        f"<text x='8' y='{34 + 15 * place}' xml:space='preserve' font-family='monospace'>"
        f"<tspan font-weight='600'>{rank}</tspan> {escape(text[:_LOG_LETTERS])}<title>rank {rank}, {stream}: "
        f"{escape(text)}</title></text>"
        for place, (rank, stream, text) in enumerate(mark.lines[-_LOG_LINES:]))


def _axes(chart: Chart, top: int, bottom: int) -> tuple[_Axis, _Axis]:
    xs: list[float] = []
    ys: list[float] = []
    for mark in chart.marks:
        if isinstance(mark, Line):
            xs += [np.nanmin(mark.x), np.nanmax(mark.x)]
            finite = mark.y[np.isfinite(mark.y)]
            if len(finite):
                ys += [min(0.0, finite.min()), 1.05 * finite.max()]
        elif isinstance(mark, StackedArea):
            xs += [mark.x.min(), mark.x.max()]
            ys += [0.0, 1.08 * float(mark.ys.sum(axis=0).max(initial=0.0))]
        elif isinstance(mark, Lanes):
            xs += [0.0, float(mark.end.max(initial=1.0))]
        elif isinstance(mark, Bars):
            ys += [0.0, 1.08 * float(mark.values.sum(axis=0).max(initial=0.0))]
    left, right = chart.x_range or (min(xs, default=0), max(xs, default=1))
    low, high = chart.y_range or (min(ys, default=0), max(ys, default=1))
    return _Axis(left, right, _LEFT, WIDTH - _RIGHT), _Axis(low, high, bottom, top)


def _grid(chart: Chart, x: _Axis, y: _Axis, *, small: bool) -> str:
    parts = []
    bars = any(isinstance(mark, Bars) for mark in chart.marks)
    if not any(isinstance(mark, Lanes) for mark in chart.marks):
        for tick in y.ticks(2 if small else 4):
            parts.append(f"<path d='M{_LEFT} {y(tick)}H{WIDTH - _RIGHT}' stroke='{theme.GRID}'/>"
                         f"<text x='{_LEFT - 5}' y='{y(tick) + 4}' text-anchor='end'>{short(tick, 5)}</text>")
        parts.append(f"<text x='{_LEFT - 5}' y='{y.end - 10}' text-anchor='end'>{escape(chart.y_label)}</text>")
    if not bars:
        right = WIDTH - _RIGHT
        for tick in x.ticks(6, least=1.0 if chart.x_label in COUNTED else 0.0):
            parts.append(f"<path d='M{x(tick)} {y.end}V{y.start}' stroke='{theme.GRID}'/>")
            if x(tick) < right - _LETTER * len(chart.x_label) - 20:  # the unit stands there
                parts.append(f"<text x='{x(tick)}' y='{y.start + 14}' text-anchor='middle'>{short(tick, 5)}</text>")
        parts.append(f"<text x='{right}' y='{y.start + 14}' text-anchor='end'>{escape(chart.x_label)}</text>")
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
    """Stairs: every value holds until the next x, the last one to the end of the scale."""
    some = _fewer(len(mark.x))
    edges = x(np.append(mark.x[some], x.high))
    tops = y(np.minimum(np.cumsum(mark.ys[:, some], axis=0), y.high))
    floor = np.full(len(edges) - 1, y(0.0))
    parts = []
    for role, top in zip(mark.roles, tops, strict=True):
        up, down = _stairs(edges, top), _stairs(edges[::-1], floor[::-1])
        parts.append(_filled(f"<path d='M{edges[0]:g} {floor[0]:g}{up}{down}Z'", role))
        floor = top
    return "".join(parts)


def _stairs(edges: Floats, levels: Floats) -> str:
    """Steps at `levels` between neighbouring `edges`, in the order given; equal neighbours are one step."""
    last = np.append(levels[1:] != levels[:-1], True)
    return "".join(f"V{level:g}H{edge:g}" for level, edge in zip(levels[last], edges[1:][last], strict=True))


def _lanes(mark: Lanes, x: _Axis, y: _Axis) -> str:
    starts = np.concatenate([[0], np.cumsum(mark.rows)])
    height = (y.start - y.end) / starts[-1]
    parts = []
    below = -math.inf
    for lane, name in enumerate(mark.names):
        middle = y.end + height * (starts[lane] + mark.rows[lane] / 2)
        if middle - below < _LABEL:
            continue
        below = middle
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
        parts.append(f"<text x='{middle:.1f}' y='{y(floor) - 3}' text-anchor='middle'>{short(floor)}</text>"
                     f"<text x='{middle:.1f}' y='{y.start + 13}' text-anchor='middle'>{escape(name)}</text>")
    return "".join(parts)


def _filled(shape: str, role: str, inside: str = "") -> str:
    """`inside` (a tooltip) is said once, by what lies on top."""
    end = f">{inside}</{shape[1:].split()[0]}>" if inside else "/>"
    if role not in theme.HATCHED:
        return f"{shape} fill='{theme.color(role)}'{end}"
    return f"{shape} fill='{theme.color(role)}'/>{shape} fill='url(#hatch)'{end}"


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    """Lines of text, so that entries follow each other in whatever font there is; the second one beside the unit."""
    return "".join(f"<text x='{_LEFT + 4 if line else 8}' y='{31 + _LEGEND_LINE * line}'>" + "".join(
        f"<tspan fill='{theme.color(role)}' dx='{4 * (index > 0)}'>{'▨' if role in theme.HATCHED else '■'}</tspan> "
        f"{escape(text)}" for index, (role, text) in enumerate(said)) + "</text>"
        for line, said in enumerate(_legend_lines(entries)))


def _legend_lines(entries: Sequence[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """One line, or two where one would not hold them."""
    ends = np.cumsum([_ENTRY + _WIDE_LETTER * len(text) for _, text in entries])
    first = int(np.searchsorted(ends, WIDTH, side="right"))
    return [list(part) for part in (entries[:first], entries[first:]) if part]
