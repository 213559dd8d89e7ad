"""The still picture: well-formed, complete, small, readable without colours."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import numpy as np
import pytest

from dplab.views import theme
from dplab.views.figures import comparison
from dplab.views.fold import Fold
from dplab.views.records import Chart, Head, Line, StackedArea
from dplab.views.studies import against
from dplab.views.svg import WIDTH, svg
from tests.views.synthetic import run_events

NAMESPACE = "{http://www.w3.org/2000/svg}"


def area_paths(root):
    """Paths of the stacked areas, without their hatches."""
    return [path.get("d") for path in root.iter(f"{NAMESPACE}path") if (path.get("fill") or "").startswith("#")]


def corners(path):
    """Corners of an outline of `M`, `V` and `H`."""
    found = []
    for letter, numbers in re.findall(r"([MVH])([-0-9. ]+)", path):
        values = [float(number) for number in numbers.split()]
        x, y = values if letter == "M" else (found[-1][0], values[0]) if letter == "V" else (values[0], found[-1][1])
        found.append((x, y))
    return found


def drawn(steps=20, world_size=2):
    fold = Fold(world_size)
    fold.feed(run_events(world_size, steps))
    return svg(fold.grid(), title="a run <of> two & more")


def test_it_is_well_formed_and_says_itself_in_words():
    root = ElementTree.fromstring(drawn())
    assert root.tag == f"{NAMESPACE}svg"
    assert root.get("role") == "img"
    assert "a run <of> two & more" in root.get("aria-label")
    assert "overlap 73 %" in root.get("aria-label")
    texts = "".join(root.itertext())
    for title in ("Loss", "Step time, rank 0", "Gradient synchronisation, step 20", "Memory, rank 0"):
        assert title in texts


def test_every_bar_of_the_timeline_is_a_rectangle_at_its_place():
    fold = Fold(2)
    fold.feed(run_events(2, 3))
    chart = fold.sync.chart()
    root = ElementTree.fromstring(svg([chart], columns=1))
    plain = [rect for rect in root.iter(f"{NAMESPACE}rect") if rect.get("fill") != "url(#hatch)"]
    assert len(plain) == len(chart.marks[0].lane)
    starts = np.array([float(rect.get("x")) for rect in plain])
    widths = np.array([float(rect.get("width")) for rect in plain])
    scale = (starts.max() - starts.min()) / np.ptp(chart.marks[0].start)
    np.testing.assert_allclose(widths, (chart.marks[0].end - chart.marks[0].start) * scale, atol=0.2)


def test_exposed_time_is_hatched_besides_its_colour():
    assert "exposed" in theme.HATCHED
    fold = Fold(1)
    fold.feed(run_events(1, 1))
    root = ElementTree.fromstring(svg([fold.sync.chart()], columns=1))
    hatched = [rect for rect in root.iter(f"{NAMESPACE}rect") if rect.get("fill") == "url(#hatch)"]
    assert len(hatched) == 2
    told = [title.text for title in root.iter(f"{NAMESPACE}title")]
    assert told == list(fold.sync.chart().marks[0].texts)      # once each


@pytest.mark.parametrize("steps", [0, 1, 2, 5000])
def test_any_length_of_run_can_be_drawn_and_is_small(steps):
    text = drawn(steps)
    ElementTree.fromstring(text)
    assert "nan" not in text.lower()
    assert len(text) < 100_000


def test_a_flat_line_and_one_that_is_no_number_can_be_drawn():
    x = np.arange(5.0)
    flat = Line(role="loss", x=x, y=np.full(5, 3.0))
    broken = Line(role="loss_smooth", x=x, y=np.array([1, np.nan, np.inf, 2, 1.0]))
    text = svg([Chart(key="loss", title="t", x_label="", y_label="", marks=(flat, broken))])
    ElementTree.fromstring(text)
    assert "nan" not in text
    assert "inf" not in text


def test_areas_stay_below_the_top_of_a_robust_scale():
    area = StackedArea(roles=("compute",), x=np.arange(3.0), ys=np.array([[1000.0, 10, 10]]))
    root = ElementTree.fromstring(svg([Chart(key="steps", title="t", x_label="", y_label="", marks=(area,),
                                             y_range=(0, 20))]))
    assert min(ys for _, ys in corners(area_paths(root)[0])) >= 44


def test_areas_are_stairs_that_end_with_the_scale():
    """Every value holds until the next x, equal neighbours are one step: as the live board draws it."""
    ys = np.array([[4.0, 4, 8, 8], [2, 2, 2, 4]])
    area = StackedArea(roles=("params", "grads"), x=np.array([0.0, 1, 2, 3]), ys=ys)
    chart = Chart(key="memory", title="t", x_label="", y_label="", marks=(area,), x_range=(0, 5), y_range=(0, 12))
    lower, upper = (corners(path) for path in area_paths(ElementTree.fromstring(svg([chart], columns=1))))
    left, bottom = lower[0]
    right, top = max(x for x, _ in lower), min(y for _, y in upper)

    def values(points):
        return [((x - left) / (right - left) * 5, (bottom - y) / (bottom - top) * 12) for x, y in points]

    np.testing.assert_allclose(values(lower), [(0, 0), (0, 4), (2, 4), (2, 8), (5, 8), (5, 0), (0, 0)], atol=0.05)
    np.testing.assert_allclose(values(upper), [(0, 4), (0, 6), (2, 6), (2, 10), (3, 10), (3, 12), (5, 12),
                                               (5, 8), (2, 8), (2, 4), (0, 4)], atol=0.05)


def test_comparison_stacks_one_bar_a_run():
    times, memory = comparison({"ddp": run_events(2, 5), "zero2": run_events(2, 5)})
    (bars,) = times.marks
    np.testing.assert_allclose(bars.values, [[30, 30], [33, 33], [15, 15], [16, 16], [6, 6]])
    assert memory.marks[0].names == ("ddp", "zero2")
    texts = "".join(ElementTree.fromstring(svg([times, memory])).itertext())
    assert "zero2" in texts
    assert "47" in texts


def test_colours_tell_neighbours_in_the_memory_stack_apart_without_hue():
    def lightness(role):
        red, green, blue = (int(theme.color(role)[at:at + 2], 16) / 255 for at in (1, 3, 5))
        return 0.2126 * red ** 2.2 + 0.7152 * green ** 2.2 + 0.0722 * blue ** 2.2

    always_there = ("params", "grads", "optimizer")
    for below, above in itertools.pairwise(always_there):
        low, high = sorted((lightness(below), lightness(above)))
        assert (high + 0.05) / (low + 0.05) > 1.2


def test_no_text_is_smaller_than_eleven_pixels():
    fold = Fold(2)
    fold.feed(run_events(2, 10))
    text = svg(fold.grid(), head=Head(state="running", facts=(("steps", "10"),), problem="a problem"))
    assert {float(size) >= 11 for size in re.findall(r"font-size='([\d.]+)'", text)} == {True}


def test_every_legend_fits_beside_its_neighbour():
    """By the width of a wide font's letters (7 px of 11), the mark and the gap before each entry: also where every
    number has as many digits as it may."""
    fold = Fold(2)
    fold.feed(run_events(2, 10))
    charts = [*fold.charts(), *(replace(chart, legend=tuple((role, f"{text} 0.123") for role, text in chart.legend))
                                for chart in fold.charts() if chart.legend)]
    wide = 0
    for chart in charts:
        said = [(float(text.get("x")), float(text.get("y")), "".join(text.itertext()))
                for text in ElementTree.fromstring(svg([chart], columns=1)).iter(f"{NAMESPACE}text")
                if "■" in "".join(text.itertext()) or "▨" in "".join(text.itertext())]
        entries = [entry.strip() for _, _, line in said for entry in re.split("[■▨]", line)[1:]]
        assert entries == [text for _, text in chart.legend] or not chart.legend
        for x, _, line in said:
            assert x - 8 + sum(7 * len(entry.strip()) + 14 for entry in re.split("[■▨]", line)[1:]) < WIDTH, chart.title
        wide += len(said) > 1
    assert wide >= 2


def test_steps_and_ranks_are_counted_in_whole_ones():
    fold = Fold(2)
    fold.feed(run_events(2, 3))
    loss = ElementTree.fromstring(svg([fold.loss.chart()], columns=1))
    assert [text.text for text in loss.iter(f"{NAMESPACE}text") if text.get("text-anchor") == "middle"] == [
        "1", "2"]                                    # the unit stands at the third
    ranks = against([1, 2, 3, 4], [1.0, 1.9, 2.2, 2.1], [1.0, 1.8, 2.1, 2.0], x_label="ranks", y_label="x", title="t")
    assert [text.text for text in ElementTree.fromstring(svg([ranks], columns=1)).iter(f"{NAMESPACE}text")
            if text.get("text-anchor") == "middle"] == ["1", "2", "3"]
