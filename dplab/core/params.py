"""Parameters of a bucket, in one of two roles: `Resident` (every rank holds all) or `Sharded` (ZeRO-3).

Both speak three verbs. `publish()`: the optimizer has moved the owned part, make it everybody's.
`unshard()`: make the full values readable in the module's parameters. `reshard()`: give that memory back.
Replicated parameters are the resident role along a shard axis of one rank, whose all-gather sends nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from dplab.core.precision import Dtypes
from dplab.layout import FlatLayout
from dplab.wire.collectives import DONE, Collectives, Pending


class _Stepped:
    """What the optimizer steps: the owned part, or its master copy in a wider dtype."""

    owned: torch.Tensor
    master: torch.Tensor | None
    """shard length, fp32, lives as long as the engine; None where the owned part is stepped itself"""

    @property
    def stepped(self) -> torch.Tensor:
        return self.owned if self.master is None else self.master

    @property
    def master_bytes(self) -> int:
        return 0 if self.master is None else _nbytes(self.master)

    def round_master(self) -> None:
        """The owned part becomes the master's rounding."""
        if self.master is not None:
            self.owned.copy_(self.master)

    def refresh_master(self) -> None:
        """Where somebody wrote to the owned part, the master takes that value; elsewhere it keeps its digits."""
        if self.master is not None:
            written = self.owned != self.master.to(self.owned.dtype)
            self.master[written] = self.owned[written].to(self.master.dtype)


class Resident(_Stepped):
    """The full values, always: one flat buffer of which the module's parameters are views for good."""

    def __init__(self, layout: FlatLayout, parameters: Sequence[nn.Parameter], axis: Collectives,
                 dtypes: Dtypes) -> None:
        self.parameters, self.axis = parameters, axis
        exact = _flattened(layout, parameters)
        # full length, the computing dtype, lives as long as the engine
        self.flat = exact.to(dtypes.param)
        self.owned = axis.segment(self.flat)
        self.master = _master(axis.segment(exact), dtypes)
        for slot, parameter in zip(layout.slots, parameters, strict=True):
            parameter.data = self.flat[slot.start:slot.stop].view(slot.shape)

    @property
    def held_bytes(self) -> int:
        return _nbytes(self.flat)

    @property
    def gathered_bytes(self) -> int:
        return 0

    def publish(self, bucket: int) -> Pending:
        """All-gathers what each rank has updated; the module's parameters change when the pending is waited."""
        torch.autograd.graph.increment_version(self.parameters)
        return self.axis.all_gather(self.flat, bucket=bucket)

    def unshard(self, bucket: int) -> Pending:
        return DONE

    def reshard(self) -> None:
        pass

    def take_back(self) -> None:
        """Somebody wrote to the full values."""
        self.refresh_master()


class Sharded(_Stepped):
    """One slice on every rank; the full values only between `unshard` and `reshard`.

    The full buffer is one storage for the life of the engine, emptied by resizing it to 0 and refilled in
    place: autograd holds views of it (a linear layer saves its weight transposed), and those must find the
    values again. While the storage is empty the parameters show a stride-0 NaN (a zero where it is an
    integer) of the right shape instead, so that using one outside its unit never reads memory that is not ours.
    """

    def __init__(self, layout: FlatLayout, parameters: Sequence[nn.Parameter], axis: Collectives,
                 dtypes: Dtypes) -> None:
        self.parameters, self.axis = parameters, axis
        self._layout = layout
        exact = _flattened(layout, parameters)
        self.full = exact.to(dtypes.param)
        self.master = _master(axis.segment(exact), dtypes)
        self._full_bytes = _nbytes(self.full)
        # shard length, lives as long as the engine: the only lasting copy
        self.owned = axis.segment(self.full).clone()
        absent = float("nan") if dtypes.param.is_floating_point or dtypes.param.is_complex else 0
        nothing = torch.full((), absent, dtype=self.full.dtype, device=self.full.device)
        self._views = self._cut(self.full)
        self._absent = [nothing.expand(slot.shape) for slot in layout.slots]
        self.published = 0
        self._pending: Pending | None = None
        self.resident = True
        self.reshard()

    @property
    def held_bytes(self) -> int:
        return _nbytes(self.owned)

    @property
    def gathered_bytes(self) -> int:
        return self._full_bytes if self.resident else 0

    @property
    def storage_key(self) -> int:
        """Address of the full storage: tells whether a tensor is a view of it. 0 while it is empty."""
        return self.full.untyped_storage().data_ptr() if self.resident else 0

    def publish(self, bucket: int) -> Pending:
        """Nothing travels: the next unshard brings the new values. What was gathered must have been let go of."""
        assert not self.resident
        self.published += 1
        torch.autograd.graph.increment_version(self.parameters)
        return DONE

    def unshard(self, bucket: int) -> Pending:
        """Issues the all-gather; the parameters show the values at once and hold them once it is waited for."""
        if not self.resident:
            # every write below goes to the flat buffer, whose version counter is not the parameters': autograd
            # rightly takes the refilled values for the ones it saved
            self.full.untyped_storage().resize_(self._full_bytes)
            self.axis.segment(self.full).copy_(self.owned)
            self._show(self._views)
            self.resident = True
            self._pending = self.axis.all_gather(self.full, bucket=bucket)
        return self._pending or DONE

    def reshard(self) -> None:
        if self.resident:
            if self._pending is not None:
                self._pending.wait()
                self._pending = None
            self._show(self._absent)
            self.resident = False
            if not self.full.untyped_storage().resizable():
                # somebody looked at it through numpy, which pins it: it is theirs now, ours is a new one
                self.full = torch.empty_like(self.full)
                self._views = self._cut(self.full)
            self.full.untyped_storage().resize_(0)

    def take_back(self) -> None:
        """Copies the owned slice of the full values into the shard, after somebody wrote to them."""
        self.owned.copy_(self.axis.segment(self.full))
        self.refresh_master()

    def _cut(self, full: torch.Tensor) -> list[torch.Tensor]:
        return [full[slot.start:slot.stop].view(slot.shape) for slot in self._layout.slots]

    def _show(self, tensors: Sequence[torch.Tensor]) -> None:
        for parameter, tensor in zip(self.parameters, tensors, strict=True):
            parameter.data = tensor


Params = Resident | Sharded


def _flattened(layout: FlatLayout, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    flat = torch.zeros(layout.numel, dtype=parameters[0].dtype, device=parameters[0].device)
    for slot, parameter in zip(layout.slots, parameters, strict=True):
        flat[slot.start:slot.stop].view(slot.shape).copy_(parameter.detach())
    return flat


def _master(exact: torch.Tensor, dtypes: Dtypes) -> torch.Tensor | None:
    return None if dtypes.master is None else exact.to(dtypes.master, copy=True)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
