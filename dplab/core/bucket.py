"""A bucket: parameters that are laid out, reduced and published together.

Its two roles are picked once, when it is built; after that the engine speaks five verbs to it (`accumulate`,
`reduce`, `publish`, `unshard`, `reshard`) and nobody asks which strategy this is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import nn

from dplab.core import grads, params
from dplab.core.absent import CutGradient
from dplab.core.home import Home
from dplab.core.precision import Dtypes
from dplab.errors import StateError
from dplab.layout import FlatLayout
from dplab.specs import Placement, Sharding
from dplab.telemetry.recorder import now
from dplab.wire.collectives import Pending
from dplab.wire.world import Mesh


class Bucket:
    """Parameters of one dtype, device and trainability, in launch order `index`.

    `touched[i]`: a gradient came to slot i in this window, here. `moved[i]`: somewhere. `missing`: slots that
    the backward under way has not reached yet. `filled`: slots with something in the buffer that fills.
    `divisor`: what the owned sums are still to be divided by; 1 but for fp16 sums, which would underflow.
    """

    def __init__(self, index: int, named: Sequence[tuple[str, nn.Parameter]], mesh: Mesh, dtypes: Dtypes) -> None:
        self.index, self.mesh = index, mesh
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.layout = FlatLayout.of([(name, tuple(p.shape)) for name, p in named], mesh.shard.size,
                                    mesh.pieces)
        first = self.parameters[0]
        self.device, self.trainable = first.device, first.requires_grad
        self.dtypes = dtypes
        self.params: params.Params
        self.grads: grads.Grads | None = None
        self.touched = [False] * len(named)
        self.moved = [False] * len(named)
        self.missing: set[int] = set()
        self.filled: set[int] = set()
        self.divisor = 1.0
        self.launched = False
        self.filled_at = 0

    def take_roles(self, sharding: Sharding, pool: grads.BufferPool | None, home: Home) -> None:
        """Moves the parameters into their flat buffer and picks the roles."""
        role = params.Sharded if sharding.params is Placement.SHARDED else params.Resident
        self.params = role(self.layout, self.parameters, self.mesh.shard, self.dtypes, home)
        if not self.trainable:
            return
        shard, replicate = self.mesh.shard, self.mesh.replicate
        if pool is None:
            self.grads = grads.Whole(self.layout, shard, replicate, dtypes=self.dtypes, device=self.device, home=home)
        else:
            self.grads = grads.Sharded(self.layout, shard, replicate, pool=pool, dtypes=self.dtypes,
                                       device=self.device, home=home)
        if self.mesh.codec is not None and self.grads.reducer.size > 1:
            # of two axes it sums along the second what the first has left to this rank
            first = shard if shard.size > 1 and replicate.size > 1 else replicate.before
            self.grads.codec = self.mesh.codec(self.layout.slots if first is None else
                                               self.layout.within(first.rank, first.size))

    @property
    def label(self) -> str:
        """Its parameters in a few words, for people."""
        more = f" and {len(self.names) - 2} more" if len(self.names) > 2 else ""
        return ", ".join(self.names[:2]) + more

    def expect(self) -> None:
        """A backward begins: every slot is missing until its gradient comes."""
        self.missing = set(range(len(self.parameters)))
        self.launched = False

    def accumulate(self, slot: int) -> bool:
        """Takes the gradient that autograd has just left on a parameter; True once no slot is missing.

        The first one of a window is copied into the slot and the slot's view takes its place; autograd then
        adds later ones in place. A double backward leaves a new tensor that already holds the sum. Where the
        buffer is wider than the parameters, no view can take the place: every one is added here.
        """
        assert self.grads is not None
        parameter = self.parameters[slot]
        grad = parameter.grad
        self._be_open()
        view = self.grads.views[slot]
        self.missing.discard(slot)
        if not self.missing:
            self.filled_at = now()
        if grad is None:
            return not self.missing  # its function had none to give
        if grad.layout is not torch.strided:
            grad = grad.to_dense()  # rows that were not looked up are zero
        if view.dtype != grad.dtype:
            view.add_(grad.detach()) if slot in self.filled else view.copy_(grad.detach())
            parameter.grad = None
        elif grad is not view:
            view.copy_(grad.detach())
            parameter.grad = view
        self.filled.add(slot)
        self.touched[slot] = True
        return not self.missing

    def reduce(self, *, last: bool) -> Pending:
        """Issues the reduction, the `last` of its window or not. Slots without a gradient here count as zero."""
        assert self.grads is not None
        self._be_open()
        for slot, view in enumerate(self.grads.views):
            shown, grad = view.dtype == self.dtypes.param, self.parameters[slot].grad
            # a gradient that the user has set to None since counts as none
            if slot not in self.filled or (shown and grad is None):
                view.zero_()
            elif shown and grad is not None and grad is not view:
                view.copy_(grad.detach())
        self.launched = True
        return self.grads.reduce(self.index, self.filled_at if not self.missing else now(), last=last)

    def _be_open(self) -> None:
        """There is a buffer to fill from here on; a new one has nothing in it."""
        assert self.grads is not None
        if self.grads.buffer is None:
            self.grads.open()
            self.filled.clear()

    def first_not_finite(self) -> str | None:
        """The first parameter whose unreduced gradient here is not finite, and what it is; None if all are."""
        assert self.grads is not None
        for slot in sorted(self.filled):
            view = self.grads.views[slot]
            if not torch.isfinite(view).all():
                return f"{self.names[slot]!r} ({'NaN' if torch.isnan(view).any() else 'infinite'})"
        return None

    def fold(self, *, last: bool) -> None:
        """The reduction has ended: keeps the owned part, takes the unreduced gradients off the parameters."""
        assert self.grads is not None
        self.hide()
        self.grads.fold(last=last)

    def close(self, divisor: float) -> None:
        """The window's one division, on the owned part; where that is everything, `.grad` shows it."""
        assert self.grads is not None
        if self.dtypes.grad == torch.float16:
            self.divisor = divisor
        elif divisor != 1.0:
            self.grads.owned.div_(divisor)
        self.filled.clear()
        shown = self._shown()
        for slot, parameter in enumerate(self.parameters):
            parameter.grad = shown[slot] if self.moved[slot] else None

    def take_edits(self) -> None:
        """What the user has done to `.grad` since the window closed. None there means that it does not move."""
        assert self.grads is not None
        shown = self._shown()
        for slot, parameter in enumerate(self.parameters):
            grad = parameter.grad
            if grad is None:
                if self.moved[slot]:
                    self._forget(slot)
            elif grad is not shown[slot]:
                if not self.grads.shows_owned:
                    raise StateError(f"the .grad of parameter {self.names[slot]!r} was assigned after backward; under "
                                     f"this strategy the averaged gradient lies elsewhere: change the loss or the "
                                     f"gradients before they are reduced (parameter.register_hook), or use 'ddp'")
                shown[slot].copy_(grad)
                parameter.grad = shown[slot]
                self.moved[slot] = True

    def _shown(self) -> Sequence[torch.Tensor]:
        """What stands on `.grad` of the parameters that moved, from the end of a window to its step."""
        assert self.grads is not None
        return self.grads.views if self.grads.shows_owned else self._cut

    def refuse_assigned(self) -> None:
        """In a window without a backward: a gradient that somebody has put on a parameter would not be reduced."""
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if parameter.grad is not None:
                raise StateError(f"the .grad of parameter {name!r} was assigned without a backward; gradients are "
                                 f"reduced when backward brings them: use loss.backward() or engine.backward(loss), "
                                 f"and parameter.register_hook to change them")

    def _forget(self, slot: int) -> None:
        """The slot's averaged gradient counts as none."""
        assert self.grads is not None
        self.moved[slot] = self.touched[slot] = False
        start, stop = self.layout.owned(self.layout.slots[slot], self.mesh.shard.rank)
        self.grads.owned[start:stop].zero_()

    @cached_property
    def _cut(self) -> list[CutGradient]:
        return [CutGradient.of(name, parameter) for name, parameter in zip(self.names, self.parameters, strict=True)]

    def hide(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def reopen(self, divisor: float) -> None:
        """Takes a closed window up again, before autograd adds anything to it."""
        assert self.grads is not None
        self.hide()
        self.grads.reopen(divisor / self.divisor)
        self.divisor = 1.0

    def clear(self) -> None:
        """A new window: no gradient anywhere."""
        self.touched = [False] * len(self.parameters)
        self.moved = [False] * len(self.parameters)
        self.launched = False
        self.divisor = 1.0
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
        whole = self.whole(self.grads.owned)[slot].clone()
        return whole if self.divisor == 1.0 else whole.float() / self.divisor

    def whole(self, owned: torch.Tensor) -> list[torch.Tensor]:
        """Every slot's full values from all ranks' owned parts; collective along the shard axis."""
        flat = owned.new_empty(self.layout.numel, device=self.device)
        self.mesh.shard.segment(flat).copy_(owned)
        self.mesh.shard.all_gather(flat, purpose="control").wait()
        return [flat[slot.start:slot.stop].view(slot.shape) for slot in self.layout.slots]
