"""The user's optimizer, made to step only what this rank owns.

Its groups keep their options, order and number; the parameters in them are replaced by *runs*: stretches of
owned shards, as long as neighbours have the same group and the same fate (a fused AdamW over one stretch is
a third faster than over 25 pieces) and, on a CPU, no longer than its cache is good for. A slot that moved
nowhere is not stepped at all: no decay, no momentum, so a run is split for good, its state with it, the first
time its slots differ in that.

Cutting parameters is right only for an element-wise optimizer. That is found out by trying it.
"""

from __future__ import annotations

import copy
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from dplab.core import absent
from dplab.core.bucket import Bucket
from dplab.core.element_wise import fresh_state, is_element_wise
from dplab.errors import StateError, UsageError
from dplab.layout import CACHED

OptimizerLike = torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass
class Run:
    """Elements [start, stop) of a bucket's owned shard, holding `slots`; `parameter` is what the optimizer sees.

    Outside the optimizer's step it refuses to be read: a user who clips, clamps or averages what stands in
    param_groups would do so to this rank's piece.
    """

    bucket: Bucket
    start: int
    stop: int
    slots: tuple[int, ...]
    parameter: nn.Parameter

    def __post_init__(self) -> None:
        absent.mark(self.parameter, partial(_piece, self.bucket.names[self.slots[0]], self.bucket.mesh.world.rank))
        self.close()

    def open(self, grad: torch.Tensor | None) -> None:
        """The optimizer may step it."""
        self.parameter.__class__ = nn.Parameter
        self.parameter.grad = grad

    def close(self) -> None:
        """It refuses to be read, and so does its gradient from the end of a window on."""
        self.parameter.grad = None
        self.parameter.__class__ = absent.absent(nn.Parameter)

    def show_cut(self) -> None:
        """The window has closed: there is a gradient, which is not to be read here."""
        self.parameter.grad = self._cut

    @cached_property
    def _cut(self) -> absent.CutGradient:
        return absent.CutGradient.of(self.bucket.names[self.slots[0]], self.parameter)


def _piece(name: str, rank: int) -> str:
    return (f"what stands in the optimizer's param_groups is what rank {rank} steps, laid flat ({name!r} and what "
            f"follows it); read or write weights inside engine.gathered(), and clip with engine.clip_grad_norm_(...)")


