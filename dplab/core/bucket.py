"""A bucket: parameters that are laid out, reduced and published together.

Its two roles are picked once, when it is built; after that the engine speaks five verbs to it (`accumulate`,
`reduce`, `publish`, `unshard`, `reshard`) and nobody asks which strategy this is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from dplab.core import grads, params
from dplab.layout import FlatLayout
from dplab.specs import Placement, Sharding
from dplab.telemetry.recorder import now
from dplab.wire.collectives import Pending
from dplab.wire.world import Mesh


class Bucket:
    """Parameters of one dtype, device and trainability, in launch order `index`.

    `touched[i]`: a gradient came to slot i in this window, here. `moved[i]`: somewhere. `missing`: slots that
    the backward under way has not reached yet.
    """

    def __init__(self, index: int, named: Sequence[tuple[str, nn.Parameter]], mesh: Mesh) -> None:
        self.index, self.mesh = index, mesh
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.layout = FlatLayout.of([(name, tuple(p.shape)) for name, p in named], mesh.shard.size)
        self.dtype, self.device = self.parameters[0].dtype, self.parameters[0].device
        self.trainable = self.parameters[0].requires_grad
        self.params: params.Params
        self.grads: grads.Grads | None = None
        self.touched = [False] * len(named)
        self.moved = [False] * len(named)
        self.missing: set[int] = set()
        self.launched = False
        self.filled_at = 0

    def take_roles(self, sharding: Sharding, pool: grads.BufferPool | None) -> None:
        """Moves the parameters into their flat buffer and picks the roles."""
        role = params.Sharded if sharding.params is Placement.SHARDED else params.Resident
        self.params = role(self.layout, self.parameters, self.mesh.shard)
        if not self.trainable:
            return
        shard, replicate = self.mesh.shard, self.mesh.replicate
        if pool is None:
            self.grads = grads.Whole(self.layout, shard, replicate, dtype=self.dtype, device=self.device)
        else:
            self.grads = grads.Sharded(self.layout, shard, replicate, pool=pool, dtype=self.dtype, device=self.device)

    def expect(self) -> None:
        """A backward begins: every slot is missing until its gradient comes."""
        self.missing = set(range(len(self.parameters)))
        self.launched = False

    def accumulate(self, slot: int) -> bool:
        """Takes the gradient that autograd has just left on a parameter; True once no slot is missing.

        The first one of a window is copied into the slot and the slot's view takes its place; autograd then
        adds later ones in place. A double backward leaves a new tensor that already holds the sum.
        """
        assert self.grads is not None
        parameter = self.parameters[slot]
        assert parameter.grad is not None
        if self.grads.buffer is None:
            self.grads.open()
        view = self.grads.views[slot]
        if parameter.grad is not view:
            view.copy_(parameter.grad.detach())
            parameter.grad = view
        self.touched[slot] = True
        self.missing.discard(slot)
        if not self.missing:
            self.filled_at = now()
        return not self.missing

    def reduce(self) -> Pending:
        """Issues the reduction. Slots without a gradient here count as zero."""
        assert self.grads is not None
        if self.grads.buffer is None:
            self.grads.open()
        for slot, view in enumerate(self.grads.views):
            if self.parameters[slot].grad is not view:
                view.zero_()
        self.launched = True
        return self.grads.reduce(self.index, self.filled_at if not self.missing else now())

    def fold(self, *, last: bool) -> None:
        """The reduction has ended: keeps the owned part, takes the unreduced gradients off the parameters."""
        assert self.grads is not None
        self.hide()
        self.grads.fold(last=last)

    def close(self, divisor: float) -> None:
        """The window's one division, on the owned part; where that is everything, `.grad` shows it."""
        assert self.grads is not None
        self.grads.owned.div_(divisor)
        if self.grads.shows_owned:
            self.show()

    def show(self) -> None:
        """`.grad` of every parameter that moved anywhere becomes its averaged gradient."""
        assert self.grads is not None
        for slot, parameter in enumerate(self.parameters):
            parameter.grad = self.grads.views[slot] if self.moved[slot] else None

    def hide(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def reopen(self, divisor: float) -> None:
        """Takes a closed window up again, before autograd adds anything to it."""
        assert self.grads is not None
        self.hide()
        self.grads.reopen(divisor)

    def clear(self) -> None:
        """A new window: no gradient anywhere."""
        self.touched = [False] * len(self.parameters)
        self.moved = [False] * len(self.parameters)
        self.launched = False
        if self.grads is not None:
            self.hide()
            self.grads.clear()

    def owned_slots(self) -> list[tuple[int, int, int]]:
        """(slot, start, stop) in the shard of every slot of which this rank owns something."""
        rank = self.mesh.shard.rank
        bounds = [(slot, *self.layout.owned(self.layout.slots[slot], rank)) for slot in range(len(self.parameters))]
        return [each for each in bounds if each[1] < each[2]]

    def full_grad(self, slot: int) -> torch.Tensor | None:
        """The averaged gradient of a slot on every rank; collective along the shard axis."""
        assert self.grads is not None
        if not self.moved[slot]:
            return None
        whole = torch.zeros(self.layout.numel, dtype=self.dtype, device=self.device)
        self.mesh.shard.segment(whole).copy_(self.grads.owned)
        self.mesh.shard.all_gather(whole, purpose="control").wait()
        place = self.layout.slots[slot]
        return whole[place.start:place.stop].view(place.shape).clone()
