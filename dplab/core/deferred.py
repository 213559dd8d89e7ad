"""A model that was built on the meta device: shapes without memory, given values unit by unit while it is laid out.

First every meta parameter becomes one of the right device that shares a single element (the same Python object, so
that optimizers and ties hold). Then modules get their memory and their values one after the other, children before
parents, each as its constructor would have come by them; a bucket is laid out, and for ZeRO-3 cut, as soon as no
module that may write to it is left. So the most that is whole at any time is one unit, and the root's own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from dplab.core.bucket import Bucket
from dplab.core.units import Unit
from dplab.errors import StateError, UsageError

Place = str | os.PathLike[str]
Fill = Callable[[str, nn.Module], Any]
"""Gives values to a module's own parameters and buffers, in place; called with the module's path and the module."""


class Deferred:
    """What of `model` is on the meta device and how it comes by its values.

    `fill`: the user's function; None: the model's own `_init_weights` and each module's `reset_parameters`. `place`:
    the file that holds what is in the state_dict; it is read later, and only what is not in it is filled.
    """

    def __init__(self, model: nn.Module, fill: Fill | None = None, place: Place | None = None) -> None:
        self.model, self.fill, self.place = model, fill, place
        self.names = {parameter: name for name, parameter in model.named_parameters() if parameter.is_meta}
        self._buffers = {(module, name) for module in model.modules()
                         for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
        self._pending = set(self.names)
        self._device = torch.device("cpu")

    @classmethod
    def of(cls, model: nn.Module, materialize: Fill | Place | None) -> Deferred:
        """As `parallelize` is given it. Raises UsageError for something else, and where there is nothing to fill."""
        if materialize is not None and not callable(materialize) and not isinstance(materialize, str | os.PathLike):
            raise UsageError(f"materialize is of type {type(materialize).__name__}; it is a function of path and "
                             f"module, the path of a file or folder, or None")
        made = cls(model, materialize) if callable(materialize) else cls(model, place=materialize)
        if materialize is not None and not made:
            raise UsageError("materialize was given, and nothing of the model is on the meta device; leave it out (a "
                             "file is read by engine.load), or build the model under torch.device('meta')")
        return made

    def __bool__(self) -> bool:
        return bool(self.names or self._buffers)

    def move(self, device: torch.device) -> None:
        """The model goes to `device`: what has values with them, the rest without memory."""
        self._device = device
        for parameter, name in self.names.items():
            stub = nn.Parameter(torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape),
                                requires_grad=parameter.requires_grad)
            stub.__class__ = type(parameter)
            stub.__dict__.update(parameter.__dict__)
            try:
                torch.utils.swap_tensors(parameter, stub)  # type: ignore[no-untyped-call]
            except RuntimeError as error:
                raise UsageError(f"parameter {name!r} on the meta device is held by something else ({error}), and "
                                 f"cannot be given memory; wrap the model before other tools look at it") from error
        made: dict[torch.Tensor, torch.Tensor] = {}
        for module, name in self._buffers:
            buffer = module._buffers[name]
            assert buffer is not None
            module._buffers[name] = made.setdefault(buffer, _unset(buffer, device))
        self.model.to(device)

    def laid(self, buckets: Sequence[Bucket], units: Sequence[Unit]) -> Iterator[Bucket]:
        """Buckets, each as soon as its parameters have their values; those of a model that has them all, in order."""
        if not self:
            yield from buckets
            return
        left = self._writers(buckets, units)
        ready = {bucket for bucket in buckets if not left[bucket]}
        yield from (bucket for bucket in buckets if bucket in ready)
        for path, module in _children_first(self.model):
            self._give(path, module)
            for bucket in buckets:
                left[bucket].discard(module)
                if not left[bucket] and bucket not in ready:
                    ready.add(bucket)
                    yield bucket

    def _writers(self, buckets: Sequence[Bucket], units: Sequence[Unit]) -> dict[Bucket, set[nn.Module]]:
        """Modules whose turn may write to a bucket: those that hold its parameters, and what is around them inside
        their unit."""
        named = dict(self.model.named_modules())
        inside = sorted((unit.name for unit in units if not unit.is_root), key=len, reverse=True)
        users: dict[nn.Parameter, set[nn.Module]] = {}
        for path, module in named.items():
            unit = next((name for name in inside if f"{path}.".startswith(f"{name}.")), None)
            around = {module}
            while unit is not None and path != unit:
                path = path.rpartition(".")[0]
                around.add(named[path])
            for parameter in module._parameters.values():
                if parameter is not None:
                    users.setdefault(parameter, set()).update(around)
        return {bucket: set().union(*(users[p] for p in bucket.parameters)) if any(
            p in self.names for p in bucket.parameters) else set() for bucket in buckets}

    def _give(self, path: str, module: nn.Module) -> None:
        """Memory and values for a module's own parameters and buffers."""
        own = {name: p for name, p in module._parameters.items() if p is not None and p in self.names}
        new = [name for name, parameter in own.items() if parameter in self._pending]
        for name in new:
            own[name].data = _unset(own[name], self._device)
            self._pending.discard(own[name])
        stored = self.place is not None
        buffers = [name for name in module._buffers if (module, name) in self._buffers and not (
            stored and name not in module._non_persistent_buffers_set)]
        where = f"module {path!r} ({type(module).__name__})"
        if (new and not stored) or buffers:
            self._fill(path, module, where, tied=[p for name, p in own.items() if name not in new])
        elif self.fill is None and not stored:
            self._of_model(module, where)      # a container, whose turn the model's own function may want
        for name in buffers if stored else (*new, *buffers):
            value = own[name] if name in own else module._buffers[name]
            if value is not None and value.is_floating_point() and bool(value.detach().isnan().any()):
                raise UsageError(f"{where} has left {name!r} without values; {_REMEDY}")
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise UsageError(f"{where} keeps tensor {name!r} on the meta device, which is no parameter or buffer; "
                                 f"register it as a buffer (persistent=False), or build the model on the CPU")

    @torch.no_grad()
    def _fill(self, path: str, module: nn.Module, where: str, *, tied: Sequence[nn.Parameter]) -> None:
        # a weight that is tied to an earlier module has its values; this one's go as they do in the constructor
        before = [(parameter, parameter.clone()) for parameter in tied]
        if self.fill is not None:
            self.fill(path, module)
        else:
            reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if callable(reset):
                reset()
            if not self._of_model(module, where) and not callable(reset):
                held = [name for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(
                    recurse=False))]
                raise UsageError(f"{where} holds {', '.join(map(repr, held))} on the meta device and has no "
                                 f"reset_parameters(); {_REMEDY}")
        for parameter, value in before:
            parameter.copy_(value)

    @torch.no_grad()
    def _of_model(self, module: nn.Module, where: str) -> bool:
        """Calls the model's own `_init_weights`, as transformers and many others name it; whether there is one."""
        start = getattr(self.model, "_init_weights", None)
        if not callable(start):
            return False
        try:
            start(module)
        except StateError as error:
            raise UsageError(f"{type(self.model).__name__}._init_weights, called for {where}, writes to parameters of "
                             f"other units, which are cut by then; {_REMEDY}") from error
        return True


_REMEDY = ("give parallelize(materialize=...) a function of path and module that fills it, a checkpoint or a "
           ".safetensors file, or build the model on the CPU")


def _children_first(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """In the order in which constructors end."""
    found: list[tuple[str, nn.Module]] = []
    seen: set[nn.Module] = set()

    def visit(path: str, module: nn.Module) -> None:
        if module in seen:
            return
        seen.add(module)
        for name, child in module.named_children():
            visit(f"{path}.{name}" if path else name, child)
        found.append((path, module))

    visit("", model)
    return found


def _unset(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory of a tensor's shape, in which a missing value shows: NaN, or zero for integers."""
    value: Any = float("nan") if like.is_floating_point() or like.is_complex() else 0
    return torch.full(like.shape, value, dtype=like.dtype, device=device)
