"""Gradients of a bucket, in one of two roles: `Whole` (DDP, ZeRO-1) or `Sharded` (ZeRO-2, ZeRO-3).

Both hold unreduced gradients in a full buffer while a bucket fills, reduce it over the mesh, and keep the
rank's owned part. `Whole` has its full buffer for good and reduces in place. `Sharded` borrows it from a
pool and keeps only the owned shard. Reduced and unreduced values never share memory that is added to.

The life of a buffer: `open()` -> slots are copied in -> `reduce()` -> waited -> `fold(last)`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator

import torch

from dplab.core.home import Home
from dplab.core.host import COPIED, Copy
from dplab.core.precision import Dtypes
from dplab.layout import FlatLayout
from dplab.wire.chain import Chain
from dplab.wire.codec import Codec
from dplab.wire.collectives import Collectives, Part, Pending


class BufferPool:
    """Full-length buffers that buckets fill in turn: two rotate, more exist only while more buckets are open.

    `make_room` is called when both are taken: it ends the oldest reduction under way, if there is one.
    """

    ROTATING = 2

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, axis: Collectives) -> None:
        self._numel, self._dtype, self._device, self._axis = numel, dtype, device, axis
        self._free: list[tuple[torch.Tensor, Copy]] = []
        self._out = 0
        self.make_room: Callable[[], bool] = lambda: False

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers that exist now, taken or not."""
        return (self._out + len(self._free)) * self._numel * self._dtype.itemsize

    def take(self) -> torch.Tensor:
        """A buffer as long as the longest bucket, holding anything."""
        while not self._free and self._out >= self.ROTATING and self.make_room():
            pass
        self._out += 1
        if not self._free:
            return self._axis.empty(self._numel, self._dtype, self._device)
        buffer, left = self._free.pop(0)
        left.order()
        return buffer

    def give_back(self, buffer: torch.Tensor, left: Copy) -> None:
        """`left`: the copy that takes its sums away."""
        self._out -= 1
        if self._out + len(self._free) < self.ROTATING:
            self._free.append((buffer, left))


class _Role:
    """What both roles share: the buffer that fills, its slots' views, its gaps, the reduction."""

    under_way = sys.maxsize
    """Reductions that may be under way before the oldest is ended: few where its sums are to leave for the host."""

    def __init__(self, layout: FlatLayout, shard: Collectives, replicate: Collectives, dtypes: Dtypes) -> None:
        self.layout, self.shard, self.replicate, self.dtypes = layout, shard, replicate, dtypes
        # the axis on which full buffers are reduced
        self.reducer = shard if shard.size > 1 else replicate
        self.codec: Codec | None = None
        self.inside = False
        """whether the sums kept are those of the shard axis alone, and still to be summed along the replicate axis"""
        self._joined = False
        self.buffer: torch.Tensor | None = None
        self.summed: torch.Tensor | None = None
        ends = [0, *(slot.stop for slot in layout.slots)]
        starts = [*(slot.start for slot in layout.slots), layout.numel]
        self._gaps = [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]
        self.views: list[torch.Tensor] = []

    @property
    def holds(self) -> bool:
        """Whether the window has sums from before."""
        raise NotImplementedError

    def _kept(self) -> torch.Tensor:
        """Those sums, on the device."""
        raise NotImplementedError

    @property
    def _remembered(self) -> int:
        """Bytes that the codec keeps from one reduction to the next."""
        return 0 if self.codec is None else self.codec.held_bytes

    def _fill(self, buffer: torch.Tensor) -> None:
        """Starts to fill `buffer`. Padding is zeroed, because it is summed and stepped with the rest."""
        self.buffer = buffer
        self.views = [buffer[slot.start:slot.stop].view(slot.shape) for slot in self.layout.slots]
        for start, stop in self._gaps:
            buffer[start:stop].zero_()

    def reduce(self, bucket: int, filled: int, *, last: bool) -> Pending:
        """Issues the sum over all ranks; afterwards `summed` holds this rank's part.

        Along a shard axis a reduce-scatter, along a replicate axis an all-reduce of what that left. A codec takes the
        place of the last of them. Where there are both axes, the second waits for the `last` of a window, and takes
        along what the window has left inside.
        """
        assert self.buffer is not None
        buffer, summed = self.buffer, self._target(self.shard.segment(self.buffer))
        self.summed = summed
        part = self._part(bucket, filled)
        if self.codec is not None and self.replicate.size == 1:
            return self._told(Chain(self.codec.reduce_scatter(buffer, summed, self.shard.of(part))), part)
        scattered = self.shard.reduce_scatter(buffer, summed, bucket=bucket, filled=filled)
        if self.replicate.size == 1:
            return scattered
        if self.shard.size == 1:
            return self._across(summed, part)
        if not last and (self.inside or not self.holds):
            self.inside = True
            return scattered
        self._joined, self.inside = self.inside, False
        return self._told(Chain(self._summed_up(scattered, summed, part), quick=True), part)

    def reduce_rest(self, bucket: int) -> Pending:
        """Sums along the replicate axis what a window that ends early has left inside."""
        self.summed = self._kept().clone()      # what is kept may have to come from the host, and goes back there
        self._joined, self.inside = True, False
        return self._across(self.summed, self._part(bucket, None))

    def _part(self, bucket: int, filled: int | None) -> Part:
        return Part("grads", bucket, filled, row="reduce_scatter" if self.replicate.size == 1 else "all_reduce")

    def _across(self, summed: torch.Tensor, part: Part) -> Pending:
        steps = self._crossing(summed, part)
        return next(steps) if self.codec is None else self._told(Chain(steps), part)

    def _crossing(self, summed: torch.Tensor, part: Part) -> Iterator[Pending]:
        """The all-reduce along the replicate axis; without a codec it is one collective."""
        if self.codec is None:
            yield self.replicate.all_reduce(summed, bucket=part.bucket, filled=part.filled)
        else:
            yield from self.replicate.coded(self.codec, summed, part)

    def _summed_up(self, scattered: Pending, summed: torch.Tensor, part: Part) -> Iterator[Pending]:
        """The all-reduce of what a reduce-scatter has left, once it is over."""
        yield scattered
        if self._joined:
            summed.add_(self._kept())
        yield from self._crossing(summed, part)

    def _told(self, chain: Chain, part: Part) -> Chain:
        """The row of the collective tells the codec's last error, as far as it measures one."""
        if self.codec is not None:
            chain.ended = functools.partial(self._tell, self.codec, part)
        return chain

    def _tell(self, codec: Codec, part: Part) -> None:
        axis = self.reducer
        if codec.error is not None:
            axis.counters.row(part.row or "", "grads")["error"] = codec.error
            axis.recorder.gauge("compression_error", bucket=part.bucket, value=codec.error)

    def _target(self, own: torch.Tensor) -> torch.Tensor:
        """Where the sum goes: in place, unless sums are kept in a wider dtype than what travels."""
        return own if own.dtype == self.dtypes.grad else own.new_empty(own.shape, dtype=self.dtypes.grad)


