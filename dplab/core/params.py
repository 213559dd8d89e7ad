"""Parameters of a bucket, in one of two roles: `Resident` (every rank holds all) or `Sharded` (ZeRO-3).

Both speak three verbs. `publish()`: the optimizer has moved the owned part, make it everybody's.
`unshard()`: make the full values readable in the module's parameters. `reshard()`: give that memory back.
Replicated parameters are the resident role along a shard axis of one rank, whose all-gather sends nothing.
"""

from __future__ import annotations

import bisect
import functools
import zlib
from collections.abc import Sequence

import torch
from torch import nn

from dplab.core import absent
from dplab.core.home import Home, Stepped, nbytes
from dplab.core.precision import Dtypes
from dplab.errors import StateError
from dplab.layout import FlatLayout
from dplab.wire.collectives import DONE, Collectives, Pending, Purpose

REPLACED = "was given other memory after the model was wrapped (by model.to(...), model.float() or `.data = ...`)"
_OURS = 2
"""Who holds a full storage besides its views: the full tensor, and the handle that is being looked at."""


class _Stepped:
    """What the optimizer steps: the owned part, or a copy of it, wider or elsewhere.

    Every write of ours is followed by `settle()`; a version that has moved since is a write of somebody else's.
    """

    parameters: Sequence[nn.Parameter]
    layout: FlatLayout
    owned: torch.Tensor
    _kept: Stepped
    """of shard length, lives as long as the engine"""
    _settled: list[int]

    def settle(self) -> None:
        """The values are ours as they are now."""
        self._settled = [parameter._version for parameter in self.parameters]

    def _touched(self) -> list[int]:
        """Slots that somebody has written to since."""
        return [slot for slot, (parameter, version) in enumerate(zip(self.parameters, self._settled, strict=True))
                if parameter._version != version]

    def _elsewhere(self, shown: Sequence[torch.Tensor]) -> list[str]:
        """Names of parameters that are in other memory than what they were made to show."""
        return [slot.name for slot, parameter, tensor in zip(self.layout.slots, self.parameters, shown, strict=True)
                if parameter.data_ptr() != tensor.data_ptr()]

    @property
    def stepped(self) -> torch.Tensor:
        return self._kept.values

    @property
    def master(self) -> torch.Tensor | None:
        """The values before they are rounded to the owned part; None where nothing is rounded."""
        return self._kept.master

    @property
    def steps_on_host(self) -> bool:
        """Whether that lies in the host's memory, beside the device."""
        return self._kept.on_host

    @property
    def master_bytes(self) -> int:
        return self._kept.held_bytes

    def round_master(self) -> None:
        """The owned part becomes the rounding of what was stepped."""
        self._kept.round()

    def refresh_master(self) -> None:
        """Where somebody wrote to the owned part, what is stepped takes that value; elsewhere it keeps its digits."""
        self._kept.refresh()


class Resident(_Stepped):
    """The full values, always: one flat buffer of which the module's parameters are views for good."""

    resident = True

    def __init__(self, layout: FlatLayout, parameters: Sequence[nn.Parameter], axis: Collectives,
                 dtypes: Dtypes, home: Home) -> None:
        self.parameters, self.axis, self.layout = parameters, axis, layout
        exact = _flattened(layout, parameters)
        # full length, the computing dtype, lives as long as the engine
        self.flat = axis.housed(exact.to(dtypes.param))
        self.owned = axis.segment(self.flat)
        self._kept = home.stepped(self.owned, axis.segment(exact), dtypes, trainable=parameters[0].requires_grad,
                                  hosted=False)
        self._views = _cut(self.flat, layout)
        for view, parameter in zip(self._views, parameters, strict=True):
            parameter.data = view
        self.settle()

    @property
    def held_bytes(self) -> int:
        return nbytes(self.flat)

    @property
    def host_bytes(self) -> int:
        return self._kept.host_bytes

    @property
    def gathered_bytes(self) -> int:
        return 0

    def publish(self, bucket: int, purpose: Purpose = "params") -> Pending:
        """All-gathers what each rank has updated; the module's parameters change when the pending is waited."""
        torch.autograd.graph.increment_version(self.parameters)
        self.settle()
        self._kept.ready()
        return self.axis.all_gather(self.flat, purpose=purpose, bucket=bucket)

    def unshard(self, bucket: int) -> Pending:
        return DONE

    def reveal(self) -> None:
        pass

    def reshard(self) -> None:
        pass

    def take_back(self) -> None:
        """The full values were written to, and are the same on all ranks again."""
        self.refresh_master()
        self.settle()

    def replaced(self) -> list[str]:
        """Names of parameters that are no views of the flat buffer any more."""
        return self._elsewhere(self._views)

    def written(self) -> dict[str, int]:
        """Parameters that somebody has written to since the last look, with a checksum of their values."""
        found = {self.layout.slots[slot].name: checksum(self.parameters[slot]) for slot in self._touched()}
        self.settle()
        return found


