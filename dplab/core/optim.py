"""The user's optimizer, made to step only what this rank owns.

Its groups keep their options, order and number; the parameters in them are replaced by *runs*: stretches of
owned shards, as long as neighbours have the same group and the same fate (a fused AdamW over one stretch is
a third faster than over 25 pieces). A slot that moved nowhere is not stepped at all: no decay, no momentum,
so a run is split for good, its state with it, the first time its slots differ in that.

Cutting parameters is right only for an element-wise optimizer. That is found out by trying it.
"""

from __future__ import annotations

import copy
import types
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dplab.core.bucket import Bucket
from dplab.errors import StateError, UsageError

OptimizerLike = torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass
class Run:
    """Elements [start, stop) of a bucket's owned shard, holding `slots`; `parameter` is what the optimizer sees."""

    bucket: Bucket
    start: int
    stop: int
    slots: tuple[int, ...]
    parameter: nn.Parameter


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
                    optimizer.state[run.parameter] = _fresh_state(early[first], first, run.parameter)
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
                run.parameter.grad = grad.view(run.parameter.shape) if moved else None
        # a scheduler watches for this mark, which its own wrapper around step would have set
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        type(self.optimizer).step(self.optimizer)
        for runs in self.runs:
            for run in runs:
                run.parameter.grad = None

    @property
    def state_bytes(self) -> int:
        """Bytes of all state tensors that lie along a run (moments, momentum); step counters are not counted."""
        return sum(value.numel() * value.element_size() for parameter, state in self.optimizer.state.items()
                   for key, value in state.items()
                   if isinstance(value, torch.Tensor) and value.shape == parameter.shape and key != "step")

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
        places = sorted((self._place[p] for p in mine), key=lambda at: (at[0].index, at[1]))
        return _merged(places) if self.element_wise else _whole_slots(places)

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


def _fresh_state(state: dict[str, Any], of: torch.Tensor, like: torch.Tensor) -> dict[str, Any]:
    """State of a parameter that has never stepped, and so is the same all over, for another one."""
    def spread(key: str, value: Any) -> Any:
        # a 0-dim parameter's moments have the shape of its step counter
        along = isinstance(value, torch.Tensor) and value.shape == of.shape and key != "step"
        return torch.full_like(like, value.flatten()[0].item()) if along and value.numel() else _own(value)

    return {key: spread(key, value) for key, value in state.items()}


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
                runs.append(_run(bucket, stretch[0][1], stretch[-1][2], [slot for slot, _, _ in stretch]))
                stretch = []
    return runs


def _whole_slots(places: Sequence[tuple[Bucket, int]]) -> list[Run]:
    """One run a parameter, in its own shape, for optimizers that need to see it whole."""
    runs = []
    for bucket, slot in places:
        at = bucket.layout.slots[slot]
        run = _run(bucket, at.start, at.stop, [slot])
        run.parameter = nn.Parameter(bucket.params.stepped[at.start:at.stop].view(at.shape))
        runs.append(run)
    return runs


def is_element_wise(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether cutting a group's parameters leaves the result the same: a small matrix is stepped both ways.

    Each piece has an optimizer of its own, as each rank has: what looks at several parameters at once (a norm
    over all gradients) shows too. Raises UsageError for an optimizer that cannot be stepped without a closure,
    and for one that does not step the parameters of its param_groups.
    """
    name = type(optimizer).__name__
    try:
        whole = _probe(optimizer, group, [(0, 512)], cut=False)
    except TypeError as error:
        raise UsageError(f"optimizer {name} cannot step without a closure, and engine.step() has none to give "
                         f"({error}); use another optimizer") from error
    except RuntimeError as error:
        raise UsageError(f"optimizer {name} cannot step a dense gradient ({error}), and gradients are dense here, "
                         f"those of sparse embeddings too; use another optimizer") from error
    if torch.equal(whole, _ramp(whole.device)):
        raise UsageError(f"optimizer {name} does not move the parameters that stand in its param_groups when its "
                         f"step() is called (it may keep a list of its own); use one that steps param_groups")
    try:
        cut = _probe(optimizer, group, [(0, 128), (128, 384), (384, 512)], cut=True)
    except (RuntimeError, ValueError, TypeError, AssertionError, IndexError):
        return False  # it needs the matrix
    return torch.allclose(whole, cut, rtol=1e-12, atol=1e-12)


def _ramp(device: torch.device) -> torch.Tensor:
    # float64: what may differ is the rule, not the rounding of another vector width
    return torch.linspace(-1.0, 1.0, 512, dtype=torch.float64, device=device).view(16, 32)


def _probe(optimizer: torch.optim.Optimizer, group: dict[str, Any], cuts: Sequence[tuple[int, int]], *,
           cut: bool) -> torch.Tensor:
    """The matrix after three steps with the group's options: whole, or its flat pieces by an optimizer each."""
    device = group["params"][0].device if group["params"] else torch.device("cpu")
    ramp = _ramp(device)
    matrix = ramp.clone()
    for start, stop in cuts:
        parameter = nn.Parameter(matrix.view(-1)[start:stop] if cut else matrix)
        trial = _trial(optimizer, group, parameter)
        for turn in range(1, 4):
            slope = torch.cos(ramp * 7 * turn)
            parameter.grad = slope.view(-1)[start:stop].clone() if cut else slope
            type(optimizer).step(trial)
    return matrix


def _trial(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: nn.Parameter) -> torch.optim.Optimizer:
    """A copy of the optimizer, with the group's options, for one parameter."""
    trial = copy.copy(optimizer)
    trial.__dict__ = {**optimizer.__dict__, "state": defaultdict(dict)}
    options = {key: _own(value) for key, value in group.items() if key != "params"}
    if "lr" in options and not float(options["lr"]):
        # a warm-up starts at 0, where nothing would move
        options["lr"] = options["lr"] + 1e-3
    trial.param_groups = [{**options, "params": [parameter]}]
    for first in group["params"][:1]:
        if first in optimizer.state:
            trial.state |= {parameter: _fresh_state(optimizer.state[first], first, parameter)}
    return trial


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)


def _refuse_step(self: torch.optim.Optimizer, *_args: Any, **_kwargs: Any) -> None:
    raise StateError(f"{type(self).__name__}.step() was called directly; call engine.step(), which reduces the "
                     f"gradients first (with a GradScaler: drop it and choose a precision in the strategy)")


# a scheduler made before the wrap looks for its own mark and would warn that step was replaced
_refuse_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
