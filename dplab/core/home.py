"""Where what a rank owns has its home: on its device, or on the host beside it. Chosen once, when buckets are built.

A home makes the objects that a bucket's roles speak to. What the optimizer steps (`values`) is the owned part itself
(`Itself`), a wider copy beside it (`Master`), or a copy on the other side of the link (`OnHost`, `OnDevice`). Sums of
gradients stay where they are reduced (`InPlace`), on the device (`Kept`) or go to the host as they come (`Sent`).
A unit is gathered from shards on the device (`Near`) or on the host (`Far`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dplab.core.host import COPIED, Copy, HostLink, link_to, say_nothing_moves
from dplab.core.precision import Dtypes
from dplab.layout import CACHED
from dplab.specs import Strategy
from dplab.specs.offload import moves
from dplab.wire.collectives import Collectives, Pending

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Home:
    """The link over which the optimizer's part lives, and the parameters' shards; None: on the device."""

    optimizer: HostLink | None = None
    params: HostLink | None = None

    @classmethod
    def of(cls, strategy: Strategy, device: torch.device, *, tell: bool) -> Home:
        """As the strategy says. On a CPU nothing moves, which is told once where `tell`."""
        optimizer, params = moves(strategy.offload)
        link = link_to(device) if optimizer or params else None
        if link is None and (optimizer or params) and tell:
            say_nothing_moves(strategy)
        return cls(link if optimizer else None, link if params else None)

    def shard(self, own: torch.Tensor, axis: Collectives) -> torch.Tensor:
        """Lasting memory of a shard of parameters, with its values."""
        if self.params is not None:
            return self.params.empty(own.numel(), own.dtype).copy_(own)
        return axis.empty(own.numel(), own.dtype, own.device).copy_(own)

    def stepped(self, owned: torch.Tensor, exact: torch.Tensor, dtypes: Dtypes, *, trainable: bool,
                hosted: bool) -> Stepped:
        """What the optimizer steps for `owned`, whose values before rounding are `exact`. `hosted`: owned is on the
        host."""
        wider = dtypes.master
        moves = trainable or wider is not None
        if self.optimizer is not None and not hosted and moves:
            return OnHost(owned, exact, wider, self.optimizer)
        if self.params is not None and self.optimizer is None and moves:
            return OnDevice(owned, exact, wider, self.params)
        return Itself(owned, hosted=hosted) if wider is None else Master(owned, exact, wider, hosted=hosted)

    def source(self, owned: torch.Tensor, axis: Collectives, stepped: Stepped) -> Near:
        """What units are gathered from."""
        return Near(owned, axis, stepped) if self.params is None else Far(owned, axis, stepped, self.params)

    def sums(self, numel: int, dtype: torch.dtype, device: torch.device) -> Kept | Sent:
        """What owned sums of gradients are kept in."""
        if self.optimizer is None:
            return Kept(torch.zeros(numel, dtype=dtype, device=device))
        return Sent(numel, dtype, self.optimizer)

    def sums_of(self, own: torch.Tensor) -> InPlace | Sent:
        """The same for sums that lie in `own` for good."""
        return InPlace(own) if self.optimizer is None else Sent(own.numel(), own.dtype, self.optimizer)


class Itself:
    """The optimizer steps the owned part."""

    master: torch.Tensor | None = None
    """the values, where the owned part is their rounding"""
    held_bytes = host_bytes = 0

    def __init__(self, owned: torch.Tensor, *, hosted: bool) -> None:
        self.owned = self.values = owned
        self.on_host = hosted

    def round(self) -> None:
        """The values were stepped: the owned part becomes their rounding."""

    def refresh(self) -> None:
        """Where somebody wrote to the owned part the values follow; elsewhere they keep their digits."""

    def ready(self) -> None:
        """The device may read the owned part from here on."""


class Master(Itself):
    """It steps a wider copy, in the same memory as the owned part."""

    def __init__(self, owned: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype, *, hosted: bool) -> None:
        self.owned, self.on_host = owned, hosted
        self.values = self.master = exact.to(owned.device, dtype, copy=True)
        self.held_bytes, self.host_bytes = (0, nbytes(self.values)) if hosted else (nbytes(self.values), 0)

    def round(self) -> None:
        self.owned.copy_(self.values)

    def refresh(self) -> None:
        _follow(self.values, self.owned)


class OnHost(Itself):
    """It steps a copy on the host, wider or not; the owned part is on the device.

    What the device was sent last is known by a sum of its bits, so that weights come back only where somebody has
    written to them.
    """

    def __init__(self, owned: torch.Tensor, exact: torch.Tensor, wider: torch.dtype | None, link: HostLink) -> None:
        self.owned, self.on_host, self._link = owned, True, link
        # pinned, shard length, what travels: the values themselves unless they are wider
        self._sent = link.empty(owned.numel(), owned.dtype)
        self.values = self._sent
        if wider is not None:
            self.values = self.master = torch.empty(owned.numel(), dtype=wider, device=self._sent.device)
        self.values.copy_(exact)
        self.host_bytes = nbytes(self._sent) + (0 if self.master is None else nbytes(self.master))
        self._copy: Copy = COPIED
        self._bits: torch.Tensor | None = _bits(owned)

    def round(self) -> None:
        self._copy.wait()
        if self.master is not None:
            self._sent.copy_(self.master)
        self._copy, self._bits = self._link.up(self._sent, self.owned), None

    def refresh(self) -> None:
        self._copy.wait()
        if self._bits is None or torch.equal(self._bits, _bits(self.owned)):
            return
        self._link.down(self.owned, self._sent).wait()
        if self.master is not None:
            _follow(self.master, self._sent)
        self._bits = _bits(self.owned)

    def ready(self) -> None:
        self._copy.order()
        if self._bits is None:
            self._bits = _bits(self.owned)


class OnDevice(Itself):
    """It steps a copy on the device, wider or not; the owned part is on the host."""

    def __init__(self, owned: torch.Tensor, exact: torch.Tensor, wider: torch.dtype | None, link: HostLink) -> None:
        self.owned, self.on_host, self._link = owned, False, link
        self.values = exact.to(wider or owned.dtype, copy=True)
        self.master = None if wider is None else self.values
        self.held_bytes = nbytes(self.values)
        self._copy: Copy = COPIED

    def round(self) -> None:
        self._copy = self._link.down(self.values.to(self.owned.dtype), self.owned)

    def refresh(self) -> None:
        self._copy.wait()
        _follow(self.values, self.owned.to(self.values.device))

    def ready(self) -> None:
        self._copy.wait()


Stepped = Itself
"""Any of the four."""


class Near:
    """Shards on the device."""

    def __init__(self, owned: torch.Tensor, axis: Collectives, stepped: Stepped) -> None:
        self.owned, self.axis, self.stepped = owned, axis, stepped

    def gather(self, full: torch.Tensor, bucket: int) -> Pending:
        """Issues the all-gather of every rank's shard into `full`."""
        self.stepped.ready()
        return self.axis.all_gather(full, self.owned, bucket=bucket)

    def still(self) -> None:
        """The host may write to the shard from here on."""


