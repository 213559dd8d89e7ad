"""Collectives for any tensors, by way of a staging area: each rank puts values there, the others read them.

A tensor larger than the area goes in rounds. Its two halves take turns, so that one round is staged while
the one before is read. What is issued first is carried out first.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import torch

from dplab.errors import WireError
from dplab.wire.calls import dtype_name, labelled, words
from dplab.wire.shm.channel import ENDED, READ, REDUCED, STAGED, Channel, Stage, Ticket
from dplab.wire.shm.operation import Operation, Steps
from dplab.wire.shm.peers import Peer
from dplab.wire.shm.sums import check, reduce_into

Read = Callable[["Rounds", int, int], None]
"""Takes values [start, stop) of what the peers have staged in this round."""
SLICED_FROM = 3
"""Ranks from which on each reduces its own slice of a large tensor, instead of each all of it."""


class Rounds:
    """How one collective goes through the staging area.

    `give[i]`: values for region i of the area. There is one region where all ranks read the same
    (`to` is None), else one for every rank. `longest`: values of the longest piece anywhere.
    """

    def __init__(self, ticket: Ticket, give: Sequence[torch.Tensor | None], dtype: torch.dtype, longest: int) -> None:
        self.ticket, self.channel, self.give, self.dtype = ticket, ticket.channel, give, dtype
        self.stage: Stage = self.channel.stage(ticket, longest * dtype.itemsize * len(give))
        room = self.stage.half // len(give) // 64 * 64
        self.per_round = room // dtype.itemsize
        self.count = max(1, -(-longest // self.per_round))
        self.room, self.longest, self.turn = room, longest, 0

    def run(self, read: Read) -> Steps:
        """Stages every round, and calls `read` on it once all ranks have."""
        yield from self._put(0)
        self.ticket.mark(STAGED, 2)
        yield from self.ticket.await_calls(2)
        for turn in range(self.count):
            if turn + 1 < self.count:
                yield from self._put(turn + 1)
                self.ticket.mark(STAGED, turn + 3)
            yield from self.ticket.await_peers(STAGED, turn + 2)
            self.turn = turn
            start = turn * self.per_round
            read(self, start, min(self.longest, start + self.per_round))
            self.ticket.mark(READ, turn + 1)
        yield from self.ticket.end()

    def theirs(self, peer: Peer, region: int, numel: int) -> torch.Tensor:
        """The first `numel` values that a peer has put into a region in this round."""
        window, base = self.channel.staged_by(peer, self.ticket, self.stage)
        return window.cut(base + self._offset(self.turn, region), numel, self.dtype)

    def mine(self, region: int, numel: int) -> torch.Tensor:
        """As `theirs`, of this rank's own."""
        return self.stage.mine.cut(self._offset(self.turn, region), numel, self.dtype)

    def _put(self, turn: int) -> Steps:
        yield from self.channel.take_half(self.ticket, self.stage, turn)
        start = turn * self.per_round
        for region, values in enumerate(self.give):
            if values is not None and start < values.numel():
                part = values if self.count == 1 else values[start:start + self.per_round]
                self.stage.mine.cut(self._offset(turn, region), part.numel(), self.dtype).copy_(part)

    def _offset(self, turn: int, region: int) -> int:
        return (self.ticket.number + turn) % 2 * self.stage.half + region * self.room


def _start(channel: Channel, ticket: Ticket, steps: Steps) -> Operation:
    return channel.begin(ticket, steps, staged=True)


def all_reduce(channel: Channel, flat: torch.Tensor, op: str, label: str = "") -> Operation:
    """`flat` becomes the reduction over all ranks."""
    check(op, flat.dtype)
    ticket = channel.post(words(f"all_reduce({op})", flat, label))
    large = flat.numel() * flat.element_size() > 1 << 18
    if channel.size >= SLICED_FROM and large:
        return _start(channel, ticket, _sliced_all_reduce(ticket, flat, op))

    def read(rounds: Rounds, start: int, stop: int) -> None:
        parts = _in_rank_order(rounds, 0, stop - start, rounds.mine(0, stop - start))
        reduce_into(flat if rounds.count == 1 else flat[start:stop], parts, op)

    return _start(channel, ticket, _run(ticket, [flat], flat, read))


