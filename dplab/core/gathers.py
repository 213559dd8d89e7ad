"""Gathering and freeing ZeRO-3 units, and knowing which comes next.

A unit is gathered when one of its modules is entered and freed when the outermost of them is left, unless
a backward is under way or it is the root. In backward a unit is gathered when autograd first asks for a
weight it saved, and freed when all its gradients have come.

The order in which units were needed is remembered; from the second time on the next one is gathered ahead,
in forward and backward alike. One ahead plus the one in use: never more than two gathers in flight.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from dplab.core import saved
from dplab.core.bucket import Bucket
from dplab.core.params import Sharded
from dplab.core.units import Unit
from dplab.errors import StateError
from dplab.telemetry.recorder import Recorder, now


class UnitState(enum.Enum):
    """What of a unit is resident."""

    SHARDED = "the owned shard only"
    GATHERING = "the full storage, values on their way"
    UNSHARDED = "the full values"


class GatheredUnit:
    """A unit with its buckets and its state. `depth`: how many of its modules are being executed."""

    def __init__(self, unit: Unit, buckets: Sequence[Bucket], recorder: Recorder) -> None:
        self.unit, self.buckets, self.recorder = unit, buckets, recorder
        self.name = unit.name or type(unit.module).__name__
        self.state = UnitState.SHARDED
        self.depth = 0
        self.was_there = False
        """Its values could be read before the outermost of its modules was entered: a graph may count on them."""
        self._issued = 0

    def issue(self) -> None:
        """SHARDED -> GATHERING."""
        if self.state is UnitState.SHARDED:
            self._issued = self.recorder.open("unshard", self.name)
            for bucket in self.buckets:
                bucket.params.unshard(bucket.index)
            self.state = UnitState.GATHERING

    def complete(self) -> None:
        """GATHERING -> UNSHARDED."""
        if self.state is UnitState.GATHERING:
            for bucket in self.buckets:
                bucket.params.unshard(bucket.index).wait()
                bucket.params.reveal()
            self.state = UnitState.UNSHARDED
            self.recorder.span("unshard", self.name, self._issued, now(), bytes=self._bytes())

    def reshard(self) -> None:
        """-> SHARDED."""
        if self.state is not UnitState.SHARDED:
            start, nbytes = self.recorder.open("reshard", self.name), self._bytes()
            for bucket in self.buckets:
                bucket.params.reshard()
            self.state = UnitState.SHARDED
            self.recorder.span("reshard", self.name, start, now(), bytes=nbytes)

    def _bytes(self) -> int:
        return sum(bucket.params.gathered_bytes for bucket in self.buckets)


class Gathers:
    """All units of an engine. `need(unit)` is the only way to its values."""

    def __init__(self, units: Sequence[GatheredUnit], *, prefetch: bool, reshard: bool) -> None:
        self.units, self.prefetch, self.reshards = units, prefetch, reshard
        self.pinned = False
        self._trace: list[GatheredUnit] = []
        self._seen: list[GatheredUnit] = []
        self._of_bucket = {bucket: unit for unit in units for bucket in unit.buckets}
        self._by_address: dict[int, tuple[GatheredUnit, Sharded]] = {}

    def need(self, unit: GatheredUnit) -> None:
        """Returns once the unit's values can be read."""
        if unit.state is UnitState.UNSHARDED:
            return
        with unseen():
            self._need(unit)

    def _need(self, unit: GatheredUnit) -> None:
        self._issue(unit)
        if torch.is_grad_enabled() or in_backward():
            self._seen.append(unit)
            place = len(self._seen)
            ahead = self._trace[place] if self._trace[:place] == self._seen and place < len(self._trace) else None
            if self.prefetch and ahead is not None and ahead is not unit:
                self._issue(ahead)
        unit.complete()

    def left(self, unit: GatheredUnit) -> None:
        """The outermost module of the unit has returned."""
        keeps = unit.unit.is_root or not self.reshards
        if not in_backward() and not (keeps and (torch.is_grad_enabled() or unit.was_there)):
            self._free(unit)

    def gradients_came(self, bucket: Bucket) -> None:
        """All gradients of the bucket have come; its unit's values have served if its others' have too."""
        unit = self._of_bucket[bucket]
        if not any(other.missing for other in unit.buckets):
            self._free(unit)

    def backward_ended(self) -> None:
        """Frees what is left, and remembers the order for the next time."""
        self.release()
        if self._seen:
            self._trace, self._seen = self._seen, []

    def release(self) -> None:
        """Frees everything: the weights are about to move."""
        for unit in self.units:
            self._free(unit)

    @contextmanager
    def pin(self) -> Iterator[None]:
        """Every unit is gathered inside, and stays so whatever runs there. Collective."""
        if self.pinned:
            yield
            return
        before = [unit for unit in self.units if unit.state is UnitState.UNSHARDED]
        for unit in self.units:
            unit.issue()
            unit.complete()
        self.pinned = True
        try:
            yield
        finally:
            self.pinned = False
            for unit in self.units:
                if unit not in before:
                    unit.reshard()

    def _free(self, unit: GatheredUnit) -> None:
        if not self.pinned:
            with unseen():
                unit.reshard()

    def holder(self, tensor: torch.Tensor) -> tuple[GatheredUnit, Sharded] | None:
        """The unit and role whose gathered storage `tensor` is a view of, if any."""
        address = tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
        held = self._by_address.get(address) if address else None
        # an address may have been freed since and given to somebody else's tensor
        return held if held is not None and held[1].storage_key == address else None

    def _issue(self, unit: GatheredUnit) -> None:
        unit.issue()
        for bucket in unit.buckets:
            assert isinstance(bucket.params, Sharded)
            self._by_address[bucket.params.storage_key] = (unit, bucket.params)


