"""Bounded columns: nothing is lost below the bound, extremes and the present survive above it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dplab.views.series import Series


def test_below_the_bound_every_row_is_kept():
    series = Series("x", "y", peak="y", capacity=16)
    for x in range(16):
        series.append(x, x * x)
    assert series.generation == 0
    assert series["y"].tolist() == [x * x for x in range(16)]
    assert series.rows(14).tolist() == [[14, 196], [15, 225]]


@pytest.mark.parametrize("count", [17, 100, 5000])
def test_memory_is_bounded_and_the_newest_rows_are_whole(count):
    series = Series("x", "y", peak="y", capacity=64)
    for x in range(count):
        series.append(x, np.sin(x))
    assert len(series) <= 64
    newest = min(16, count)
    assert series["x"][-newest:].tolist() == list(range(count - newest, count))
    assert (np.diff(series["x"]) > 0).all()


@pytest.mark.parametrize("count", [600, 3000, 30_000, 200_000])
def test_the_past_is_an_outline_from_its_first_row_on(count):
    """A falling loss: no stretch of it is left to a straight line, however long the run."""
    series = Series("x", "y", peak="y", capacity=512)
    for x in range(count):
        series.append(x, 1 / (x + 1))
    gaps = np.diff(np.concatenate([[-1], series["x"]]))
    assert gaps.max() <= max(1, count / 16)
    past = series["x"][: len(series) // 2]
    assert (past < count / 2).sum() >= len(past) / 4


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400))
def test_extremes_survive_every_thinning(values):
    series = Series("x", "y", peak="y", capacity=32)
    for x, y in enumerate(values):
        series.append(x, y)
    assert series["y"].min() == min(values)
    assert series["y"].max() == max(values)
    assert all(values[int(x)] == y for x, y in zip(series["x"], series["y"], strict=True))


def test_a_value_that_is_no_number_stays_on_the_picture():
    series = Series("x", "y", peak="y", capacity=32)
    for x in range(500):
        series.append(x, np.nan if x == 7 else 1.0)
    assert 7 in series["x"]
    assert np.isnan(series["y"][series["x"] == 7]).all()


def test_generation_tells_that_indices_moved():
    series = Series("x", "y", peak="y", capacity=32)
    for x in range(32):
        series.append(x, x)
    before = series.generation
    series.append(32, 32)
    assert series.generation == before + 1
