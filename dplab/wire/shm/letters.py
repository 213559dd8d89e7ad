"""Messages from one rank to another: each in a segment of its own, so that a sender never waits for its receiver.

A sender announces a letter in its own control segment and keeps it until the receiver has marked it as read,
in the receiver's. Letters with one tag are received in the order in which they were sent.
"""

from __future__ import annotations

from typing import Any

import torch

from dplab.errors import WireError
from dplab.wire.calls import dtype_name
from dplab.wire.shm.channel import LETTER_WORDS, LETTERS, Channel
from dplab.wire.shm.memory import Place, Segment, Window
from dplab.wire.shm.operation import advance_all
from dplab.wire.shm.peers import Patience, Peer

_FIELDS = 8
_DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16,
           torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128]


class Letters:
    """One rank's letters to and from the ranks of its group."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._peers = {peer.rank: peer for peer in channel.peers}
        self._sent: dict[int, int] = {}
        # until the receiver has read it
        self._kept: dict[tuple[int, int], Segment | None] = {}

    def send(self, values: torch.Tensor, to: int, tag: int) -> None:
        """Leaves a copy of `values` for rank `to`; waits only where `LETTERS` lie there unread."""
        peer = self._peer(to)
        number = self._sent.get(to, 0) + 1
        slot = number % LETTERS
        self._wait(peer, lambda: self._read(peer, slot, number - LETTERS), f"send of {_what(values)} to rank {to}")
        self.collect()
        segment = None
        place = Place(0, 0, 0)
        if values.numel():
            segment = Segment(values.numel() * values.element_size())
            segment.tensor().view(values.dtype).copy_(values)
            place = segment.place
        self._sent[to], self._kept[to, number] = number, segment
        at = self._at(to, slot)
        fields = (tag & (1 << 63) - 1, place.fd, place.serial, place.nbytes, values.numel(), _code(values.dtype))
        for index, value in enumerate(fields, start=1):
            self.channel.words[at + index] = value
        self.channel.words[at] = number

    def receive(self, values: torch.Tensor, source: int | None, tag: int, *, wait: bool = True) -> int | None:
        """Fills `values` from the oldest letter with `tag`, from rank `source` or any, and tells from whom.

        None where there is none yet and `wait` is False.
        """
        sources = list(self._peers.values()) if source is None else [self._peer(source)]
        found: list[tuple[Peer, int, int]] = []

        def look() -> bool:
            for peer in sources:
                oldest = self._oldest(peer, tag)
                if oldest is not None:
                    found.append((peer, *oldest))
                    return True
            return False

        if not look():
            if not wait:
                return None
            self._wait(sources[0] if source is not None else None, look,
                       f"recv of {_what(values)} from {'any rank' if source is None else f'rank {source}'}")
        peer, slot, number = found[0]
        self._take(peer, slot, values)
        self.channel.words[self._mark(peer.rank, slot)] = number
        return peer.rank

    def collect(self) -> None:
        """Lets go of letters that have been read."""
        for to, number in list(self._kept):
            if self._read(self._peers[to], number % LETTERS, number):
                del self._kept[to, number]

    @property
    def unread(self) -> bool:
        """Whether a letter of this rank's is still to be read by somebody who can."""
        self.collect()
        return any(not self._peers[to].gone for to, _ in self._kept)

    def _oldest(self, peer: Peer, tag: int) -> tuple[int, int] | None:
        """Slot and number of the oldest unread letter with the tag."""
        mine, size = self.channel.rank, LETTERS * _FIELDS
        at = self.channel.letters_at + mine * LETTER_WORDS
        words = peer.words[at:at + size].tolist()
        unread = []
        for slot in range(LETTERS):
            number, marked = words[slot * _FIELDS], self.channel.words[self._mark(peer.rank, slot)]
            if number > marked and words[slot * _FIELDS + 1] == tag & (1 << 63) - 1:
                unread.append((number, slot))
        if not unread:
            return None
        number, slot = min(unread)
        return slot, number

    def _take(self, peer: Peer, slot: int, values: torch.Tensor) -> None:
        at = self.channel.letters_at + self.channel.rank * LETTER_WORDS + slot * _FIELDS
        fd, serial, nbytes, numel, code = peer.words[at + 2:at + 7].tolist()
        if numel != values.numel() or code != _code(values.dtype):
            raise WireError(f"rank {peer.rank} sent {numel} {dtype_name(_DTYPES[code])} where rank "
                            f"{self.channel.rank} receives {_what(values)}: both must be the same")
        if numel:
            values.copy_(Window(peer.pid, Place(serial, fd, nbytes)).cut(0, numel, values.dtype))

    def _read(self, peer: Peer, slot: int, number: int) -> bool:
        at = self.channel.letters_at + self.channel.rank * LETTER_WORDS + LETTERS * _FIELDS + slot
        return peer.words[at] >= number if number > 0 else True

    def _at(self, to: int, slot: int) -> int:
        return self.channel.letters_at + to * LETTER_WORDS + slot * _FIELDS

    def _mark(self, source: int, slot: int) -> int:
        return self.channel.letters_at + source * LETTER_WORDS + LETTERS * _FIELDS + slot

    def _peer(self, rank: int) -> Peer:
        if rank not in self._peers:
            raise WireError(f"rank {self.channel.rank} cannot send to or receive from rank {rank} in a group of "
                            f"{self.channel.size}: it is itself, or not in the group")
        return self._peers[rank]

    def _wait(self, peer: Peer | None, ready: Any, what: str) -> None:
        patience = Patience()
        while not ready():
            if not patience.pause():
                continue
            advance_all()
            watched = self.channel.peers if peer is None else [peer]
            said = {each: self.channel.why_gone(each) for each in watched}
            if all(said.values()) and not ready():
                first = next(iter(said))
                raise WireError(f"rank {first.rank} {said[first]}; rank {self.channel.rank} waited "
                                f"{patience.waited:.2g} s for it in {what}")
            if patience.waited > self.channel.timeout:
                raise WireError(f"{what} did not end on rank {self.channel.rank} within {self.channel.timeout:g} s")


def _code(dtype: torch.dtype) -> int:
    if dtype not in _DTYPES:
        raise WireError(f"{dtype_name(dtype)} cannot be sent; send its bytes (tensor.view(torch.uint8))")
    return _DTYPES.index(dtype)


def _what(values: torch.Tensor) -> str:
    return f"{values.numel()} {dtype_name(values.dtype)}"
