"""Plotly figures hold the charts' own columns, and little else."""

from __future__ import annotations

from html import unescape

import numpy as np
import plotly.graph_objects as go
import pytest

from dplab.telemetry.events import Event
from dplab.telemetry.steps import ANATOMY
from dplab.views import theme
from dplab.views.figures import figure, timeline_figure
from dplab.views.fold import Fold
from tests.views.synthetic import run_events


@pytest.fixture
def fold():
    made = Fold(2)
    made.feed(run_events(2, 20))
    return made


def test_lines_and_areas_are_the_charts_columns(fold):
    drawn = figure(fold.loss.chart())
    np.testing.assert_array_equal(drawn.data[0].y, fold.loss.series["loss"])
    stacked = figure(fold.steps.chart())
    assert [trace.name for trace in stacked.data] == [theme.label(part) for part in ANATOMY]
    assert {trace.stackgroup for trace in stacked.data} == {"all"}


def test_timeline_holds_every_bar_of_the_newest_complete_step():
    drawn = timeline_figure(run_events(2, 4))
    assert isinstance(drawn, go.Figure)
    assert drawn.layout.title.text == "Gradient synchronisation, step 4"
    backward = next(trace for trace in drawn.data if trace.name == "backward")
    assert list(backward.base) == [33, 33]
    assert list(backward.x) == [33, 33]
    waiting = next(trace for trace in drawn.data if trace.name == "waiting")
    assert {(66, 12), (94, 4)} <= set(zip(waiting.base, waiting.x, strict=True))
    exposed = next(trace for trace in drawn.data if trace.name == "exposed sync")
    assert exposed.marker.pattern.shape == "/"
    assert list(drawn.layout.yaxis.ticktext) == ["rank 0", "wire", "rank 1", "wire"]


def test_timeline_of_nothing_says_so():
    drawn = timeline_figure([])
    assert drawn.layout.annotations[0].text == "no step is complete on every rank yet"


def test_few_steps_have_whole_numbers():
    few, many = Fold(2), Fold(2)
    few.feed(run_events(2, 3))
    many.feed(run_events(2, 30))
    assert [figure(made.loss.chart()).layout.xaxis.dtick for made in (few, many)] == [1, None]


def test_figures_are_small(fold):
    for chart in fold.charts():
        assert len(figure(chart).to_json()) < 20_000


def test_what_stands_around_a_figure_is_whole_and_in_lines_of_its_own(fold):
    charts = [chart for chart in fold.charts() if chart.note]
    assert len(charts) > 8
    for chart in charts:
        drawn = figure(chart)
        note = next(one for one in drawn.layout.annotations if one.yanchor == "top" and one.xanchor == "left"
                    and one.yshift is not None)
        lines = unescape(note.text).split("<br>")
        assert " ".join(lines) == chart.note
        assert max(map(len, lines)) <= 105
        assert -note.yshift + 15 * len(lines) < drawn.layout.margin.b
        told = [one for one in drawn.layout.annotations if one.xanchor == "right"]
        assert [one.text for one in told] == [chart.value] * bool(chart.value)


def test_a_value_that_is_not_as_it_should_be_is_red_and_words_of_a_rank_are_no_markup():
    fold = Fold(2, "zero2")
    fold.feed([*run_events(2, 3), Event("log", "stdout", 0, 2, 1, 1, {"text": "<b>loss</b>"})])
    (value,) = (one for one in figure(fold.wire.chart(0)).layout.annotations if one.xanchor == "right")
    assert (value.text.endswith("they differ"), value.font.color) == (True, theme.ALERT)
    assert "&lt;b&gt;loss" in figure(fold.logs.chart()).layout.annotations[-1].text


def test_the_last_step_of_a_stack_goes_to_the_end_of_the_scale(fold):
    chart = fold.steps.chart()
    for trace, column in zip(figure(chart).data, chart.marks[0].ys, strict=True):
        assert trace.x[-1] == chart.x_range[1] == 21
        assert (trace.y[-1], len(trace.y)) == (column[-1], len(column) + 1)
