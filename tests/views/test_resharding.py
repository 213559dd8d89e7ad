"""Who reads whose bytes, by hand."""

from __future__ import annotations

import pytest

from dplab.errors import UsageError
from dplab.views.picture import picture
from dplab.views.resharding import resharding

TENSORS = [("a", (128, 12)), ("b", (128, 12))]
"""3,072 elements, which 2, 3 and 4 ranks cut without padding."""


def lanes(chart):
    (mark,) = chart.marks
    return [(mark.names[int(lane)], mark.roles[int(kind)], round(start * 1e6 / 4), round(end * 1e6 / 4))
            for lane, start, end, kind in zip(mark.lane, mark.start, mark.end, mark.kind, strict=True)]


def test_two_ranks_read_what_three_wrote():
    chart = resharding(TENSORS, 3, 2)
    assert lanes(chart) == [
        ("wrote 0", "full", 0, 1024), ("wrote 1", "owned", 1024, 2048), ("wrote 2", "partial", 2048, 3072),
        ("reads 0", "full", 0, 1024), ("reads 0", "owned", 1024, 1536),
        ("reads 1", "owned", 1536, 2048), ("reads 1", "partial", 2048, 3072)]
    assert chart.note == "3 ranks wrote 0.01 MB, 2 read them in 4 pieces; 50% of the bytes change hands"
    assert chart.marks[0].texts[4] == "rank 0 reads 0.00 MB that rank 1 wrote"
    assert "of rank 2" in picture([chart]).svg


def test_as_many_ranks_read_their_own():
    assert resharding(TENSORS, 4, 4).value == "0% change hands"
    assert resharding(TENSORS, 1, 4).note.startswith("1 ranks wrote 0.01 MB, 4 read them in 4 pieces; 75%")


def test_padding_belongs_to_nobody():
    chart = resharding([("a", (130,))], 2, 1)
    assert lanes(chart)[-1][3] == 130


@pytest.mark.parametrize(("arguments", "message"), [
    ((TENSORS, 0, 2), r"resharding\(writers=0\) is not allowed; writers is a number of ranks >= 1"),
    ((TENSORS, 2, True), r"resharding\(readers=True\) is not allowed"), (([], 2, 2), "got no tensors")])
def test_bad_input_is_one_sentence(arguments, message):
    with pytest.raises(UsageError, match=message):
        resharding(*arguments)
