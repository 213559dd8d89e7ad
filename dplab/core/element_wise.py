"""Whether an optimizer works element by element, so that its parameters may be cut; found out by trying it."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dplab.errors import UsageError

_PIECES = [(0, 8), (8, 128), (128, 384), (384, 512)]


def is_element_wise(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether cutting a group's parameters leaves the result the same: a small matrix is stepped both ways.

    Pieces are stepped by one optimizer, and each by its own, as ranks do: what looks at sizes, at places in the
    group or at several parameters together (a norm over all gradients) shows too. Raises UsageError for an
    optimizer that cannot be stepped without a closure, and for one that does not step the parameters of its
    param_groups.
    """
    name, generator = type(optimizer).__name__, torch.get_rng_state()
    try:
        whole = _probe(optimizer, group, [[(0, 512)]], cut=False)
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
        together = _probe(optimizer, group, [_PIECES], cut=True)
        alone = _probe(optimizer, group, [[piece] for piece in _PIECES], cut=True)
    except (RuntimeError, ValueError, TypeError, AssertionError, IndexError):
        return False  # it needs the matrix
    finally:
        if not torch.equal(generator, torch.get_rng_state()):
            torch.set_rng_state(generator)
    return all(torch.allclose(whole, cut, rtol=1e-12, atol=1e-12) for cut in (together, alone))


def _ramp(device: torch.device) -> torch.Tensor:
    # float64: what may differ is the rule, not the rounding of another vector width
    return torch.linspace(-1.0, 1.0, 512, dtype=torch.float64, device=device).view(16, 32)


def _probe(optimizer: torch.optim.Optimizer, group: dict[str, Any], ranks: Sequence[Sequence[tuple[int, int]]], *,
           cut: bool) -> torch.Tensor:
    """The matrix after three steps with the group's options: whole, or the flat pieces of each rank by an optimizer."""
    device = group["params"][0].device if group["params"] else torch.device("cpu")
    ramp = _ramp(device)
    matrix = ramp.clone()
    for pieces in ranks:
        parameters = [nn.Parameter(matrix.view(-1)[a:b] if cut else matrix) for a, b in pieces]
        trial = _trial(optimizer, group, parameters)
        for turn in range(1, 4):
            slope = torch.cos(ramp * 7 * turn)
            for parameter, (a, b) in zip(parameters, pieces, strict=True):
                parameter.grad = slope.view(-1)[a:b].clone() if cut else slope
            type(optimizer).step(trial)
    return matrix


def _trial(optimizer: torch.optim.Optimizer, group: dict[str, Any],
           parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """A copy of the optimizer, with the group's options and without the user's hooks, for these parameters."""
    trial = copy.copy(optimizer)
    trial.__dict__ = {**optimizer.__dict__, "state": defaultdict(dict), "_optimizer_step_pre_hooks": OrderedDict(),
                      "_optimizer_step_post_hooks": OrderedDict()}
    options = {key: _own(value) for key, value in group.items() if key != "params"}
    if "lr" in options and not float(options["lr"]):
        # a warm-up starts at 0, where nothing would move
        options["lr"] = options["lr"] + 1e-3
    trial.param_groups = [{**options, "params": parameters}]
    for first in group["params"][:1]:
        if first in optimizer.state:
            trial.state |= {each: fresh_state(optimizer.state[first], first, each) for each in parameters}
    return trial


def fresh_state(state: dict[str, Any], of: torch.Tensor, like: torch.Tensor) -> dict[str, Any]:
    """State of a parameter that has never stepped, and so is the same all over, for another one."""
    def spread(key: str, value: Any) -> Any:
        # a 0-dim parameter's moments have the shape of its step counter
        along = isinstance(value, torch.Tensor) and value.shape == of.shape and key != "step"
        return torch.full_like(like, value.flatten()[0].item()) if along and value.numel() else _own(value)

    return {key: spread(key, value) for key, value in state.items()}


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)