class Sharded(_Stepped):
    """One slice on every rank; the full values only between `unshard` and `reshard`.

    The full buffer is one storage for the life of the engine, emptied by resizing it to 0 and refilled in
    place: autograd holds views of it (a linear layer saves its weight transposed), and those must find the
    values again. While the storage is empty the parameters show a stride-0 NaN (a zero where it is an integer)
    of the right shape, and are of a class that refuses to be read.
    """

    def __init__(self, layout: FlatLayout, parameters: Sequence[nn.Parameter], axis: Collectives,
                 dtypes: Dtypes, home: Home) -> None:
        self.parameters, self.axis, self.layout = parameters, axis, layout
        exact = _flattened(layout, parameters)
        self.full = exact.to(dtypes.param)
        self._full_bytes = nbytes(self.full)
        # shard length, lives as long as the engine: the only lasting copy
        self.owned, self._hosted = home.shard(axis.segment(self.full), axis), home.params is not None
        self._kept = home.stepped(self.owned, axis.segment(exact), dtypes, trainable=parameters[0].requires_grad,
                                  hosted=self._hosted)
        self._source = home.source(self.owned, axis, self._kept)
        value = float("nan") if dtypes.param.is_floating_point or dtypes.param.is_complex else 0
        nothing = torch.full((), value, dtype=self.full.dtype, device=self.full.device)
        self._views = _cut(self.full, layout)
        self._absent = [nothing.expand(slot.shape) for slot in layout.slots]
        self._classes = [(type(parameter), absent.absent(type(parameter))) for parameter in parameters]
        for slot, parameter in zip(layout.slots, parameters, strict=True):
            absent.mark(parameter, functools.partial(_outside, slot.name, axis.rank))
        self._wrote: dict[str, int] = {}
        self._pending: Pending | None = None
        self.resident = False
        for parameter, view in zip(parameters, self._views, strict=True):
            parameter.data = view
        self.settle()
        self._hide()

    @property
    def held_bytes(self) -> int:
        return 0 if self._hosted else nbytes(self.owned)

    @property
    def host_bytes(self) -> int:
        return self._kept.host_bytes + (nbytes(self.owned) if self._hosted else 0)

    @property
    def gathered_bytes(self) -> int:
        return self._full_bytes if self.resident else 0

    @property
    def storage_key(self) -> int:
        """Address of the full storage: tells whether a tensor is a view of it. 0 while it is empty."""
        return self.full.untyped_storage().data_ptr() if self.resident else 0

    def slot_of(self, view: torch.Tensor) -> int:
        """The slot in which a view of the full buffer begins."""
        return bisect.bisect_right(self.layout.slots, int(view.storage_offset()), key=lambda slot: slot.start) - 1

    def publish(self, bucket: int, purpose: Purpose = "params") -> Pending:
        """Nothing travels: the next unshard brings the new values. What was gathered must have been let go of."""
        assert not self.resident
        torch.autograd.graph.increment_version(self.parameters)
        self.settle()
        return DONE

    def unshard(self, bucket: int) -> Pending:
        """Issues the all-gather; the parameters can be read once it is waited for and `reveal()` is called."""
        if not self.resident:
            # every write below goes to the flat buffer, whose version counter is not the parameters': autograd
            # rightly takes the refilled values for the ones it saved
            self.full.untyped_storage().resize_(self._full_bytes)
            self._show()
            self.resident = True
            self._pending = self._source.gather(self.full, bucket)
        return self._pending or DONE

    def reveal(self) -> None:
        """The values have come: the parameters may be read."""
        for parameter, (present, _) in zip(self.parameters, self._classes, strict=True):
            parameter.__class__ = present

    def reshard(self) -> None:
        if self.resident:
            if self._pending is not None:
                self._pending.wait()
                self._pending = None
            self._keep_writes()
            self._refuse_replaced(self._views)
            self._hide()

    def take_back(self) -> None:
        """Copies the owned slice of the full values into the shard, after somebody wrote to them."""
        self._source.still()
        self.owned.copy_(self.axis.segment(self.full))
        self._kept.refresh()
        self.settle()

    def refresh_master(self) -> None:
        """The shard is about to be stepped or read. Nobody writes to it but `take_back`, which has told the master."""
        self._source.still()

    def replaced(self) -> list[str]:
        """Names of parameters that show neither the gathered values nor their absence any more."""
        return self._elsewhere(self._views if self.resident else self._absent)

    def written(self) -> dict[str, int]:
        """Parameters that somebody wrote to while they were gathered, with a checksum of their values."""
        if self.resident:
            self._keep_writes()
        found, self._wrote = self._wrote, {}
        return found

    def _keep_writes(self) -> None:
        """What somebody wrote to the gathered values is kept in the shard, and told by `written`."""
        if touched := self._touched():
            self._wrote |= {self.layout.slots[slot].name: checksum(self._views[slot]) for slot in touched}
            self.take_back()

    def _show(self) -> None:
        """The parameters become views of the full buffer, which still refuse to be read."""
        self.reveal()
        self._refuse_replaced(self._absent)
        for slot in self._touched():
            raise StateError(f"parameter {self.layout.slots[slot].name!r} was written to while only its share was on "
                             f"rank {self.axis.rank}; write to it inside engine.gathered()")
        for parameter, view, (_, away) in zip(self.parameters, self._views, self._classes, strict=True):
            parameter.data = view
            parameter.__class__ = away

    def _hide(self) -> None:
        """The parameters refuse to be read, and the memory of their full values is given back."""
        for parameter, nothing, (_, away) in zip(self.parameters, self._absent, self._classes, strict=True):
            parameter.data = nothing
            parameter.__class__ = away
        self.resident = False
        storage = self.full.untyped_storage()
        if not storage.resizable() or torch._C._storage_Use_Count(storage._cdata) > len(self._views) + _OURS:
            # somebody holds it (a state_dict taken inside gathered(), a graph of which no hook knew, numpy, which
            # pins it): it is theirs now, ours is a new one
            self.full = torch.empty_like(self.full)
            self._views = _cut(self.full, self.layout)
        self.full.untyped_storage().resize_(0)

    def _refuse_replaced(self, shown: Sequence[torch.Tensor]) -> None:
        for name in self._elsewhere(shown):
            raise StateError(f"parameter {name!r} {REPLACED}, on rank {self.axis.rank}; make the model what it shall "
                             f"be before dplab.parallelize, or write to it inside engine.gathered()")


Params = Resident | Sharded


def checksum(tensor: torch.Tensor) -> int:
    """Of the elements and their order. For what is rarely looked at: it reads everything on the CPU."""
    # a clone, since numpy would pin the storage of a gathered unit
    return zlib.crc32(tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().clone().numpy().tobytes())


def _outside(name: str, rank: int) -> str:
    return (f"parameter {name!r} is used outside its unit, where rank {rank} holds only its share of it; use it inside "
            f"the forward of the module that holds it, let parallelize(units=...) gather both together, or read it "
            f"inside engine.gathered()")


def _cut(full: torch.Tensor, layout: FlatLayout) -> list[torch.Tensor]:
    return [full[slot.start:slot.stop].view(slot.shape) for slot in layout.slots]


def _flattened(layout: FlatLayout, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    flat = torch.zeros(layout.numel, dtype=parameters[0].dtype, device=parameters[0].device)
    for slot, parameter in zip(layout.slots, parameters, strict=True):
        flat[slot.start:slot.stop].view(slot.shape).copy_(parameter.detach())
    return flat
