"""Who failed first, from how the ranks ended."""

from __future__ import annotations

from typing import Any

from dplab.launcher.verdict import RankEnd, decide


def end(rank: int, *, status: int = 0, time: int = 0, wire: bool | None = None, **options: Any) -> RankEnd:
    error = None if wire is None else {"wire": wire}
    return RankEnd(rank=rank, status=status, time=time, error=error, **options)


def told(*ends: RankEnd, stop: bool = False) -> tuple[str, int | None, list[int]]:
    verdict = decide(list(ends), stop_requested=stop, reason=None)
    return verdict["state"], verdict["first"], verdict["collateral"]


def test_all_returned() -> None:
    assert told(end(0, returned=True), end(1, returned=True)) == ("finished", None, [])
    assert told(end(0, returned=True), end(1, returned=True), stop=True) == ("stopped", None, [])


def test_a_lost_peer_is_never_first_beside_another_cause() -> None:
    killed, lost = end(1, status=-9, time=20), end(0, status=1, time=10, wire=True)
    assert told(killed, lost) == ("failed", 1, [0])
    aborted = end(0, status=-6, time=10)  # NCCL's watchdog
    assert told(killed, aborted) == ("failed", 1, [0])
    assert told(lost, end(1, returned=True)) == ("failed", 0, [])


def test_the_earlier_of_two_causes() -> None:
    assert told(end(0, status=1, time=20, wire=False), end(1, status=1, time=10, wire=False)) == ("failed", 1, [0])


def test_whoever_was_told_to_end_is_collateral() -> None:
    assert told(end(0, status=-15, forced=True), end(1, status=1, wire=False)) == ("failed", 1, [0])
    assert told(end(0, status=1, wire=False, forced=True), stop=True) == ("stopped", None, [])


def test_a_peer_lost_while_stopping_is_no_failure() -> None:
    assert told(end(0, returned=True), end(1, status=1, wire=True), stop=True) == ("stopped", None, [])
    assert told(end(0, returned=True), end(1, status=1, wire=False), stop=True) == ("failed", 1, [])


def test_a_rank_that_ends_without_a_result_has_failed() -> None:
    assert told(end(0, status=0)) == ("failed", 0, [])
    assert told(end(0, status=1, returned=True, wire=False)) == ("failed", 0, [])


def test_ranks_in_order_with_their_signals() -> None:
    verdict = decide([end(1, status=-9), end(0, returned=True)], stop_requested=False, reason="why")
    assert verdict["ranks"] == [{"rank": 0, "status": 0, "how": "returned", "signal": None},
                                {"rank": 1, "status": -9, "how": "failed", "signal": "SIGKILL"}]
    assert verdict["reason"] == "why"
