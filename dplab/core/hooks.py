"""Hooks on parameters (a gradient is coming, has come) and around the model's forward.

(The hooks that gather ZeRO-3 units are with the units, in `gathers`.)
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from dplab.core import precision
from dplab.core.bucket import Bucket
from dplab.core.gathers import UnitHooks, in_backward, in_transform
from dplab.core.ledger import Ledger
from dplab.core.reduction import Reduction
from dplab.errors import StateError
from dplab.specs import Precision
from dplab.telemetry.recorder import now


def hook_parameters(reduction: Reduction) -> None:
    """Tells `reduction` before autograd adds to a parameter's gradient, and after."""
    # weak: torch's garbage collector does not see through a post-accumulate hook
    reopen, came = weakref.WeakMethod(reduction.reopen), weakref.WeakMethod(reduction.came)

    def hook(place: int, slot: int, parameter: nn.Parameter) -> None:
        def before(_grad: torch.Tensor) -> None:
            if (call := reopen()) is not None:
                call()

        def after(arrived: nn.Parameter) -> None:
            if (call := came()) is not None:
                # hooks registered since run after ours, and may change the gradient
                call(place, slot, more=len(arrived._post_accumulate_grad_hooks or ()) > ours)

        parameter.register_hook(before)  # type: ignore[no-untyped-call]
        parameter.register_post_accumulate_grad_hook(after)  # type: ignore[no-untyped-call]
        ours = len(parameter._post_accumulate_grad_hooks or ())

    for place, bucket in enumerate(reduction.buckets):
        for slot, parameter in enumerate(bucket.parameters):
            hook(place, slot, parameter)


def refuse_copies(model: nn.Module) -> None:
    """A copy would carry these hooks, and with them the ranks' shards: copy.deepcopy and pickle are told so."""
    def refuse(*_: Any) -> Any:
        raise StateError(f"{type(model).__name__} is wrapped by dplab.parallelize and cannot be copied or pickled; "
                         f"copy it before, or build it anew and load engine.full_state_dict() into it")

    model.__deepcopy__ = model.__reduce_ex__ = refuse  # type: ignore[assignment, method-assign]


def refuse_whole(model: nn.Module, buckets: Sequence[Bucket]) -> None:
    """What needs every weight at once is told so while they are sharded."""
    def away() -> bool:
        return not all(bucket.params.resident for bucket in buckets)

    def state_dict(_module: nn.Module, _prefix: str, keep_vars: bool) -> None:
        # the parameters themselves may be listed: each refuses to be read
        if not keep_vars and away():
            raise StateError("model.state_dict() has no values while the parameters are sharded; call "
                             "engine.full_state_dict(), or read it inside engine.gathered()")

    def load_state_dict(*_: Any) -> None:
        if away():
            raise StateError("model.load_state_dict() has nowhere to put values while the parameters are sharded; call "
                             "it inside engine.gathered()")

    def compiled(*_: Any, **__: Any) -> None:
        raise StateError("model.compile() after dplab.parallelize would take the gathers into the graph; compile the "
                         "model's units (model.blocks[0].compile(), ...)")

    model.register_state_dict_pre_hook(state_dict)  # type: ignore[no-untyped-call]
    model.register_load_state_dict_pre_hook(load_state_dict)  # type: ignore[no-untyped-call]
    model.compile = compiled  # type: ignore[method-assign]


class ForwardHooks:
    """Around every forward of the model: its span, its dtypes, and once what autograd saves in it."""

    def __init__(self, model: nn.Module, reduction: Reduction, ledger: Ledger, chosen: Precision,
                 device: torch.device) -> None:
        self.reduction, self.ledger, self.chosen, self.device = reduction, ledger, chosen, device
        self._under_way: list[tuple[int, ExitStack]] = []
        model.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
        model.register_forward_hook(self._leave, always_call=True)

    def abandon(self, units: UnitHooks | None) -> None:
        """The forwards under way were interrupted: nothing of them stays switched on."""
        if units is not None:
            units.abandon()
        while self._under_way:
            self._under_way.pop()[1].close()

    def _enter(self, model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if not in_backward():
            self.reduction.abandon()  # a plain loss.backward() before may have raised
        around = ExitStack()
        around.enter_context(precision.autocast(self.chosen, self.device))
        if (self.ledger.due and torch.is_grad_enabled() and model.training and not in_backward()
                and not in_transform()):
            around.enter_context(self.ledger.measuring())
        self._under_way.append((self.reduction.recorder.open("forward", type(model).__name__), around))
        self.reduction.recorder.phase("forward")
        if self.chosen.param is None:
            return None
        dtype = precision.TORCH[self.chosen.param]
        cast: tuple[Any, Any] = tree_map_only(
            torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, (args, kwargs))
        return cast

    def _leave(self, model: nn.Module, _args: Any, _output: Any) -> None:
        start, around = self._under_way.pop()
        around.close()
        self.reduction.recorder.span("forward", type(model).__name__, start, now())