def make(optimizer: OptimizerLike, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer itself, checked: built from the factory on the model's own parameters, or given."""
    made = optimizer if isinstance(optimizer, torch.optim.Optimizer) else _from_factory(optimizer, model)
    known = set(model.parameters())
    strangers = [p for group in made.param_groups for p in group["params"] if p not in known]
    if strangers:
        raise UsageError(f"optimizer {type(made).__name__} holds {len(strangers)} tensors that are no parameters of "
                         f"the model (the first has shape {tuple(strangers[0].shape)}); build it from "
                         f"model.parameters() before the model is changed or wrapped")
    if any(float(state.get("step", 0)) > 0 or (state and "step" not in state) for state in made.state.values()):
        raise UsageError(f"optimizer {type(made).__name__} has already stepped; give parallelize a fresh one")
    return made


def _from_factory(factory: Any, model: nn.Module) -> torch.optim.Optimizer:
    if not callable(factory):
        raise UsageError(f"optimizer is a {type(factory).__name__}; give a torch.optim.Optimizer, or a function that "
                         f"takes the parameters and returns one")
    made = factory(list(model.parameters()))
    if not isinstance(made, torch.optim.Optimizer):
        raise UsageError(f"the optimizer function returned a {type(made).__name__}; it must return a "
                         f"torch.optim.Optimizer")
    return made


class OwnedOptimizer:
    """Drives the user's optimizer over owned runs."""

    def __init__(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket], *, whole: bool) -> None:
        self.optimizer, self._whole = optimizer, whole
        self.element_wise = all(self._cuts(group) for group in optimizer.param_groups)
        self._place = {parameter: (bucket, slot) for bucket in buckets
                       for slot, parameter in enumerate(bucket.parameters) if bucket.trainable}
        self._grouped: set[nn.Parameter] = set()
        # some optimizers (Adagrad) make their state at once
        early, optimizer.state = optimizer.state, defaultdict(dict)
        self.runs: list[list[Run]] = []
        self.members: list[list[nn.Parameter]] = []
        """the model's own parameters of each group, as the user put them there"""
        for group in optimizer.param_groups:
            self.members.append(list(group["params"]))
            self.runs.append(self._runs(group["params"]))
            group["params"] = [run.parameter for run in self.runs[-1]]
            for run in self.runs[-1]:
                first = run.bucket.parameters[run.slots[0]]
                if first in early:
                    optimizer.state[run.parameter] = fresh_state(early[first], first, run.parameter)
        # a GradScaler would otherwise fail for want of gradients before it comes to the refusal
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        optimizer.step = types.MethodType(_refuse_step, optimizer)  # type: ignore[method-assign]
        optimizer.add_param_group = self.add_group  # type: ignore[method-assign, assignment]

    def add_group(self, group: dict[str, Any]) -> None:
        """As torch.optim.Optimizer.add_param_group: the model's parameters that no group has had so far."""
        given: list[Any] = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
        for parameter in given:
            if parameter not in self._place or parameter in self._grouped:
                why = "is in another group already" if parameter in self._grouped else \
                    "was not trained when the model was wrapped"
                raise UsageError(f"add_param_group: a parameter of shape {tuple(parameter.shape)} {why}; add what the "
                                 f"model trained from the start and no group has")
        if self._cuts({**self.optimizer.defaults, **group, "params": given}) != self.element_wise:
            raise UsageError("add_param_group: the other groups can be cut element by element and this one cannot; "
                             "give it the options of theirs")
        runs = self._runs(given)
        type(self.optimizer).add_param_group(self.optimizer, {**group, "params": [run.parameter for run in runs]})
        self.runs.append(runs)
        self.members.append(given)

    def split(self, fate: Callable[[Bucket, int], Hashable]) -> None:
        """Cuts runs, and their state, wherever two slots that follow each other have different fates."""
        for group, runs in zip(self.optimizer.param_groups, self.runs, strict=True):
            if any(len({fate(run.bucket, slot) for slot in run.slots}) > 1 for run in runs):
                runs[:] = [piece for run in runs for piece in self._split(run, fate)]
                group["params"] = [run.parameter for run in runs]

    def step(self) -> None:
        """One step of every run that moved; the others keep their state as it is."""
        self.split(lambda bucket, slot: bucket.moved[slot])
        for runs in self.runs:
            for run in runs:
                assert run.bucket.grads is not None
                moved = run.bucket.moved[run.slots[0]]
                # a cast where a master copy is stepped: it lives until the end of this step
                grad = run.bucket.grads.owned[run.start:run.stop].to(run.parameter.dtype)
                if run.bucket.divisor != 1.0:
                    grad = grad / run.bucket.divisor
                run.open(grad.view(run.parameter.shape) if moved else None)
        # a scheduler watches for this mark, which its own wrapper around step would have set
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        with self._without_hooks():
            type(self.optimizer).step(self.optimizer)
        self.close()

    def close(self) -> None:
        """The window is over: no gradient anywhere."""
        for runs in self.runs:
            for run in runs:
                run.close()

    def show_cut(self) -> None:
        """The window has closed: gradients in param_groups are there, and refuse to be read."""
        for runs in self.runs:
            for run in runs:
                run.show_cut()

    def options(self) -> list[dict[str, str]]:
        """Every group's options as text, by name."""
        return [{name: repr(float(value)) if isinstance(value, torch.Tensor) and value.numel() == 1 else repr(value)
                 for name, value in group.items() if name != "params"} for group in self.optimizer.param_groups]

    def run_hooks(self, *, before: bool) -> None:
        """The user's own step hooks: before anything is opened, and after the weights are everybody's."""
        hooks = self.optimizer._optimizer_step_pre_hooks if before else self.optimizer._optimizer_step_post_hooks
        for hook in list(hooks.values()):
            hook(self.optimizer, (self.optimizer,), {})

    @contextmanager
    def _without_hooks(self) -> Iterator[None]:
        mine = self.optimizer
        kept = mine._optimizer_step_pre_hooks, mine._optimizer_step_post_hooks
        mine._optimizer_step_pre_hooks, mine._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        try:
            yield
        finally:
            mine._optimizer_step_pre_hooks, mine._optimizer_step_post_hooks = kept

    @property
    def state_bytes(self) -> int:
        """Bytes of all state tensors that lie along a run (moments, momentum); step counters are not counted."""
        return sum(value.numel() * value.element_size() for parameter, state in self.optimizer.state.items()
                   for key, value in state.items()
                   if isinstance(value, torch.Tensor) and value.shape == parameter.shape and key != "step")

    @property
    def on_host(self) -> bool:
        """Whether it steps in the host's memory, beside the device."""
        return any(run.bucket.params.steps_on_host for runs in self.runs for run in runs)

    def _cuts(self, group: dict[str, Any]) -> bool:
        """Whether the optimizer with this group's options may be cut; UsageError where it must be and may not."""
        element_wise = is_element_wise(self.optimizer, group)
        if not self._whole and not element_wise:
            raise UsageError(f"optimizer {type(self.optimizer).__name__} is not element-wise: it needs whole "
                             f"parameters, and this strategy cuts them; use strategy 'ddp' or an element-wise "
                             f"optimizer (SGD, Adam, AdamW, ...)")
        return element_wise

    def _runs(self, parameters: Iterable[Any]) -> list[Run]:
        """What this rank owns of `parameters`, those that are trained."""
        mine = [parameter for parameter in parameters if parameter in self._place]
        self._grouped |= set(mine)
        if not self.element_wise:
            return _whole_slots([self._place[parameter] for parameter in mine])  # in the user's order
        return _merged(sorted((self._place[p] for p in mine), key=lambda at: (at[0].index, at[1])))

    def _split(self, run: Run, fate: Callable[[Bucket, int], Hashable]) -> list[Run]:
        """Cuts a run where its slots' fates differ; every piece takes its part of the state along."""
        fates = [fate(run.bucket, slot) for slot in run.slots]
        if len(set(fates)) == 1:
            return [run]
        bounds = {slot: (start, stop) for slot, start, stop in run.bucket.owned_slots()}
        cuts = [i for i in range(1, len(fates)) if fates[i] != fates[i - 1]]
        state = self.optimizer.state.pop(run.parameter, None)
        pieces = []
        for first, last in zip([0, *cuts], [*cuts, len(fates)], strict=True):
            slots = run.slots[first:last]
            start = run.start if first == 0 else bounds[slots[0]][0]
            stop = run.stop if last == len(fates) else bounds[run.slots[last]][0]
            piece = _run(run.bucket, start, stop, slots)
            if state is not None:
                part = slice(start - run.start, stop - run.start)
                self.optimizer.state[piece.parameter] = {
                    key: _part(value, part, run.parameter) for key, value in state.items()}
            pieces.append(piece)
        return pieces


