"""Collectives on tensors that live in shared memory: nothing is copied in.

Issuing one publishes where the tensor lies. Waiting for it does the work: each rank reduces its own slice
from all ranks' tensors, in rank order, and reads its peers' results. A peer may read the tensor until the
wait returns, so it must not be written before. Independent of each other: several may be under way.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dplab.wire.shm.channel import ENDED, READ, REDUCED, STAGED, Channel, Ticket
from dplab.wire.shm.memory import WINDOWS, Place
from dplab.wire.shm.operation import Operation, Steps
from dplab.wire.shm.staged import slices
from dplab.wire.shm.sums import reduce_into


def all_reduce(channel: Channel, flat: torch.Tensor, op: str, place: Place, call: str) -> Operation:
    """`flat` becomes the reduction over all ranks."""
    ticket = channel.post(call, place=place)

    def work() -> Steps:
        cuts = slices(flat.numel(), channel.size)
        theirs = _theirs(ticket, flat)
        start, stop = cuts[channel.rank]
        if start < stop:
            parts = [each[start:stop] for _, each in theirs]
            parts.insert(channel.rank, flat[start:stop])
            reduce_into(flat[start:stop], parts, op)
        ticket.mark(REDUCED, 1)
        yield from ticket.await_peers(REDUCED, 1)
        for rank, each in theirs:
            start, stop = cuts[rank]
            flat[start:stop].copy_(each[start:stop])

    return _start(channel, ticket, work)


def reduce_scatter(channel: Channel, flat: torch.Tensor, out: torch.Tensor, place: Place, call: str) -> Operation:
    """`out` becomes the sum over all ranks of this rank's segment of `flat`; it may be that segment."""
    ticket = channel.post(call, place=place)

    def work() -> Steps:
        yield from ()
        numel = flat.numel() // channel.size
        start = channel.rank * numel
        parts = [each[start:start + numel] for _, each in _theirs(ticket, flat)]
        parts.insert(channel.rank, flat[start:start + numel])
        reduce_into(out, parts, "sum")

    return _start(channel, ticket, work)


def all_gather(channel: Channel, flat: torch.Tensor, own: torch.Tensor, place: Place, call: str) -> Operation:
    """Every rank's `own`, which lies at `place`, becomes its segment of every rank's `flat`."""
    ticket = channel.post(call, place=place)

    def work() -> Steps:
        yield from ()
        segments = flat.view(channel.size, -1)
        mine = segments[channel.rank]
        if mine.data_ptr() != own.data_ptr():
            mine.copy_(own)
        for rank, each in _theirs(ticket, own):
            segments[rank].copy_(each)

    return _start(channel, ticket, work)


def _start(channel: Channel, ticket: Ticket, work: Callable[[], Steps]) -> Operation:
    def steps() -> Steps:
        ticket.mark(STAGED, 1)
        # issuing goes no further than this, so that the work is done where it is waited for
        yield channel.peers[0].rank
        yield from ticket.await_calls()
        yield from work()
        ticket.mark(READ, ENDED)
        yield from ticket.await_peers(READ, ENDED)

    return channel.begin(ticket, steps(), staged=False)


def _theirs(ticket: Ticket, like: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """Every peer's tensor, as long as `like`, by rank."""
    found = []
    for peer in ticket.channel.peers:
        place = ticket.place(peer)
        window = WINDOWS.at(peer.pid, place)
        found.append((peer.rank, window.cut(place.offset, like.numel(), like.dtype)))
    return found
