"""Charts as plotly figures: hover, zoom, export. Figures are returned, never shown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from html import escape

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]

from dplab.telemetry.events import CATEGORIES, Event
from dplab.telemetry.steps import ANATOMY
from dplab.views import theme
from dplab.views.fold import Fold
from dplab.views.panels import last_steps
from dplab.views.records import Bars, Chart, Lanes, Line, Log, StackedArea, Text
from dplab.views.studies import bar_chart
from dplab.views.words import COUNTED, rows

_LOG_LINES = 16
_LETTERS = 110
_NOTE_LETTERS, _NOTE_LINE, _NOTE_DOWN = 105, 15, 44
"""letters of a note's line, its height, and how far below the plot the first one begins: under the axis' label"""
_FEW = 8
"""length of an axis on which plotly would put ticks between whole numbers"""
_TITLE_UP = 29
"""how far above the plot a title stands: over the legend"""


def figure(chart: Chart) -> go.Figure:
    """One chart as a figure; its note stands below as a caption."""
    drawn = go.Figure()
    for mark in chart.marks:
        if isinstance(mark, Line):
            drawn.add_scatter(x=mark.x, y=mark.y, name=mark.label or theme.label(mark.role),
                              mode="lines" if len(mark.x) > 1 else "markers",
                              line={"color": theme.color(mark.role), "width": 1 if mark.faint else 2},
                              opacity=0.55 if mark.faint else 1)
        elif isinstance(mark, StackedArea):
            _add_area(drawn, mark, chart.x_range)
        elif isinstance(mark, Lanes):
            _add_lanes(drawn, mark)
        elif isinstance(mark, Bars):
            for role, values in zip(mark.roles, mark.values, strict=True):
                drawn.add_bar(x=mark.names, y=values, name=theme.label(role), marker=_marker(role))
            drawn.update_layout(barmode="stack")
        elif isinstance(mark, Log):
            drawn.add_annotation(text="<br>".join(_lines(mark)), showarrow=False, x=0, y=1, xref="paper", yref="paper",
                                 xanchor="left", yanchor="top", align="left",
                                 font={} if mark.prose else {"family": "monospace"})
            drawn.update_xaxes(visible=False)
            drawn.update_yaxes(visible=False)
        elif isinstance(mark, Text):
            drawn.add_annotation(text=mark.text, showarrow=False, x=0.5, y=0.5, xref="paper", yref="paper")
    return _styled(drawn, chart)


def timeline_figure(events: Iterable[Event]) -> go.Figure:
    """The gradient-synchronisation timeline of the newest step that every rank in `events` has finished."""
    events = list(events)
    fold = Fold(1 + max((event.rank for event in events), default=0))
    fold.feed(events)
    return figure(fold.sync.chart())


def comparison(runs: Mapping[str, Iterable[Event]]) -> list[Chart]:
    """Runs side by side: median step time by part (ms), and rank 0's memory by category after its last step (MB)."""
    times, memory, steps = [], [], 0
    for events in runs.values():
        events = list(events)
        fold = Fold(1 + max((event.rank for event in events), default=0))
        fold.feed(events)
        medians, latest = fold.steps.medians() or {}, fold.memory.latest()
        steps = max([steps, *map(len, fold.steps.series.values())])
        times.append([medians.get(part, 0.0) for part in ANATOMY])
        memory.append([latest.get(name, 0.0) for name in CATEGORIES])
    names = tuple(runs)
    values = np.array(memory, dtype=np.float64).reshape(-1, len(CATEGORIES)).T
    used = [part for part in range(len(CATEGORIES)) if values[part].any()]
    roles = tuple(CATEGORIES[part] for part in used)
    parts = np.array(times, dtype=np.float64).reshape(len(names), -1).T
    seen = [part for part in range(len(ANATOMY)) if parts[part].any()]
    return [bar_chart("times", "Step time", "ms", f"medians of {last_steps(steps)}, all ranks",
                      Bars(names=names, roles=tuple(ANATOMY[part] for part in seen), values=parts[seen])),
            bar_chart("memories", "Memory of rank 0", "MB", "as the last step left it",
                      Bars(names=names, roles=roles, values=values[used]))]


def _lines(mark: Log) -> list[str]:
    if not mark.prose:
        return [f"<b>rank {rank}</b> {escape(text[:_LETTERS])}" for rank, _, text in mark.lines[-_LOG_LINES:]]
    return [f"<b>{whose}</b> {escape(text)}" for whose, _, text in rows(mark.lines, _LETTERS)]


