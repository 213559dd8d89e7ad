"""What the ranks of one group write for each other to see, and how a collective advances by it.

Every rank owns a control segment that the others read. Collective number k of a group uses slot k modulo
`SLOTS` of it: what the rank calls (in words, held against the others' words), where its data lie, and three
counters: rounds it has staged, reduced and read. A counter holds k in its upper bits, so that it only ever
grows and a slot can serve again. Aligned 8-byte stores become visible whole and in order (x86-64).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from dplab.errors import WireError
from dplab.wire.shm.memory import Cuts, Place, Segment, Window
from dplab.wire.shm.operation import LOCK, Operation, Steps
from dplab.wire.shm.peers import Peer, meet

SLOTS = 64
STAGED, REDUCED, READ = 0, 1, 2
_PLACE, _TEXT = 3, 8
"""Words of a slot: the counters, where data lie (5), the call in words, then bytes to and from every rank."""
_TEXT_BYTES = 256
_SPLITS = _TEXT + _TEXT_BYTES // 8
ENDED = 0xFFFFFF
"""Count of a collective that the rank has nothing to do with any more."""
_LAST_WORDS = 1024
SMALL = 256 << 10
"""Bytes of each of the two halves of the staging area that every control segment has."""
LARGE = 4 << 20
"""As much, of the one that is made when something larger comes."""

LETTERS = 16
"""How many messages to one rank may wait to be received."""
LETTER_WORDS = LETTERS * (8 + 1)



class Stage(NamedTuple):
    """Two halves that take turns, so that a round can be staged while the one before is read."""

    number: int
    mine: Cuts
    half: int
    base: int


class Ticket:
    """This rank's side of one collective: its slot, here and in the peers' control segments."""

    __slots__ = ("at", "channel", "fresh", "number", "stage", "stamp", "text")

    def __init__(self, channel: Channel, number: int, text: bytes) -> None:
        self.channel, self.number, self.text = channel, number, text
        self.at = channel.slot(number)
        self.stamp = number << 24
        self.stage: Stage | None = None
        self.fresh = False

    @property
    def words(self) -> str:
        """The call, for people."""
        return _words(self.text)

    def mark(self, counter: int, count: int) -> None:
        self.channel.words[self.at + counter] = self.stamp + count

    def await_peers(self, counter: int, count: int) -> Steps:
        """Until every peer's counter has come to `count`."""
        at, target = self.at + counter, self.stamp + count
        for rank, words in self.channel.others:
            while words[at] < target:
                yield rank

    def await_calls(self, count: int = 1) -> Steps:
        """Until every peer has come to this collective; raises on every rank if their calls differ."""
        yield from self.await_peers(STAGED, count)
        start = self.at * 8 + _TEXT * 8
        stop, text = start + len(self.text), self.text
        for peer in self.channel.peers:
            if bytes(peer.bytes[start:stop]) != text:
                self._refuse_difference()

    def _refuse_difference(self) -> None:
        calls = {self.channel.rank: self.words}
        for peer in self.channel.peers:
            start = self.at * 8 + _TEXT * 8
            calls[peer.rank] = _words(bytes(peer.bytes[start:start + _TEXT_BYTES]))
        other = next(rank for rank in range(self.channel.size) if calls[rank] != calls[0])
        raise WireError(f"rank 0 calls {calls[0]} where rank {other} calls {calls[other]}: every rank must issue the "
                        f"same collectives in the same order")

    def splits(self, rank: int) -> tuple[list[int], list[int]]:
        """Bytes that a rank sends to each rank, and that it expects from each."""
        words, size = self.channel.words_of(rank), self.channel.size
        start = self.at + _SPLITS
        return words[start:start + size].tolist(), words[start + size:start + 2 * size].tolist()

    def place(self, peer: Peer) -> Place:
        """Where a peer has said that its data lie."""
        serial, fd, nbytes, offset, _ = peer.words[self.at + _PLACE:self.at + _PLACE + 5].tolist()
        return Place(serial, fd, nbytes, offset)

    def ended_by(self, peer: Peer) -> bool:
        """Whether a peer has done its part."""
        return peer.words[self.at + READ] >= self.stamp + ENDED

    def end(self) -> Steps:
        """Nothing of the peers' is read from here on. Those who have never seen this memory are waited for."""
        self.mark(READ, ENDED)
        if self.fresh:
            yield from self.await_peers(READ, ENDED)