class Whole(_Role):
    """Full gradients for good; reduced in place. `carry` keeps earlier sums of a window that reduces often."""

    def __init__(self, layout: FlatLayout, shard: Collectives, replicate: Collectives, *,
                 dtypes: Dtypes, device: torch.device, home: Home) -> None:
        super().__init__(layout, shard, replicate, dtypes)
        # full length, gradient dtype, lives as long as the engine
        self._full = self.reducer.empty(layout.numel, dtypes.grad, device).zero_()
        self._own = shard.segment(self._full)
        self._sums, self._taken = home.sums_of(self._own), False
        self._carry: torch.Tensor | None = None
        self.shows_owned = shard.size == 1 and dtypes.grad == dtypes.param != torch.float16 and home.optimizer is None
        if home.optimizer is not None:
            self.under_way = BufferPool.ROTATING

    @property
    def owned(self) -> torch.Tensor:
        """This rank's part of the sums, where the optimizer wants it."""
        if not self._taken:
            self._sums.take(self._own, add=False)
            self._taken = True
        return self._sums.read()

    @property
    def host_bytes(self) -> int:
        return self._sums.host_bytes

    @property
    def held_bytes(self) -> int:
        return self._remembered + sum(t.numel() * t.element_size() for t in (self._full, self._carry) if t is not None)

    def open(self) -> None:
        self._fill(self._full)

    @property
    def holds(self) -> bool:
        return self._carry is not None

    def _kept(self) -> torch.Tensor:
        assert self._carry is not None
        return self._carry

    def fold(self, *, last: bool) -> None:
        """Adds what has been reduced to what was reduced before; unless `last`, frees the buffer for more."""
        if self._joined:
            assert self.summed is not None
            self._own.copy_(self.summed)
        elif self._carry is not None:
            self._own.add_(self._carry)
        self._joined = False
        self._carry = None if last else self._own.clone()
        self.buffer = None
        self._taken = last
        if last:
            self._sums.take(self._own, add=False)

    def reopen(self, divisor: float) -> None:
        """Takes a closed window up again: its averages become sums and make room."""
        self._carry = (self.owned * divisor).to(self._full.device)

    def clear(self) -> None:
        self.buffer = self._carry = None
        self.inside = self._joined = False


class Sharded(_Role):
    """The owned shard of the gradients; full ones only while a bucket fills and is reduced."""

    shows_owned = False

    def __init__(self, layout: FlatLayout, shard: Collectives, replicate: Collectives, *,
                 pool: BufferPool, dtypes: Dtypes, device: torch.device, home: Home) -> None:
        super().__init__(layout, shard, replicate, dtypes)
        self._pool = pool
        # shard length, gradient dtype, lives as long as the engine
        self._sums, self._device = home.sums(layout.shard_numel, dtypes.grad, device), device
        self._holds = False
        self._lent: torch.Tensor | None = None

    @property
    def owned(self) -> torch.Tensor:
        """This rank's part of the sums, where the optimizer wants it."""
        return self._sums.read()

    @property
    def held_bytes(self) -> int:
        return self._remembered + self._sums.held_bytes

    @property
    def host_bytes(self) -> int:
        return self._sums.host_bytes

    def open(self) -> None:
        self._lent = self._pool.take()
        self._fill(self._lent[: self.layout.numel])

    def fold(self, *, last: bool) -> None:
        """Adds the reduced segment to the shard and gives the buffer back."""
        assert self.summed is not None
        left = self._sums.take(self.summed, add=self._holds and not self._joined)
        self._holds, self._joined = True, False
        self._release(left)

    def reopen(self, divisor: float) -> None:
        self.owned.mul_(divisor)

    @property
    def holds(self) -> bool:
        return self._holds

    def _kept(self) -> torch.Tensor:
        return self._sums.read().to(self._device)

    def clear(self) -> None:
        self._holds = self.inside = self._joined = False
        self._release()

    def _release(self, left: Copy = COPIED) -> None:
        if self._lent is not None:
            self._pool.give_back(self._lent, left)
        self._lent = self.buffer = self.summed = None
        self.views = []


Grads = Whole | Sharded
