"""Plotly figures hold the charts' own columns, and little else."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
import pytest

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


def test_figures_are_small(fold):
    for chart in fold.charts():
        assert len(figure(chart).to_json()) < 20_000