def _part(value: Any, part: slice, along: torch.Tensor) -> Any:
    if isinstance(value, torch.Tensor):
        return value[part].clone() if value.shape == along.shape else value.clone()
    return copy.copy(value)


def _run(bucket: Bucket, start: int, stop: int, slots: Sequence[int]) -> Run:
    return Run(bucket, start, stop, tuple(slots), nn.Parameter(bucket.params.stepped[start:stop]))


def _merged(places: Sequence[tuple[Bucket, int]]) -> list[Run]:
    """Runs over what this rank owns of `places`; slots that follow each other in a shard share one."""
    wanted: dict[Bucket, set[int]] = defaultdict(set)
    for bucket, slot in places:
        wanted[bucket].add(slot)
    runs = []
    for bucket, slots in wanted.items():
        stretch: list[tuple[int, int, int]] = []
        for owned in [*bucket.owned_slots(), None]:
            if owned is not None and owned[0] in slots:
                stretch.append(owned)
            elif stretch:
                runs += _cut(bucket, stretch)
                stretch = []
    return runs


def _cut(bucket: Bucket, stretch: Sequence[tuple[int, int, int]]) -> list[Run]:
    """A run for each part of a stretch that fits a core's cache; of a GPU, one for all of it."""
    begin, end = stretch[0][1], stretch[-1][2]
    size = CACHED if bucket.params.stepped.device.type == "cpu" else end - begin
    runs = []
    for start in range(begin, end, size):
        stop = min(end, start + size)
        runs.append(_run(bucket, start, stop, [slot for slot, low, high in stretch if low < stop and start < high]))
    return runs


def _whole_slots(places: Sequence[tuple[Bucket, int]]) -> list[Run]:
    """One run a parameter, in its own shape, for optimizers that need to see it whole."""
    runs = []
    for bucket, slot in places:
        at = bucket.layout.slots[slot]
        whole = bucket.params.stepped[at.start:at.stop].view(at.shape)
        runs.append(Run(bucket, at.start, at.stop, (slot,), nn.Parameter(whole)))
    return runs


def _refuse_step(self: torch.optim.Optimizer, *_args: Any, **_kwargs: Any) -> None:
    raise StateError(f"{type(self).__name__}.step() was called directly; call engine.step(), which reduces the "
                     f"gradients first (with a GradScaler: drop it and choose a precision in the strategy)")


# a scheduler made before the wrap looks for its own mark and would warn that step was replaced
_refuse_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
