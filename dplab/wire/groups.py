"""Groups of torch.distributed and the transport of each.

`NativeTransport` is for backends (nccl) whose own collectives are the good ones; gloo and shm have files of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dplab.errors import WireError
from dplab.telemetry.recorder import now
from dplab.wire.collectives import Op, Transport, Work, reduced
from dplab.wire.gloo import GlooTransport
from dplab.wire.shm.group import ShmGroup
from dplab.wire.shm.transport import ShmTransport

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}

# torch 2.13 renames the tensor collectives and deprecates the old names; 2.11 has only those.
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def leave() -> None:
    """Ends the process group; for the end of the process.

    The backend's threads outlive even that, and drop the tensors of the last collectives a moment after these
    were waited for. Dropping one takes the interpreter's lock, and taking it from an interpreter on its way out
    aborts the process (seen in a third of short programs). So they are given that moment here, once.
    """
    if dist.is_initialized():
        if not isinstance(dist.group.WORLD, ShmGroup):
            time.sleep(0.2)
        dist.destroy_process_group()


class GroupWork:
    """A work of torch's, and what is left to do when it has ended (a local sum)."""

    def __init__(self, work: Any, finish: Callable[[], None] | None = None) -> None:
        self._work, self._finish = work, finish
        self._done_at: int | None = None

    @property
    def done_at(self) -> int | None:
        """When the last byte was first seen to have come; looking is what sees it.

        A callback on the work's future would be exact, but runs Python on the backend's thread: one that is
        late meets an interpreter on its way out, and aborts the process.
        """
        if self._done_at is None and self._work.is_completed():
            self._done_at = now()
        return self._done_at

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise WireError(f"a collective did not end: another rank left it or the link broke ({error})") from error
        if self._finish is not None:
            self._finish()

    def then(self, more: Callable[[], None]) -> GroupWork:
        """The same work with more to do at its end."""
        first = self._finish

        def both() -> None:
            if first is not None:
                first()
            more()

        self._finish = both
        return self


class NativeTransport:
    """The backend's own collectives, in place; 2-byte sums are built here, since the backend rounds at every hop."""

    modelled = frozenset({"all_reduce", "reduce_scatter", "all_gather", "broadcast"})

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def all_reduce(self, flat: torch.Tensor, op: Op) -> Work:
        if op == "sum" and _is_short(flat):
            return self._short_all_reduce(flat)
        return GroupWork(dist.all_reduce(flat, _OPS[op], group=self.group, async_op=True))

    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor) -> Work:
        if _is_short(flat):
            return self._summing_reduce_scatter(flat, out)
        return GroupWork(_reduce_scatter(out, flat, group=self.group, async_op=True))

    def all_gather(self, flat: torch.Tensor) -> Work:
        own = flat.view(self.size, -1)[self.rank]
        return GroupWork(_all_gather(flat, own, group=self.group, async_op=True))

    def all_to_all(self, flat: torch.Tensor, out: torch.Tensor) -> Work:
        return GroupWork(dist.all_to_all_single(out, flat, group=self.group, async_op=True))

    def broadcast(self, flat: torch.Tensor, source: int) -> Work:
        return GroupWork(dist.broadcast(flat, group_src=source, group=self.group, async_op=True))

    def gather_objects(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def _summing_reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor) -> GroupWork:
        # received: one segment of every rank (own included), in rank order; lives until the sum below
        received = torch.empty_like(flat)
        work = dist.all_to_all_single(received, flat, group=self.group, async_op=True)

        def sum_in_rank_order() -> None:
            out.copy_(reduced(list(received.view(self.size, -1)), "sum"))

        return GroupWork(work, sum_in_rank_order)

    def _short_all_reduce(self, flat: torch.Tensor) -> GroupWork:
        """Reduce-scatter with fp32 sums, then all-gather: an all-reduce's bytes, rounded once."""
        padded = flat.new_zeros(-(-flat.numel() // self.size) * self.size)
        padded[:flat.numel()].copy_(flat)
        work = self._summing_reduce_scatter(padded, padded.view(self.size, -1)[self.rank])

        def gather() -> None:
            self.all_gather(padded).wait()
            flat.copy_(padded[:flat.numel()])

        return work.then(gather)


def _is_short(flat: torch.Tensor) -> bool:
    return flat.is_floating_point() and flat.element_size() < 4


class SoloTransport:
    """A group of one rank: never called for anything but its size."""

    rank, size = 0, 1
    modelled: frozenset[str] = frozenset()

    def _nothing(self, *_: Any) -> Any:
        raise AssertionError("a group of one rank sends nothing")

    all_reduce = reduce_scatter = all_gather = all_to_all = broadcast = gather_objects = _nothing


def transport_for(group: dist.ProcessGroup | None) -> Transport:
    """The transport that suits a group's backend; None is a group of one rank."""
    if group is None or dist.get_world_size(group) == 1:
        return SoloTransport()
    if isinstance(group, ShmGroup):
        return ShmTransport(group)
    return GlooTransport(group) if "gloo" in dist.get_backend(group) else NativeTransport(group)
