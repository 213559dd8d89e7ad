"""A study's chart: two lines, and the same in words."""

from __future__ import annotations

import pytest

from dplab.errors import UsageError
from dplab.views.picture import picture
from dplab.views.studies import against, stacked


def test_two_lines_and_their_words():
    chart = against([1, 4], [100, 80], [110, 79], title="Buckets", x_label="MiB a bucket", y_label="ms a step")
    assert [(mark.role, list(mark.x), list(mark.y)) for mark in chart.marks] == [
        ("predicted", [1, 4], [100, 80]), ("measured", [1, 4], [110, 79])]
    assert chart.y_range == (0, pytest.approx(121))
    assert chart.note == "ms a step by MiB a bucket: 1: 100 predicted, 110 measured; 4: 80 predicted, 79 measured"
    drawn = picture([chart])
    assert "predicted" in drawn.svg
    assert "measured" in drawn.svg


def test_lines_may_be_called_otherwise():
    chart = against([1], [2], [3], title="", x_label="step", y_label="loss", labels=("alone", "two ranks"))
    assert [mark.label for mark in chart.marks] == ["alone", "two ranks"]
    assert chart.note == "loss by step: 1: 2 alone, 3 two ranks"
    assert "two ranks" in picture([chart]).svg


def test_columns_of_other_lengths_are_refused():
    with pytest.raises(UsageError, match=r"got 2 values of x, 1 predicted and 2 measured; give as many of each"):
        against([1, 2], [1], [1, 2], title="", x_label="", y_label="")


def test_bars_of_parts_by_role():
    chart = stacked({"ddp": {"params": 2.0, "grads": 1.0}, "zero3": {"params": 0.5, "gathered": 0.25}}, title="Held",
                    unit="MB")
    (bars,) = chart.marks
    assert bars.roles == ("params", "grads", "gathered")
    assert bars.values.tolist() == [[2.0, 0.5], [1.0, 0.0], [0.0, 0.25]]
    assert chart.note == "ddp 3, zero3 0.75 MB"
    with pytest.raises(UsageError, match=r"got a part 'weights'; a part is one of loss, "):
        stacked({"ddp": {"weights": 1.0}}, title="", unit="")