class Far(Near):
    """Shards on the host: each goes up into its segment first, beside what the device computes."""

    def __init__(self, owned: torch.Tensor, axis: Collectives, stepped: Stepped, link: HostLink) -> None:
        super().__init__(owned, axis, stepped)
        self._link = link
        self._copy: Copy = COPIED

    def gather(self, full: torch.Tensor, bucket: int) -> Pending:
        self.stepped.ready()
        with self._link.ahead():
            copy = self._copy = self._link.up(self.owned, self.axis.segment(full))
            copy.order()
            pending = self.axis.all_gather(full, bucket=bucket)
        return _Gathering(copy, pending)

    def still(self) -> None:
        self._copy.wait()


class _Gathering(Pending):
    """An all-gather whose own segment comes from the host; alone in the world there is nothing but that."""

    def __init__(self, copy: Copy, pending: Pending) -> None:
        super().__init__()
        self._copy, self._pending = copy, pending
        self.look, self.push, self.nudge = pending.look, pending.push, pending.nudge  # type: ignore[method-assign]

    def wait(self) -> None:
        self._copy.order()
        self._pending.wait()


class InPlace:
    """Sums stay where they were reduced."""

    host_bytes = 0

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values
        self.held_bytes = nbytes(values)

    def take(self, summed: torch.Tensor, *, add: bool) -> Copy:
        """Keeps what was reduced, or adds it to what is kept; `summed` may be overwritten once the copy is over."""
        return COPIED

    def read(self) -> torch.Tensor:
        """The sums, to be read and written."""
        return self._values


class Kept(InPlace):
    """On the device, in memory of their own."""

    def take(self, summed: torch.Tensor, *, add: bool) -> Copy:
        if add:
            self._values.add_(summed)
        else:
            self._values.copy_(summed)
        return COPIED


class Sent(InPlace):
    """On the host; each goes down as it comes, and is added there."""

    held_bytes = 0

    def __init__(self, numel: int, dtype: torch.dtype, link: HostLink) -> None:
        self._link = link
        self._values = link.empty(numel, dtype).zero_()
        # where sums arrive that are to be added; made by the first
        self._more: torch.Tensor | None = None
        self._adding = False
        self._copy: Copy = COPIED

    @property
    def host_bytes(self) -> int:  # type: ignore[override]
        return nbytes(self._values) + (0 if self._more is None else nbytes(self._more))

    def take(self, summed: torch.Tensor, *, add: bool) -> Copy:
        into = self.read()
        if add:
            if self._more is None:
                self._more = self._link.empty(into.numel(), into.dtype)
            into = self._more
        self._copy, self._adding = self._link.down(summed, into), add
        return self._copy

    def read(self) -> torch.Tensor:
        self._copy.wait()
        if self._adding:
            assert self._more is not None
            self._values.add_(self._more)
            self._adding = False
        return self._values


def nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _follow(values: torch.Tensor, owned: torch.Tensor) -> None:
    """Where `owned` is not the rounding of `values`, these take its value."""
    if values.device.type != "cpu":      # no question to the device: this runs before every step
        _take(values, owned)
        return
    for mine, theirs in zip(torch.split(values, CACHED), torch.split(owned, CACHED), strict=True):
        # by eight bytes at once, and with them what compares as equal and is not, such as zeros of two signs
        if not torch.equal(mine.to(theirs.dtype).view(torch.int64), theirs.view(torch.int64)):
            _take(mine, theirs)


def _take(values: torch.Tensor, owned: torch.Tensor) -> None:
    same = owned == values.to(owned.dtype)
    torch.where(same, values, owned.to(values.dtype), out=values)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_BITS[tensor.element_size()]).sum(dtype=torch.int64)
