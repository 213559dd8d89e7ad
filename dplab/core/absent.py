"""Tensors whose values are not here. Whoever reads one is told which it is and what to do, instead of getting NaN.

Shape, dtype and the like may be asked for, and assigning `.data`, `.grad` or `.requires_grad` is as ever; any
other function that meets such a tensor raises StateError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from dplab.errors import StateError

_PROPERTIES = ("shape", "dtype", "device", "layout", "names", "ndim", "itemsize", "nbytes", "is_leaf", "grad_fn",
               "requires_grad", "retains_grad", "_version", "_base", "_grad", "name", "output_nr", "is_cuda", "is_cpu",
               "is_meta", "is_sparse", "is_sparse_csr", "is_quantized", "is_nested", "is_mkldnn", "is_xpu", "is_mps",
               "_backward_hooks", "_post_accumulate_grad_hooks", "grad", "data")
_METHODS = ("size", "numel", "nelement", "dim", "ndimension", "stride", "storage_offset", "is_contiguous",
            "is_inference", "element_size", "is_floating_point", "is_complex", "is_signed", "is_same_size", "data_ptr",
            "get_device", "untyped_storage", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook",
            "retain_grad", "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "_is_view", "is_pinned",
            "is_shared")
_FUNCTIONS = (torch.is_floating_point, torch.is_complex, torch.numel, torch.zeros_like, torch.ones_like,
              torch.empty_like, torch.full_like, torch.rand_like, torch.randn_like,
              torch._has_compatible_shallow_copy_type)
_CASTS = ("to", "float", "double", "half", "bfloat16", "cpu", "cuda", "type", "contiguous")


def _accessors(names: Sequence[str], kind: str) -> set[Any]:
    return {getattr(getattr(torch.Tensor, name), kind) for name in names if hasattr(torch.Tensor, name)}


# what autograd asks of an input of its graph is where its gradient goes
_AUTOGRAD = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)

TELLS_NO_VALUE: set[Any] = (
    (_accessors(_PROPERTIES, "__get__") - {torch.Tensor.data.__get__})  # type: ignore[attr-defined]
    | {getattr(torch.Tensor, name).__set__ for name in ("data", "grad", "requires_grad")}
    | {getattr(torch.Tensor, name) for name in _METHODS if hasattr(torch.Tensor, name)} | set(_FUNCTIONS)
    | set(_AUTOGRAD))
"""Functions whose result does not depend on the tensor's values."""
CASTS = {getattr(torch.Tensor, name) for name in _CASTS}
"""Functions that return the tensor itself where there is nothing to do, and are harmless then."""


class _Absent:
    """Mixed into a tensor class, which says in `why()` what is wrong with reading this one."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if function in TELLS_NO_VALUE:
                return function(*args, **(kwargs or {}))
            if function in CASTS:
                result = function(*args, **(kwargs or {}))
                if result is args[0] or not isinstance(result, torch.Tensor):
                    return result
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, _Absent):
                raise StateError(value.why())
        raise StateError(f"{getattr(function, '__name__', function)} met a tensor whose values are not on this rank")

    def why(self) -> str:
        raise NotImplementedError

    def __repr__(self, **_: Any) -> str:
        return f"<values not here: {self.why()}>"


@cache
def absent(kind: type) -> type:
    """`kind`, a class of parameters, with its values not here: `parameter.__class__` is set to it and back."""
    return type(f"Absent{kind.__name__}", (_Absent, kind), {"why": lambda self: self._why()})


def mark(parameter: nn.Parameter, why: Callable[[], str]) -> None:
    """What an absent parameter says when it is read."""
    parameter._why = why  # type: ignore[attr-defined]


class CutGradient(_Absent, torch.Tensor):  # type: ignore[misc]
    """Stands on `.grad` where the averaged gradient is cut over the ranks, or is kept in another dtype."""

    _name: str

    @classmethod
    def of(cls, name: str, parameter: torch.Tensor) -> CutGradient:
        """For the parameter called `name`: its shape, dtype and device, and no memory."""
        nothing = torch.empty((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
        made: CutGradient = torch.Tensor._make_subclass(cls, nothing)
        made._name = name
        return made

    def why(self) -> str:
        """The refusal."""
        return (f"the averaged gradient of parameter {self._name!r} is not on its .grad under this strategy (it is cut "
                f"over the ranks, or kept in another dtype); read it with engine.full_grad({self._name!r}), and clip "
                f"with engine.clip_grad_norm_(...) or Strategy(clip_grad_norm=...) (with a GradScaler: drop it and "
                f"choose a precision in the strategy)")