def reduce(channel: Channel, flat: torch.Tensor, op: str, root: int) -> Operation:
    """`flat` of rank `root` becomes the reduction over all ranks."""
    check(op, flat.dtype)
    ticket = channel.post(words(f"reduce({op}, to rank {root})", flat))

    def read(rounds: Rounds, start: int, stop: int) -> None:
        if channel.rank == root:
            reduce_into(flat[start:stop], _in_rank_order(rounds, 0, stop - start, flat[start:stop]), op)

    return _start(channel, ticket, _run(ticket, [None if channel.rank == root else flat], flat, read))


def broadcast(channel: Channel, flat: torch.Tensor, root: int, label: str = "") -> Operation:
    """`flat` becomes rank `root`'s."""
    ticket = channel.post(words(f"broadcast(from rank {root})", flat, label))

    def read(rounds: Rounds, start: int, stop: int) -> None:
        for peer in channel.peers:
            if peer.rank == root:
                flat[start:stop].copy_(rounds.theirs(peer, 0, stop - start))

    return _start(channel, ticket, _run(ticket, [flat if channel.rank == root else None], flat, read))


def exchange(channel: Channel, name: str, give: Sequence[torch.Tensor], take: Sequence[torch.Tensor], *,
             op: str | None = None, even: bool = False, label: str = "") -> Operation:
    """Rank r's `give[s]` reaches rank s, as its `take[r]`; with `op` their reduction, as its `take[0]`.

    With one `give`, every rank that takes gets it. `even`: all pieces are as long on all ranks; otherwise the
    ranks tell each other first.
    """
    numel = sum(each.numel() for each in give)
    dtype = give[0].dtype
    if op:
        check(op, dtype)
    text = f"{name} of {numel} {dtype_name(dtype)}" if even else f"{name} of {dtype_name(dtype)}"
    size = dtype.itemsize
    sent = [piece.numel() * size for piece in (list(give) * channel.size if len(give) == 1 else give)]
    due = [piece.numel() * size for piece in (list(take) * channel.size if op else take)]
    ticket = channel.post(labelled(text, label), splits=() if even else sent + due)
    own = channel.rank if len(give) > 1 else 0
    # what stays here need not be staged, unless all ranks read the same
    staged = [None if len(give) > 1 and region == own else piece for region, piece in enumerate(give)]

    def read(rounds: Rounds, start: int, stop: int) -> None:
        if op:
            stop = min(stop, take[0].numel())
            if start < stop:
                parts = _in_rank_order(rounds, own, stop - start, give[own][start:stop])
                reduce_into(take[0][start:stop], parts, op)
            return
        if not take:
            return
        for peer in channel.peers:
            end = min(stop, take[peer.rank].numel())
            if start < end:
                take[peer.rank][start:end].copy_(rounds.theirs(peer, own, end - start))
        mine, here = give[own], take[channel.rank]
        if start == 0 and here.numel() and here.data_ptr() != mine.data_ptr():
            here.copy_(mine)

    def steps() -> Steps:
        longest = max(sent + due) // size if even else (yield from _longest(ticket)) // size
        yield from Rounds(ticket, staged, dtype, longest).run(read)

    return _start(channel, ticket, steps())


