"""Boxes against a tensor that is really cut; covers with a gap, an overlap, a part outside; words for differences."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dplab.checkpoint.manifest import boxes, check_cover, differences
from dplab.errors import CheckpointError

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(shapes, st.data())
def test_boxes_are_the_stretch_and_few(shape, data):
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel - 1))
    stop = data.draw(st.integers(start + 1, numel))
    tensor = torch.arange(numel).view(shape)
    made = list(boxes(shape, start, stop))
    assert len(made) <= max(1, 2 * len(shape) - 1)
    values = []
    for box in made:
        assert box.at == len(values)
        part = tensor[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
        values += part.flatten().tolist()
    assert values == list(range(start, stop))


@given(shapes, st.data())
def test_a_cut_tensor_is_covered_and_not_with_a_part_taken_away_or_twice(shape, data):
    numel = math.prod(shape)
    cuts = sorted({0, numel, *data.draw(st.lists(st.integers(0, numel), max_size=4))})
    parts = [(box.offsets, box.sizes) for low, high in itertools.pairwise(cuts)
             for box in boxes(shape, low, high)]
    check_cover("w", shape, parts)
    with pytest.raises(CheckpointError, match="elements, and its parts hold"):
        check_cover("w", shape, parts[1:])
    with pytest.raises(CheckpointError, match="elements, and its parts hold"):
        check_cover("w", shape, [*parts, parts[0]])


def test_an_empty_tensor_has_one_empty_part():
    assert [(box.offsets, box.sizes) for box in boxes((3, 0), 0, 0)] == [((0, 0), (3, 0))]
    check_cover("w", (3, 0), [((0, 0), (3, 0))])


@pytest.mark.parametrize(("shape", "chunks", "words"), [
    ((4,), [((0,), (2,)), ((1,), (2,))], r"tensor 'w' has parts at \(0,\) and \(1,\) that overlap"),
    ((4, 4), [((0, 0), (2, 4)), ((1, 0), (2, 4))], "that overlap"),
    ((4,), [((2,), (3,))], r"a part of \(3,\) at \(2,\), which lies outside"),
    ((4,), [((0, 0), (2, 2))], "lies outside"),
    ((4,), [((-1,), (4,))], "lies outside"),
    ((-4,), [], r"shape \(-4,\), which no tensor has"),
    ((2**40, 2**40), [], "which no tensor has"),
    ((4,), [], "has 4 elements, and its parts hold 0"),
    ((), [((), ()), ((), ())], "its parts hold 2"),
])
def test_what_does_not_cover_is_said(shape, chunks, words):
    with pytest.raises(CheckpointError, match=words):
        check_cover("w", shape, chunks)


def test_differences_name_shapes_missing_and_extra_and_not_more_than_a_few():
    said = "; ".join(differences({"a": (2,), "b": (3, 4), "c": ()}, {"a": (3,), "d": (1,), "c": None}))
    assert said == ("'a' has shape (3,) in the checkpoint and (2,) in the model, 'c' has shape none (it is no tensor) "
                    "in the checkpoint and () in the model; missing in the checkpoint: 'b' (3, 4); not in the model: "
                    "'d' (1,)")
    assert "and 2 more" in differences({str(i): (1,) for i in range(6)}, {})[0]
