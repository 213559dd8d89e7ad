"""A collective under way: a generator that yields wherever it must wait for a peer, and goes on when asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from typing import TYPE_CHECKING

from dplab.errors import WireError
from dplab.telemetry.recorder import now
from dplab.wire.shm.peers import Patience

if TYPE_CHECKING:
    from dplab.wire.shm.channel import Channel, Ticket

Steps = Generator[int, None, None]
"""A collective that yields the rank it waits for, until it is over."""

LOCK = threading.RLock()
"""Held while anything advances: a program may use its groups from several threads."""
_under_way: set[Operation] = set()
_PERIOD = 2e-3
"""Seconds between two looks of the helper: whoever waits for something looks himself."""
_helper: threading.Thread | None = None


def advance_all() -> None:
    """Takes everything that this process has under way as far as it gets: a peer may wait for it."""
    with LOCK:
        for operation in list(_under_way):
            operation.advance()


def help_along() -> None:
    """Has a thread of its own go on with what is under way, for as long as something is."""
    global _helper
    with LOCK:
        if _helper is None or not _helper.is_alive():
            _helper = threading.Thread(target=_help, name="dplab-shm", daemon=True)
            _helper.start()


def _help() -> None:
    global _helper
    while True:
        time.sleep(_PERIOD)
        with LOCK:
            advance_all()
            if not _under_way:
                _helper = None
                return


class Operation:
    """A collective under way; its own `Work`. Waiting for it advances it, and whatever else it may need."""

    def __init__(self, channel: Channel, ticket: Ticket, steps: Steps, after: Operation | None) -> None:
        self.channel, self.ticket = channel, ticket
        self._steps, self._after = steps, after
        self._waits_for = -1
        self.over = False
        self.error: BaseException | None = None
        self.done_at: int | None = None

    def start(self) -> None:
        """Takes it as far as it gets without waiting."""
        with LOCK:
            if not self.advance():
                _under_way.add(self)

    def advance(self) -> bool:
        """Goes on as far as it can; True once it is over, well or not."""
        if self.over:
            return True
        with LOCK:
            if self.over:  # by another thread, while this one waited for the lock
                return True
            if self._after is not None:
                if not self._after.advance():
                    return False
                if self._after.error is not None:
                    self._end(self._after.error)
                    return True
                self._after = None
            try:
                self._waits_for = next(self._steps)
                return False
            except StopIteration:
                self.done_at = now()
                self._end()
            except BaseException as error:
                self._end(error)
                if not isinstance(error, Exception):
                    raise
            return True

    def wait(self, limit: float | None = None) -> None:
        """Returns when the result is in place; raises WireError, naming rank and call, if it never will be.

        `limit`: seconds, instead of the group's timeout.
        """
        if not self.advance():
            patience = Patience()
            while not self.advance():
                slept = patience.pause()
                if len(_under_way) > 1:
                    # there is work to do meanwhile; and another may be what a peer waits for before it comes to this
                    advance_all()
                if slept:
                    self._look_around(patience.waited, limit or self.channel.timeout)
        if isinstance(self.error, WireError):
            raise WireError(str(self.error))
        if self.error is not None:
            raise self.error

    def _look_around(self, waited: float, limit: float) -> None:
        """It takes long: a peer may be gone, or late."""
        with LOCK:
            if self.advance():
                return
            self._look_after_peers(waited)
            if not self.over and waited > limit:
                late = next(peer for peer in self.channel.peers if peer.rank == self._first()._waits_for)
                self._give_up(f"rank {late.rank} (process {late.pid}, alive) did not come to {self.ticket.words} "
                              f"within {limit:g} s of rank {self.channel.rank}")

    def _look_after_peers(self, waited: float) -> None:
        missing = [peer for peer in self.channel.peers if not self.ticket.ended_by(peer)]
        # who was killed comes before those who gave up because of it
        for peer in sorted(missing, key=self.channel.has_spoken):
            why = self.channel.why_gone(peer)
            # what it did before it went may be all that was needed
            if why and not self.advance():
                self._give_up(f"rank {peer.rank} {why}; rank {self.channel.rank} waited {waited:.2g} s for it in "
                              f"{self.ticket.words}")

    def _first(self) -> Operation:
        """The one that has to be over first."""
        return self if self._after is None else self._after._first()

    def _give_up(self, why: str) -> None:
        self._end(WireError(why))
        self._steps.close()

    def _end(self, error: BaseException | None = None) -> None:
        _under_way.discard(self)
        if error is not None:
            self.error = error
            self.channel.fail(error)
        # last: another thread that sees it looks for the error next, and holds no lock
        self.over = True
