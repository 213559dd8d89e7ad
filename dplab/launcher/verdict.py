"""How a run ended, from how each of its ranks did. Pure: the supervisor gathers, this decides."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """One rank's end. `time` in monotonic ns: of its exception, or of the moment at which it was found dead."""

    rank: int
    status: int
    """exit status, or minus the number of the signal that killed it"""
    time: int
    returned: bool = False
    """its function returned and its result lies on disk"""
    error: dict[str, Any] | None = None
    """its error.json"""
    forced: bool = False
    """the supervisor had told it to end by then"""

    hurried: bool = False
    """it hung on its way out, its result or error on disk, and was killed for that"""

    @property
    def failed(self) -> bool:
        """It ended, unforced, without a result."""
        left_well = self.returned and self.error is None and (self.status == 0 or self.hurried)
        return not self.forced and not left_well

    @property
    def died(self) -> bool:
        """It failed without a word of its own: killed from outside, or by a library."""
        return self.failed and self.error is None and not self.tells_of_a_peer

    @property
    def tells_of_a_peer(self) -> bool:
        """Its failure is what a lost peer looks like: an error of the wire, or NCCL's watchdog aborting."""
        return self.status == -signal.SIGABRT if self.error is None else bool(self.error["wire"])

    def to_dict(self) -> dict[str, Any]:
        """As it stands in exit.json."""
        how = "returned" if not self.failed and self.returned else "stopped" if self.forced else "failed"
        return {"rank": self.rank, "status": self.status, "how": how,
                "signal": signal.Signals(-self.status).name if self.status < 0 else None}


def decide(ends: list[RankEnd], *, stop_requested: bool, reason: str | None) -> dict[str, Any]:
    """What exit.json says: `state`, `first` failing rank or None, `collateral` ranks, `reason`, `ranks`.

    The first failure is the earliest that does not tell of a peer: a rank killed by a signal is found dead only
    after its peers have noticed, so time alone would blame them. Once a stop is asked for, a lost peer is no
    failure.
    """
    failures = [end for end in ends if end.failed and not (stop_requested and end.tells_of_a_peer)]
    failures.sort(key=lambda end: (end.tells_of_a_peer, end.time))
    first = failures[0].rank if failures else None
    collateral = [] if first is None else sorted(
        end.rank for end in ends if end.rank != first and (end.failed or end.forced))
    state = "failed" if failures else "stopped" if stop_requested else "finished"
    return {"state": state, "first": first, "collateral": collateral, "reason": reason,
            "ranks": [end.to_dict() for end in sorted(ends, key=lambda end: end.rank)]}
