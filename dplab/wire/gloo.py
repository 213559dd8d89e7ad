"""gloo: messages between pairs of ranks, and sums in rank order.

gloo's reduce-scatter sends as much as its all-reduce and is two to four times slower, the ring of its all-reduce adds
in another order on every segment, and two of its collectives of different sizes that meet abort the process from C++.
Here every call goes with a message that says what it is, and its data carry a tag made of the same words: calls that
differ never meet, and every rank names both. gloo's own broadcast begins once the ranks have agreed that it is one.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from dplab.errors import WireError
from dplab.telemetry.recorder import now
from dplab.wire.calls import labelled, words
from dplab.wire.collectives import Op, Work, reduced

PATIENCE = 2
"""Nudges (launches of further buckets) after which what a call has received is added up and given back."""

_WORDS, _LENGTH = 25712, 256
"""Tag and bytes of the messages that say what a call is; longer words are cut, and their checksum is of all."""


class Message(NamedTuple):
    """One message under way, to or from `rank` of the group."""

    rank: int
    work: Any


Steps = Iterator[list[Message]]
"""Messages that are to be waited for, as they are sent; between them, work on what has come."""


@dataclass(frozen=True)
class Call:
    """The `number`-th collective of a rank in its group, in words."""

    number: int
    words: str

    def tag(self, part: int) -> int:
        """Of the messages of one part of it: 31 bits, as gloo takes them."""
        return zlib.crc32(f"{self.number} {part} {self.words}".encode()) & 0x7FFFFFFF

    def encoded(self) -> torch.Tensor:
        """As the peers get it: a checksum of the words, and as much of them as there is room for."""
        text = self.words.encode()
        data = zlib.crc32(text).to_bytes(4, "little") + text[:_LENGTH - 4]
        return torch.frombuffer(bytearray(data.ljust(_LENGTH, b"\0")), dtype=torch.uint8)


class GlooWork:
    """A call under way."""

    def __init__(self, call: Call, steps: Steps) -> None:
        self._call, self._steps, self._nudges = call, steps, 0
        self._under_way: list[Message] | None = None
        self._go_on()
        self.done_at: int | None = None     # gloo tells of no message before it is waited for

    def nudge(self) -> None:
        """The program goes on: what was sent with the call is due, and what it was received into can go."""
        self._nudges += 1
        if self._nudges == PATIENCE:
            self._advance()     # the words
            self._advance()     # the data that came with them

    def wait(self) -> None:
        """Returns when the result is in place."""
        while self._under_way is not None:
            self._advance()

    def _advance(self) -> None:
        messages, self._under_way = self._under_way or [], None      # if it fails, nothing follows
        for message in messages:
            try:
                message.work.wait()
            except RuntimeError as error:
                raise WireError(f"{self._call.words} did not end: rank {message.rank} left it or did not come to it in "
                                f"time, or the link broke ({error})") from error
        self.done_at = now()
        self._go_on()

    def _go_on(self) -> None:
        try:
            self._under_way = next(self._steps, None)
        except WireError:
            raise
        except RuntimeError as error:   # of gloo, which sends nothing to a rank that has left
            raise WireError(f"{self._call.words} did not end: ranks have left, or the link broke ({error})") from error


@dataclass
class _Past:
    """What a group has been through. `unmet`: messages that no rank will take; gloo moves nothing more between two
    ranks where such a message is dropped before its group is."""

    calls: int = 0
    unmet: list[list[Message]] = field(default_factory=list)


_pasts: WeakKeyDictionary[dist.ProcessGroup, _Past] = WeakKeyDictionary()


class GlooTransport:
    """Textbook volumes on gloo. Tensors of a GPU travel through host copies: gloo moves host memory only."""

    modelled = frozenset({"broadcast"})

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.label = group, ""
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._past = _pasts.setdefault(group, _Past())

    def all_reduce(self, flat: torch.Tensor, op: Op) -> Work:
        host, call = flat.cpu(), self._call(f"all_reduce({op})", flat)
        steps = self._swap(call, host, op) if self.size == 2 else self._reduce_and_gather(call, host, op)
        return self._begin(call, steps, _copy_back(host, flat))

    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor) -> Work:
        call = self._call("reduce_scatter", flat)
        return self._begin(call, self._reduce(call, self._cut(flat.cpu()), out, "sum"))

    def all_gather(self, flat: torch.Tensor) -> Work:
        host, call = flat.cpu(), self._call("all_gather", flat)
        return self._begin(call, self._gather(call, self._cut(host)), _copy_back(host, flat))

    def all_to_all(self, flat: torch.Tensor, out: torch.Tensor) -> Work:
        host, call = out.cpu(), self._call("all_to_all", flat)
        give, take = self._cut(flat.cpu()), self._cut(host)
        take[self.rank].copy_(give[self.rank])
        return self._begin(call, self._trade(call, give, take), _copy_back(host, out))

    def broadcast(self, flat: torch.Tensor, source: int) -> Work:
        host, call = flat.cpu(), self._call(f"broadcast(source={source})", flat)
        self._meet(call)
        work = dist.broadcast(host, group_src=source, group=self.group, async_op=True)
        return GlooWork(call, _followed(iter([[Message(source, work)]]), _copy_back(host, flat)))

    def gather_objects(self, value: Any) -> list[Any]:
        self._meet(Call(self._next(), labelled("gather_objects", self.label)))
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def _call(self, name: str, flat: torch.Tensor) -> Call:
        return Call(self._next(), words(name, flat, self.label))

    def _next(self) -> int:
        self._past.calls += 1
        return self._past.calls

    def _meet(self, call: Call) -> None:
        """Returns once all ranks have said that it is their call."""
        self._begin(call, iter([[]])).wait()

    def _begin(self, call: Call, steps: Steps, finish: Callable[[], object] | None = None) -> GlooWork:
        return GlooWork(call, _followed(self._agreed(call, steps), finish))

    def _agreed(self, call: Call, steps: Steps) -> Steps:
        """`steps`, the first of which is sent at once, and looked at when all ranks have said that it is their call."""
        mine = call.encoded()
        theirs = [torch.empty_like(mine) for _ in range(self.size)]
        told = self._exchange(_WORDS, [mine] * self.size, theirs)
        first = next(steps)
        yield told
        for rank in self._others():
            if not torch.equal(theirs[rank], mine):
                self._past.unmet.append(first)
                there = bytes(theirs[rank].tolist())[4:].rstrip(b"\0").decode(errors="replace")
                raise WireError(f"rank {self._name(self.rank)} calls {call.words} where rank {self._name(rank)} calls "
                                f"{there}: every rank must issue the same collectives in the same order")
        yield first
        yield from steps

    def _swap(self, call: Call, flat: torch.Tensor, op: Op) -> Steps:
        """Between two ranks, each other's whole tensor is what an all-reduce sends at least."""
        theirs = torch.empty_like(flat)
        yield self._exchange(call.tag(0), [flat] * 2, [theirs] * 2)
        flat.copy_(reduced([theirs, flat], op))

    def _reduce_and_gather(self, call: Call, flat: torch.Tensor, op: Op) -> Steps:
        segments = self._cut(flat)
        yield from self._reduce(call, segments, segments[self.rank], op)
        yield from self._gather(call, segments, part=1)

    def _reduce(self, call: Call, segments: list[torch.Tensor], out: torch.Tensor, op: Op) -> Steps:
        """`out` ends as the sum of every rank's own segment, in rank order."""
        own = segments[self.rank]
        received = [own if rank == self.rank else torch.empty_like(own) for rank in range(self.size)]
        yield self._exchange(call.tag(0), segments, received)
        out.copy_(reduced(received, op))

    def _gather(self, call: Call, segments: list[torch.Tensor], part: int = 0) -> Steps:
        yield self._exchange(call.tag(part), [segments[self.rank]] * self.size, segments)

    def _trade(self, call: Call, give: list[torch.Tensor], take: list[torch.Tensor]) -> Steps:
        yield self._exchange(call.tag(0), give, take)

    def _exchange(self, tag: int, give: list[torch.Tensor], take: list[torch.Tensor]) -> list[Message]:
        """`give[r]` goes to rank r, whose message comes into `take[r]`; the own ones are left alone."""
        messages = []
        for distance in range(1, self.size):
            to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            if take[source].numel():
                messages.append(Message(source, dist.irecv(take[source], group_src=source, group=self.group, tag=tag)))
            if give[to].numel():
                messages.append(Message(to, dist.isend(give[to], group_dst=to, group=self.group, tag=tag)))
        return messages

    def _cut(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """A segment for every rank; equal ones, where that is possible."""
        return list(flat.tensor_split(self.size))

    def _others(self) -> Iterable[int]:
        return (rank for rank in range(self.size) if rank != self.rank)

    def _name(self, rank: int) -> int:
        """What a rank of the group is called in the world."""
        return dist.get_global_rank(self.group, rank)


def _followed(steps: Steps, finish: Callable[[], object] | None) -> Steps:
    yield from steps
    if finish is not None:
        finish()


def _copy_back(host: torch.Tensor, flat: torch.Tensor) -> Callable[[], object] | None:
    """What is left to do where the collective ran on a host copy."""
    return None if host is flat else functools.partial(flat.copy_, host)