class Channel:
    """One group of ranks. Collectives are issued in the same order on all of them."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout.total_seconds()
        self._slot_words = _SPLITS + 2 * size + (-2 * size) % 8
        self._ring = _LAST_WORDS // 8
        letters = self._ring + SLOTS * self._slot_words
        self.letters_at = letters
        self._stage_at = -(-(letters + LETTER_WORDS * size) * 8 // 4096) * 4096
        # read by peers until they too let go of it
        self.control = Segment(self._stage_at + 2 * SMALL, wiped=False)
        self.bytes = self.control.array.data
        self.words = self.bytes.cast("Q")
        self.peers = meet(store, rank, size, self.control.place, timeout)
        self.others = [(peer.rank, peer.words) for peer in self.peers]
        self._words_of = dict(self.others) | {rank: self.words}
        self._small = Stage(0, Cuts(self.control.tensor()[self._stage_at:]), SMALL, self._stage_at)
        self._large: Segment | None = None
        self._large_stage = self._small
        # the peers' large staging areas
        self._windows: dict[int, Window] = {}
        self._count = 0
        self._slots: list[Operation | None] = [None] * SLOTS
        self._last_staged: Operation | None = None
        # by stage and half: the collective and round that last put something there
        self._busy: dict[tuple[int, int], tuple[Ticket, int]] = {}
        self._broken: str | None = None
        self.closed = False

    @property
    def unfinished(self) -> bool:
        """Whether something that was issued is not over, here or for a living peer; takes it further."""
        if self._broken is not None:
            return False
        issued = [each for each in self._slots if each is not None]
        return not all(each.advance() for each in issued) or any(
            not each.ticket.ended_by(peer) and not self.why_gone(peer) for each in issued for peer in self.peers)

    def slot(self, number: int) -> int:
        """Its first word."""
        return self._ring + number % SLOTS * self._slot_words

    def words_of(self, rank: int) -> memoryview[int]:
        return self._words_of[rank]

    def post(self, text: str, *, place: Place | None = None, splits: Sequence[int] = ()) -> Ticket:
        """Takes the next number and writes down what is called; the peers see it at the first `mark`."""
        if self.closed:
            raise WireError(f"{text} on a group that has been destroyed")
        if self._broken is not None:
            raise WireError(self._broken)
        with LOCK:  # of two threads that issue at once, too, each has its own
            number = self._count = self._count + 1
            self._clear(number)
        said = text.encode()[:_TEXT_BYTES - 2]
        ticket = Ticket(self, number, struct.pack("H", len(said)) + said)
        start = (ticket.at + _TEXT) * 8
        self.bytes[start:start + len(ticket.text)] = ticket.text
        if place is not None:
            self._write(ticket.at + _PLACE, (place.serial, place.fd, place.nbytes, place.offset))
        if splits:
            self._write(ticket.at + _SPLITS, splits)
        return ticket

    def begin(self, ticket: Ticket, steps: Steps, *, staged: bool) -> Operation:
        """Starts a collective and takes it as far as it gets without waiting."""
        operation = Operation(self, ticket, steps, self._last_staged if staged else None)
        self._slots[ticket.number % SLOTS] = operation
        if staged:
            self._last_staged = operation
        operation.start()
        return operation

    def stage(self, ticket: Ticket, nbytes: int) -> Stage:
        """The staging area for `nbytes` a round: the same choice on every rank."""
        if nbytes <= SMALL:
            return self._small
        if self._large is None:
            self._large, ticket.fresh = Segment(2 * LARGE, wiped=False), True
            self._large_stage = Stage(1, Cuts(self._large.tensor()), LARGE, 0)
        self._write(ticket.at + _PLACE, (self._large.place.serial, self._large.fd, self._large.nbytes, 0))
        return self._large_stage

    def take_half(self, ticket: Ticket, stage: Stage, turn: int) -> Steps:
        """Until everybody has read what this half holds. `turn` is the round it will hold."""
        key = (stage.number, (ticket.number + turn) % 2)
        held = self._busy.get(key)
        if held is not None:
            yield from held[0].await_peers(READ, held[1])
        self._busy[key] = (ticket, turn + 1)

    def staged_by(self, peer: Peer, ticket: Ticket, stage: Stage) -> tuple[Window, int]:
        """A peer's staging area: the window it lies in, and where it begins."""
        if stage.number == 0:
            return peer.control, stage.base
        window = self._windows.get(peer.rank)
        if window is None:
            window = self._windows[peer.rank] = Window(peer.pid, ticket.place(peer))
        return window, 0

    def fail(self, error: BaseException) -> None:
        """Nothing can be issued here any more; peers that wait for this rank are told why."""
        if self._broken is None:
            self._broken = str(error)
            self._say(f"gave up: {error}")

    def has_spoken(self, peer: Peer) -> bool:
        """Whether a peer has said why it will not come again."""
        return bool(peer.bytes[0] or peer.bytes[1])

    def why_gone(self, peer: Peer) -> str:
        """Why a peer will not come again, as what follows its name; empty while it may."""
        gone = peer.gone
        said = _words(bytes(peer.bytes[:_LAST_WORDS])) if self.has_spoken(peer) else ""
        return said or (f"is gone (process {peer.pid} has ended or was killed)" if gone else "")

    def close(self, why: str = "has left the group: it ended or destroyed its process group while others still wait "
                            "for it; give every rank as many batches (dplab.loader does), or none a step that the "
                            "others do not run") -> None:
        """Leaves the group; unread memory is let go of."""
        if not self.closed:
            self.closed = True
            self._say(why)
            for peer in self.peers:
                peer.close()

    def _say(self, text: str) -> None:
        said = text.encode()[:_LAST_WORDS - 2]
        if not _words(bytes(self.bytes[:_LAST_WORDS])):
            self.bytes[2:2 + len(said)] = said
            self.bytes[:2] = struct.pack("H", len(said))

    def _clear(self, number: int) -> None:
        """Waits until nobody needs the slot's last collective any more."""
        before = self._slots[number % SLOTS]
        if before is None:
            return
        if not before.over:
            before.wait()
        at, target = before.ticket.at + READ, before.ticket.stamp + ENDED
        if any(words[at] < target for _, words in self.others):
            Operation(self, before.ticket, before.ticket.await_peers(READ, ENDED), None).wait()

    def _write(self, at: int, values: Sequence[int]) -> None:
        for index, value in enumerate(values):
            self.words[at + index] = value


def _words(packed: bytes) -> str:
    length = int.from_bytes(packed[:2], "little")
    return packed[2:2 + length].decode(errors="replace")
