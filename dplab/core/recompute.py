"""Recomputation: a unit's forward keeps little, and runs again when backward asks for the rest.

torch.utils.checkpoint does it, around the whole call of a unit: its hooks, which gather ZeRO-3's weights, run again
with it. torch's generators draw the same numbers again; buffers show what they held before the forward and keep
what it left (batch norm counts once), so that every answer is the one of a plain run, to the bit.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.checkpoint import checkpoint

from dplab.core.gathers import in_transform, unseen
from dplab.core.ledger import Ledger
from dplab.core.params import checksum
from dplab.core.units import Unit
from dplab.errors import StateError, UsageError
from dplab.layout import MIB
from dplab.specs import Recompute
from dplab.telemetry.recorder import Recorder, now

_OPERATORS = {
    "attention": ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
                  "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
                  "_scaled_dot_product_fused_attention_overrideable"),
    "matmul": ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm"),
    "convolution": ("convolution",),
}

Place = tuple[nn.Module, str]
"""A module and the name of its buffer."""


@dataclass
class Cost:
    """What recomputing a unit saves and costs: bytes of the measured forward, ns of the last recomputation.

    `whole`: what a plain forward would save, without its inputs; `kept`: what stays of it all the same.
    """

    whole: int = 0
    kept: int = 0
    ns: int = 0


class Recomputed:
    """One unit whose calls are checkpointed while `on`; stands in for the module's own call."""

    def __init__(self, unit: Unit, keep: tuple[str, ...], ledger: Ledger, recorder: Recorder) -> None:
        self.name, self.module, self.ledger, self.recorder = unit.name, unit.module, ledger, recorder
        self.on, self.cost = True, Cost()
        self._kept = {getattr(torch.ops.aten, name).default for kind in keep for name in _OPERATORS[kind]
                      if hasattr(torch.ops.aten, name)}
        self._keeping: Keeping | None = None
        self._measured = False
        self._changing: dict[tuple[bool, ...], set[Place]] = {}
        # what nn.Module's __call__ goes through; a compiled unit has a call of its own
        attribute = "_call_impl" if unit.module._compiled_call_impl is None else "_compiled_call_impl"
        self._call: Callable[..., Any] = getattr(unit.module, attribute)
        unit.module.__dict__[attribute] = self
        unit.module.compile = self._compile  # type: ignore[method-assign]

    def _compile(self, *args: Any, **kwargs: Any) -> None:
        """As nn.Module.compile: what is checkpointed is compiled, and not the checkpoint."""
        self._call = torch.compile(self._call, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.on or not torch.is_grad_enabled() or in_transform():
            return self._call(*args, **kwargs)
        args, kwargs = _without_caches(self.name, args, kwargs)
        flags, before = self._buffers()
        versions = {place: _version(place) for place in before} if flags not in self._changing else {}
        calls = itertools.count()

        def run(*args: Any, **kwargs: Any) -> Any:
            if not next(calls):
                with self._measuring(args):
                    return self._call(*args, **kwargs)
            start = self.recorder.open("recompute", self.name)
            with _showing(before):
                try:
                    return self._call(*args, **kwargs)
                finally:      # torch leaves by an exception once it has all that backward asks for
                    self.cost.ns = now() - start
                    self.recorder.span("recompute", self.name, start, start + self.cost.ns,
                                       bytes=self.cost.whole - self.cost.kept)

        result = checkpoint(run, *args, use_reentrant=False, context_fn=self._contexts, **kwargs)
        if versions:
            modules = {place[0] for place in before if _changed(place, versions[place], before[place])}
            self._changing[flags] = {place for place in before if place[0] in modules}
            for place in set(before) - self._changing[flags]:
                del before[place]
        return result

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        if not self._kept:
            return nullcontext(), nullcontext()
        self._keeping = Keeping(self._kept)
        return self._keeping, Giving(self._keeping, self.name)

    def _buffers(self) -> tuple[tuple[bool, ...], dict[Place, torch.Tensor]]:
        """Copies of the buffers that a forward changes; of all of them in the first one under these train flags."""
        every = [(module, name) for module in self.module.modules()
                 for name, buffer in module._buffers.items() if buffer is not None]
        flags = tuple(module.training for module in self.module.modules()) if every else ()
        changing = self._changing.get(flags, every)
        with unseen():
            return flags, {place: place[0]._buffers[place[1]].clone() for place in changing}  # type: ignore[union-attr]

    @contextmanager
    def _measuring(self, args: Any) -> Iterator[None]:
        """Once: counts what this forward leaves."""
        if self._measured:
            yield
            return
        self._measured = True
        inputs = {tensor.untyped_storage().data_ptr() for tensor in tree_leaves(args)
                  if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided}
        with self.ledger.counting() as saved:
            yield
        self.cost.whole = sum(size for address, size in saved.items() if address not in inputs)
        self.cost.kept = 0 if self._keeping is None else self._keeping.nbytes


class Keeping(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Around a forward: holds the results of these operators, in order, each with the version that it had.

    torch has such a pair of modes too; theirs holds every operator of a recomputation against the forward's, which
    autocast's cache of casts does not stand, and gives its results once.
    """

    def __init__(self, operators: set[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators = operators
        self.results: dict[Any, list[Any]] = {operator: [] for operator in operators}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @property
    def nbytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for results in self.results.values()
                   for tensor, _ in tree_leaves(results, is_leaf=_is_held))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in self.operators:
            # below autograd a plain detach would have a version counter of its own
            with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
                held = tree_map_only(torch.Tensor, lambda tensor: (tensor.detach(), tensor._version), result)
            self.results[function].append(held)
        return result


class Giving(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Around the recomputation of the same: gives what was held instead of calling the operator."""

    def __init__(self, keeping: Keeping, unit: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keeping, self.unit = keeping, unit
        self._next: dict[Any, Iterator[Any]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self) -> Any:
        self._next = {operator: iter(results) for operator, results in self.keeping.results.items()}
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in self._next:
            return function(*args, **(kwargs or {}))
        return tree_map(lambda held: self._give(function, *held) if _is_held(held) else held,
                        next(self._next[function]), is_leaf=_is_held)

    def _give(self, function: Any, tensor: torch.Tensor, version: int) -> torch.Tensor:
        if tensor._version != version:
            raise StateError(f"unit {self.unit!r} changes the result of {function} in place, which "
                             f"recompute=keep:... holds for its backward; leave that kind out, or write the operator "
                             f"behind it without in-place")
        return tensor.detach()


def _is_held(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], torch.Tensor) and type(value[1]) is int


def recomputable(model: nn.Module, units: Sequence[Unit], rule: Recompute) -> list[Unit]:
    """The units that `rule` is about: the innermost ones; none where nothing is to be computed again.

    Raises UsageError where a model has none, or checkpoints by itself.
    """
    if not rule.on:
        return []
    for path, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            raise UsageError(f"the model's own gradient checkpointing is on (in {path or type(model).__name__!r}), and "
                             f"the strategy would compute the same again a second time; call "
                             f"model.gradient_checkpointing_disable(), or leave recompute out of the strategy")
    inner = [unit for unit in units if not unit.is_root and not any(
        other.name.startswith(f"{unit.name}.") for other in units)]
    if not inner:
        raise UsageError(f"strategy recompute={rule.text}: {type(model).__name__} has no unit that could be "
                         f"computed again; name modules in parallelize(units=...), such as its blocks")
    return inner


class Recomputation:
    """The units of a model that are computed again: all that `recomputable` found, or as few as a budget asks for."""

    def __init__(self, units: Sequence[Unit], rule: Recompute, ledger: Ledger, recorder: Recorder) -> None:
        self.rule, self.ledger = rule, ledger
        self.units = [Recomputed(unit, rule.keep, ledger, recorder) for unit in units]
        self._settled = rule.budget is None
        ledger.hidden = lambda: self.kept_bytes

    @property
    def kept_bytes(self) -> int:
        """Results that recomputed units keep where no saved-tensor hook sees them."""
        return sum(unit.cost.kept for unit in self.units if unit.on)

    def table(self) -> dict[str, dict[str, Any]]:
        """By unit: `recomputed`, `saved_bytes` of one forward, `kept_bytes` of it, `ms` of the last recomputation."""
        return {unit.name: {"recomputed": unit.on, "saved_bytes": (unit.cost.whole - unit.cost.kept) * unit.on,
                            "kept_bytes": unit.cost.kept if unit.on else unit.cost.whole,
                            "ms": unit.cost.ns / 1e6} for unit in self.units}

    def settle(self, gather: Callable[[Any], list[Any]]) -> None:
        """At the end of a step, collective until the budget has chosen: all ranks choose the same units.

        Raises UsageError where even recomputing all of them takes more.
        """
        if self._settled:
            return
        every = gather([self.ledger.activations, *(unit.cost.whole for unit in self.units)])
        base, *whole = (max(column) for column in zip(*every, strict=True))
        if not base:
            return      # no rank has run a forward yet
        self._settled = True
        assert self.rule.budget is not None
        chosen, peak = within(self.rule.budget, base, whole)
        if peak > self.rule.budget:
            raise UsageError(f"strategy recompute={self.rule.text}: with every unit computed again activations still "
                             f"take {peak / MIB:.1f} MiB; give at least {math.ceil(peak * 10 / MIB) / 10:g}mb, or a "
                             f"smaller batch")
        for place, unit in enumerate(self.units):
            unit.on = place in chosen
        self.ledger.due = True


def within(budget: int, base: int, whole: Sequence[int]) -> tuple[set[int], int]:
    """The fewest units to compute again so that activations peak within `budget` bytes, and that peak.

    `base`: bytes that a forward keeps with every unit computed again; `whole`: what each adds where it is not. The
    peak is what is kept, and the largest unit computed again, which backward holds whole for a while.
    """
    chosen: set[int] = set()
    order = iter(sorted(range(len(whole)), key=lambda place: (-whole[place], place)))
    while True:
        kept = base + sum(size for place, size in enumerate(whole) if place not in chosen)
        peak = kept + max((whole[place] for place in chosen), default=0)
        if peak <= budget or len(chosen) == len(whole):
            return chosen, peak
        chosen.add(next(order))


@contextmanager
def _showing(before: dict[Place, torch.Tensor]) -> Iterator[None]:
    """Buffers are what they were before the forward, and their own afterwards: other tensors, since what a
    recomputation saves may be one of them."""
    own = {place: place[0]._buffers[place[1]] for place in before}
    with unseen():
        for (module, name), value in before.items():
            module._buffers[name] = value.clone()
    try:
        yield
    finally:
        for (module, name), buffer in own.items():
            module._buffers[name] = buffer


def _version(place: Place) -> tuple[int, int]:
    buffer = place[0]._buffers[place[1]]
    return id(buffer), 0 if buffer is None else buffer._version


def _changed(place: Place, version: tuple[int, int], before: torch.Tensor) -> bool:
    # batch norm's kernel writes its running statistics without telling the version counter
    now = place[0]._buffers[place[1]]
    return _version(place) != version or now is None or checksum(now) != checksum(before)


def _without_caches(unit: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A key-value cache of transformers would be filled twice; training has no use for one."""
    def is_cache(value: Any) -> bool:
        return any(kind.__name__ == "Cache" and kind.__module__.startswith("transformers.")
                   for kind in type(value).__mro__)

    if not any(map(is_cache, (*args, *kwargs.values()))):
        return args, kwargs
    warnings.warn(f"unit {unit!r} is computed again in backward, which would fill its key-value cache twice: it is "
                  f"given none; use_cache=False in the model's config says the same", stacklevel=4)
    return (tuple(None if is_cache(value) else value for value in args),
            {name: None if is_cache(value) else value for name, value in kwargs.items()})