def gather_bytes(channel: Channel, data: bytes, name: str, gathered: list[bytes]) -> Operation:
    """Fills `gathered` with every rank's bytes, in rank order."""
    ticket = channel.post(name, splits=[len(data)] * channel.size + [0] * channel.size)
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)

    def steps() -> Steps:
        ticket.mark(STAGED, 1)
        yield from ticket.await_calls()
        sizes = [ticket.splits(rank)[0][0] for rank in range(channel.size)]
        whole = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        whole[channel.rank] = mine

        def read(rounds: Rounds, start: int, stop: int) -> None:
            for peer in channel.peers:
                end = min(stop, sizes[peer.rank])
                if start < end:
                    whole[peer.rank][start:end].copy_(rounds.theirs(peer, 0, end - start))

        yield from Rounds(ticket, [mine], torch.uint8, max(sizes)).run(read)
        gathered.extend(each.numpy().tobytes() for each in whole)

    return _start(channel, ticket, steps())


def barrier(channel: Channel) -> Operation:
    """Over once every rank has come."""
    ticket = channel.post("barrier")

    def steps() -> Steps:
        ticket.mark(STAGED, 1)
        yield from ticket.await_calls()
        ticket.mark(READ, ENDED)

    return _start(channel, ticket, steps())


def _run(ticket: Ticket, give: Sequence[torch.Tensor | None], like: torch.Tensor, read: Read) -> Steps:
    yield from Rounds(ticket, give, like.dtype, like.numel()).run(read)


def _in_rank_order(rounds: Rounds, region: int, numel: int, own: torch.Tensor) -> list[torch.Tensor]:
    parts = [rounds.theirs(peer, region, numel) for peer in rounds.channel.peers]
    parts.insert(rounds.channel.rank, own)
    return parts


def _sliced_all_reduce(ticket: Ticket, flat: torch.Tensor, op: str) -> Steps:
    """Each rank reduces its slice of every round, in its staging area, and all collect the slices."""
    channel = ticket.channel
    rounds = Rounds(ticket, [flat], flat.dtype, flat.numel())

    yield from rounds._put(0)
    ticket.mark(STAGED, 2)
    yield from ticket.await_calls(2)
    for turn in range(rounds.count):
        if turn + 1 < rounds.count:
            yield from rounds._put(turn + 1)
            ticket.mark(STAGED, turn + 3)
        yield from ticket.await_peers(STAGED, turn + 2)
        rounds.turn = turn
        start = turn * rounds.per_round
        stop = min(flat.numel(), start + rounds.per_round)
        cuts = slices(stop - start, channel.size)
        low, high = cuts[channel.rank]
        mine = rounds.mine(0, stop - start)
        parts = [rounds.theirs(peer, 0, stop - start)[low:high] for peer in channel.peers]
        parts.insert(channel.rank, mine[low:high])
        if low < high:
            reduce_into(mine[low:high], parts, op)
        ticket.mark(REDUCED, turn + 1)
        flat[start + low:start + high].copy_(mine[low:high])
        yield from ticket.await_peers(REDUCED, turn + 1)
        for peer in channel.peers:
            low, high = cuts[peer.rank]
            flat[start + low:start + high].copy_(rounds.theirs(peer, 0, stop - start)[low:high])
        ticket.mark(READ, turn + 1)
    yield from ticket.end()


def slices(numel: int, size: int) -> list[tuple[int, int]]:
    """Equal parts for every rank, cut at multiples of 128 values."""
    step = -(-numel // size // 128) * 128 or 128
    return [(min(numel, rank * step), min(numel, (rank + 1) * step)) for rank in range(size)]


def _longest(ticket: Ticket) -> Generator[int, None, int]:
    """Bytes of the longest piece anywhere, once all ranks have told theirs and they fit together."""
    ticket.mark(STAGED, 1)
    yield from ticket.await_calls()
    size = ticket.channel.size
    told = [ticket.splits(rank) for rank in range(size)]
    for source in range(size):
        for target in range(size):
            sent, due = told[source][0][target], told[target][1][source]
            if sent != due:
                raise WireError(f"rank {source} gives rank {target} {sent} bytes where rank {target} has room for "
                                f"{due} in {ticket.words}: the splits of both must agree")
    return max(max(sent) for sent, _ in told)
