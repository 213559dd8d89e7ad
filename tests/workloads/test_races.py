"""The race hunt finds nothing, and finds a race where there is one."""

from __future__ import annotations

import pytest

from dplab.errors import DplabError, UsageError
from dplab.specs import SHARDINGS
from dplab.wire import late
from dplab.workloads.races import hunt


@pytest.mark.parametrize("suffix", ["", "+accum2", "+accum2+accumulate_mode=window", "+bf16+bucket_mb=0.001"])
@pytest.mark.parametrize("name", SHARDINGS)
def test_no_timing_changes_a_bit(name: str, suffix: str) -> None:
    races = list(hunt([name + suffix], seeds=2))
    assert [race.parameter for race in races] == [None, None]
    assert [race.seed for race in races] == [0, 1]


@pytest.mark.parametrize("name", [
    "ddp+wire=int8-ef+bucket_mb=1e-05", "zero1+wire=powersgd2+bucket_mb=1e-05", "zero3+wire=int8",
    "ddp+hybrid+topology=2x2@100GB/s+bucket_mb=1e-05", "zero3+hybrid+topology=2x2@100GB/s",
    "zero2+hybrid+topology=2x2@100GB/s+wire=int8+bucket_mb=1e-05"])
def test_no_timing_changes_a_bit_where_collectives_follow_each_other(name: str) -> None:
    assert [race.parameter for race in hunt([name], seeds=1, world_size=4, steps=3)] == [None]


@pytest.mark.parametrize("name", ["ddp", "zero2"])
def test_a_wait_that_is_forgotten_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late._LateWork, "wait", lambda self: None)

    def hunted() -> None:
        for race in hunt([name], seeds=3):
            assert race.parameter is None, "a race"

    # ranks that drift apart may also be caught by a check of their own
    with pytest.raises((AssertionError, DplabError), match=r"a race|differs|left"):
        hunted()


def test_a_hunt_needs_numbers() -> None:
    with pytest.raises(UsageError, match=r"hunt\(seeds=0, world_size=3, steps=4\): each is an integer >= 1"):
        list(hunt(seeds=0))
