"""Our collectives on an `shm` group: in place where a tensor lives in shared memory, else by the staging area."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from dplab.wire.calls import words
from dplab.wire.collectives import Op, Work
from dplab.wire.shm import placed, staged
from dplab.wire.shm.group import ShmGroup
from dplab.wire.shm.memory import HOMES

STAGED_UP_TO = 64 << 10
"""Bytes of an all-reduce up to which copying in and out costs less than a second meeting of the ranks."""


class ShmTransport:
    """One rank's end of an `shm` group. A tensor must not be written between a call and its wait."""

    modelled: frozenset[str] = frozenset()
    label = ""

    def __init__(self, group: ShmGroup) -> None:
        self.group, self.channel = group, group.channel
        self.rank, self.size = group.channel.rank, group.channel.size

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory that collectives need not copy from; private where it is not the host's."""
        return HOMES.empty((numel,), dtype) if device.type == "cpu" else torch.empty(numel, dtype=dtype, device=device)

    def all_reduce(self, flat: torch.Tensor, op: Op) -> Work:
        place = HOMES.place(flat) if flat.numel() * flat.element_size() > STAGED_UP_TO else None
        if place is None:
            return staged.all_reduce(self.channel, flat.data, op, self.label)
        return placed.all_reduce(self.channel, flat.data, op, place, self._call(f"all_reduce({op})", flat))

    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor) -> Work:
        place = HOMES.place(flat)
        if place is None:
            return staged.exchange(self.channel, "reduce_scatter", list(flat.data.view(self.size, -1)), [out.data],
                                   op="sum", even=True, label=self.label)
        return placed.reduce_scatter(self.channel, flat.data, out.data, place, self._call("reduce_scatter", flat))

    def all_gather(self, flat: torch.Tensor, own: torch.Tensor | None = None) -> Work:
        segments = flat.data.view(self.size, -1)
        own = segments[self.rank] if own is None else own.data
        place = HOMES.place(own)
        if place is None:
            return staged.exchange(self.channel, "all_gather", [own], list(segments), even=True, label=self.label)
        return placed.all_gather(self.channel, flat.data, own, place, self._call("all_gather", flat))

    def all_to_all(self, flat: torch.Tensor, out: torch.Tensor) -> Work:
        return staged.exchange(self.channel, "all_to_all", list(flat.data.view(self.size, -1)),
                               list(out.data.view(self.size, -1)), even=True, label=self.label)

    def broadcast(self, flat: torch.Tensor, source: int) -> Work:
        return staged.broadcast(self.channel, flat.data, source, self.label)

    def gather_objects(self, value: Any) -> list[Any]:
        gathered: list[bytes] = []
        staged.gather_bytes(self.channel, pickle.dumps(value), "gather_objects", gathered).wait()
        return [pickle.loads(each) for each in gathered]

    def _call(self, name: str, flat: torch.Tensor) -> str:
        return words(name, flat, self.label)