def unseen() -> AbstractContextManager[Any]:
    """Outside the dispatch modes around: those of a selective checkpoint hold the operators of a recomputation against
    its forward's, and units are gathered in one and there already in the other."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()


def in_backward() -> bool:
    """True while autograd runs a graph in this thread (a recomputed forward included)."""
    return torch._C._current_graph_task_id() != -1


def in_transform() -> bool:
    """True inside vmap, grad or another transform of torch.func."""
    return torch._C._functorch.peek_interpreter_stack() is not None


class UnitHooks:
    """Module hooks that gather a unit before any of its modules runs and let go of it afterwards.

    While one runs, weights that autograd saves are kept as references into the unit, not as tensors: they
    find the values again, gathered anew, when backward asks. Everything else is passed to the saved-tensor
    hooks around it (activation checkpointing, offloading), which would otherwise not see it.
    """

    def __init__(self, gathers: Gathers) -> None:
        self.gathers = gathers
        self.handles: list[Any] = []
        self._under_way: list[tuple[GatheredUnit, list[Any]]] = []
        for unit in gathers.units:
            members = {id(parameter) for _, parameter in unit.unit.parameters}
            for module in unit.unit.module.modules():
                direct = any(id(p) in members for p in module.parameters(recurse=False))
                if direct or module is unit.unit.module:
                    self._hook(module, unit)

    def _hook(self, module: nn.Module, unit: GatheredUnit) -> None:
        entered: list[Any] = []

        def enter(_module: nn.Module, _args: Any) -> None:
            if in_transform():
                raise StateError(f"unit {unit.name!r} was run inside a transform of torch.func (vmap, grad), which "
                                 f"cannot follow weights that are gathered on the way; use 'ddp', 'zero1' or 'zero2'")
            if unit.depth == 0:
                unit.was_there = unit.state is UnitState.UNSHARDED
            self.gathers.need(unit)
            unit.depth += 1
            # inside a checkpoint too, even where the unit was entered around it: the recomputation enters it there,
            # and must save what the forward has saved
            context = nullcontext() if saved.innermost(self._take) else saved.hooks(self._take)
            context.__enter__()
            entered.append(context)
            self._under_way.append((unit, entered))

        def leave(_module: nn.Module, _args: Any, output: Any) -> None:
            if not entered:
                return  # a hook before ours has raised
            entered.pop().__exit__(None, None, None)
            self._under_way.pop()
            unit.depth -= 1
            if unit.depth == 0:
                self._refuse_weights(unit, output)
                self.gathers.left(unit)

        # before the user's own hooks, which may compute weights from others (weight norm, pruning)
        # a compiled unit stops its graph here: what gathers must run as it is
        self.handles.append(module.register_forward_pre_hook(_disable_dynamo(enter), prepend=True))
        self.handles.append(module.register_forward_hook(_disable_dynamo(leave), always_call=True))

    def abandon(self) -> None:
        """The modules under way were interrupted, and will not be left."""
        while self._under_way:
            unit, entered = self._under_way.pop()
            entered.pop().__exit__(None, None, None)
            unit.depth = 0
        self.gathers.release()

    def _refuse_weights(self, unit: GatheredUnit, output: Any) -> None:
        """What a unit returns outlives its weights, so it cannot be a view of one."""
        for tensor in (output,) if isinstance(output, torch.Tensor) else tree_leaves(output):
            held = self.gathers.holder(tensor) if isinstance(tensor, torch.Tensor) else None
            if held is not None and held[0] is unit:
                name = held[1].layout.slots[held[1].slot_of(tensor)].name
                raise StateError(f"unit {unit.name!r} returned its own weight {name!r}, or a view of it, whose memory "
                                 f"is given back after its forward; return a clone, or let units=... gather the weight "
                                 f"with the module that uses it")

    def _take(self, tensor: torch.Tensor) -> SavedWeight | None:
        held = self.gathers.holder(tensor)
        return None if held is None else SavedWeight(self.gathers, *held, tensor)


class SavedWeight(saved.Taken):
    """A view of a gathered unit that autograd wants back: where it lay, and which version its parameter had."""

    def __init__(self, gathers: Gathers, unit: GatheredUnit, role: Sharded, view: torch.Tensor) -> None:
        self.gathers, self.unit, self.role = gathers, unit, role
        self.shape, self.stride, self.offset = tuple(view.shape), view.stride(), view.storage_offset()
        self.parameter = role.parameters[role.slot_of(view)]
        self.version = self.parameter._version

    def read(self) -> torch.Tensor:
        if self.parameter._version != self.version:
            raise StateError(f"backward through a forward that ran before the last engine.step() or write: the weights "
                             f"of {self.unit.name!r} have moved since; run the forward again")
        self.gathers.need(self.unit)
        return self.role.full.as_strided(self.shape, self.stride, self.offset)
