"""Integers of layouts and bucket plans, as properties."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dplab.layout import ALIGN, MIB, FlatLayout, bucket_cap, bucket_plan

shapes = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), min_size=1, max_size=12)


@given(shapes, st.integers(1, 9))
def test_slots_are_aligned_and_shards_cover_them_once(sizes: list[tuple[int, ...]], shards: int) -> None:
    layout = FlatLayout.of([(str(i), shape) for i, shape in enumerate(sizes)], shards)
    assert layout.numel % (shards * ALIGN) == 0
    end = 0
    for slot, shape in zip(layout.slots, sizes, strict=True):
        assert slot.shape == shape
        assert slot.start % ALIGN == 0
        assert slot.start >= end
        end = slot.stop
        covered = []
        for index in range(shards):
            low, _ = layout.shard(index)
            start, stop = layout.owned(slot, index)
            assert 0 <= start <= stop <= layout.shard_numel
            covered += range(low + start, low + stop)
        assert covered == list(range(slot.start, slot.stop))
    assert end <= layout.numel < end + shards * ALIGN + ALIGN


@given(st.lists(st.integers(1, 5 * MIB), min_size=1, max_size=30), st.integers(1, 4 * MIB))
def test_a_plan_takes_every_parameter_once_in_reverse_within_the_cap(nbytes: list[int], cap: int) -> None:
    plan = bucket_plan(nbytes, cap)
    assert [index for bucket in plan for index in bucket] == list(reversed(range(len(nbytes))))
    for bucket in plan:
        assert len(bucket) == 1 or sum(nbytes[index] for index in bucket) <= cap
    assert len(plan[-1]) == 1 or sum(nbytes[index] for index in plan[-1]) <= MIB


def test_the_default_cap() -> None:
    assert bucket_cap(4 * MIB, None) == MIB
    assert bucket_cap(160 * MIB, None) == 10 * MIB
    assert bucket_cap(10_000 * MIB, None) == 25 * MIB
    assert bucket_cap(10_000 * MIB, 0.5) == MIB // 2
