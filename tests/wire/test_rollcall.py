"""Meetings that somebody may miss: values of any size, whoever is missing named, and the next meeting as new."""

from __future__ import annotations

from typing import Any

import pytest

import dplab
from dplab.errors import WireError
from dplab.wire import rollcall
from dplab.wire.rollcall import RollCall
from tests.worlds import in_processes, in_shm, in_threads


def meetings() -> list[Any]:
    world = dplab.init()
    calls, others = RollCall(world, "calls"), RollCall(world, "calls")
    heard = []
    for turn in range(3):
        every = calls.gather((world.rank, turn, "x" * turn * 100), what="a", limit=20)
        heard.append(calls.tell([each[:2] for each in every], what="a", limit=20))
        others.gather(None, what="b", limit=20)
        heard.append(others.tell(turn, what="b", limit=20))
    return heard


@pytest.mark.parametrize(("worlds", "size"), [(in_threads, 1), (in_threads, 4), (in_processes, 2), (in_shm, 2)])
def test_rank_0_hears_all_and_all_hear_rank_0(worlds: Any, size: int) -> None:
    expected = [said for turn in range(3) for said in ([(rank, turn) for rank in range(size)], turn)]
    assert worlds(size, meetings) == [expected] * size


def test_long_values_travel_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollcall, "LONGEST", 100)

    def body() -> int:
        world = dplab.init()
        calls = RollCall(world, "calls")
        every = calls.gather(bytes(range(256)) * 50 + bytes([world.rank]), what="a", limit=20)
        said: list[bytes] = calls.tell(every, what="a", limit=20)
        assert [each[:-1] for each in said] == [bytes(range(256)) * 50] * 3
        return sum(each[-1] for each in said)

    assert in_threads(3, body) == [3, 3, 3]


def test_whoever_is_missing_is_named_and_the_next_meeting_is_as_new() -> None:
    def body() -> str:
        world = dplab.init()
        calls, side = RollCall(world, "calls"), RollCall(world, "side")
        said = ""
        if world.rank == 0:
            with pytest.raises(WireError) as caught:
                calls.gather(None, what="meeting", limit=0.05)
            said = str(caught.value)
        side.gather(None, what="side", limit=20)
        side.tell(None, what="side", limit=20)
        if world.rank == 2:
            calls.gather(2, what="meeting", limit=0.05)
            with pytest.raises(WireError, match=r"rank 0 has not called it within 0.05 s"):
                calls.tell(what="meeting", limit=0.05)
        side.gather(None, what="side", limit=20)
        side.tell(None, what="side", limit=20)
        every = calls.gather(world.rank, what="meeting", limit=20)
        assert calls.tell(every, what="meeting", limit=20) == [0, 1, 2]
        return said

    assert in_threads(3, body)[0] == ("meeting is collective, and ranks [1, 2] have not called it within 0.05 s; call "
                                      "it on every rank at the same step, outside any `if rank == 0`")