def _add_area(drawn: go.Figure, mark: StackedArea, x_range: tuple[float, float] | None) -> None:
    """Every value holds until the next x, the last one to the end of the scale."""
    edges = np.append(mark.x, max(mark.x[-1], x_range[1] if x_range else mark.x[-1]))
    for role, ys in zip(mark.roles, mark.ys, strict=True):
        pattern = {"shape": "/", "size": 5, "bgcolor": theme.color(role), "fgcolor": "white"}
        drawn.add_scatter(x=edges, y=np.append(ys, ys[-1]), name=theme.label(role), mode="lines", stackgroup="all",
                          line={"color": theme.color(role), "width": 0.5, "shape": "hv"}, fillcolor=theme.color(role),
                          fillpattern=pattern if role in theme.HATCHED else None)


def _add_lanes(drawn: go.Figure, mark: Lanes) -> None:
    first_row = np.concatenate([[0], np.cumsum(mark.rows)])
    for kind, role in enumerate(mark.roles):
        chosen = np.flatnonzero(mark.kind == kind)
        if not len(chosen):
            continue
        drawn.add_bar(
            orientation="h", base=mark.start[chosen], x=mark.end[chosen] - mark.start[chosen],
            y=first_row[mark.lane[chosen].astype(int)] + mark.row[chosen],
            width=0.45 if role == "waiting" else 0.84, name=theme.label(role), marker=_marker(role),
            text=[mark.texts[index] for index in chosen] if mark.texts else None, textposition="none",
            hovertemplate="%{text}<extra></extra>",
        )
    middles = [first_row[lane] + (rows - 1) / 2 for lane, rows in enumerate(mark.rows)]
    drawn.update_layout(barmode="overlay")
    drawn.update_yaxes(tickvals=middles, ticktext=list(mark.names), autorange="reversed", showgrid=False)


def _marker(role: str) -> dict[str, object]:
    marker: dict[str, object] = {"color": theme.color(role), "line": {"width": 0}}
    if role in theme.HATCHED:
        marker["pattern"] = {"shape": "/", "size": 5, "fgcolor": "white", "fillmode": "overlay"}
    return marker


def _styled(drawn: go.Figure, chart: Chart) -> go.Figure:
    """Title and value above the legend, the note below the axis' label: lines of their own, so that none meet."""
    # template "none": the default one is most of the size of a small figure
    axis = {"gridcolor": theme.GRID, "zeroline": False, "automargin": True}
    note = textwrap.wrap(chart.note, _NOTE_LETTERS)
    drawn.update_layout(
        template="none", height=330 + _NOTE_LINE * len(note),
        title={"text": chart.title, "x": 0, "xref": "paper", "y": 1, "yref": "paper", "yanchor": "bottom",
               "pad": {"b": _TITLE_UP}, "font": {"size": 14}},
        margin={"l": 60, "r": 15, "t": 62, "b": _NOTE_DOWN + 8 + _NOTE_LINE * len(note)},
        font={"color": theme.TEXT, "size": 11}, paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)",
        legend={"orientation": "h", "y": 1.01, "yanchor": "bottom", "x": 0, "xanchor": "left"},
    )
    drawn.update_xaxes(title={"text": chart.x_label, "standoff": 4}, **axis)
    drawn.update_yaxes(title=chart.y_label, **axis)
    if chart.value:
        red = {"color": theme.ALERT} if chart.alert else {}
        drawn.add_annotation(text=escape(chart.value), showarrow=False, xref="paper", yref="paper", x=1, y=1,
                             xanchor="right", yanchor="bottom", yshift=_TITLE_UP, font=red)
    if chart.x_range is not None:
        drawn.update_xaxes(range=chart.x_range)
        if chart.x_label in COUNTED and chart.x_range[1] - chart.x_range[0] < _FEW:
            drawn.update_xaxes(dtick=1)
    if chart.y_range is not None:
        drawn.update_yaxes(range=chart.y_range)
    if note:
        drawn.add_annotation(text="<br>".join(map(escape, note)), showarrow=False, xref="paper", yref="paper", x=0, y=0,
                             yanchor="top", yshift=-_NOTE_DOWN, xanchor="left", align="left")
    return drawn
