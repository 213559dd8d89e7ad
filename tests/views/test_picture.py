"""A picture is an SVG where one can be shown, and words everywhere else."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from dplab.views.figures import comparison
from dplab.views.picture import Picture, picture
from dplab.views.words import percent, short
from tests.views.synthetic import run_events


def test_the_words_of_a_comparison_are_its_numbers():
    drawn = picture(comparison({"ddp": run_events(2, 5), "zero2": run_events(2, 5)}), title="two runs")
    bundle = drawn._repr_mimebundle_()
    assert bundle["text/plain"] == str(drawn) == (
        "two runs\n"
        "Step time: ddp 100, zero2 100 ms (medians of all steps, all ranks)\n"
        "Memory of rank 0: ddp 47, zero2 47 MB (as the last step left it)")
    assert ElementTree.fromstring(bundle["image/svg+xml"]).tag.endswith("svg")


def test_a_comparison_says_over_which_steps_it_goes():
    assert comparison({"long": run_events(1, 51), "short": run_events(1, 5)})[0].caption == (
        "medians of the last 50 steps, all ranks")


def test_a_comparison_of_nothing_is_a_picture_too():
    ElementTree.fromstring(picture(comparison({"none": []})).svg)


def test_any_svg_can_be_told_in_words():
    assert Picture("<svg/>", "nothing")._repr_mimebundle_() == {"image/svg+xml": "<svg/>", "text/plain": "nothing"}


def test_numbers_have_three_digits_and_what_is_unknown_is_a_dash():
    said = [short(value) for value in (0, 1.234, 97.46, 123.4, 1234.4, 18480.2, 1e-3, None, float("nan"))]
    assert said == ["0", "1.23", "97.5", "123", "1,234", "18,480", "0.001", "–", "–"]
    assert [short(2.71828, 4), short(1234567.8, 6)] == ["2.718", "1,234,568"]
    assert [percent(0.625), percent(1.0), percent(None)] == ["62 %", "100 %", "–"]
