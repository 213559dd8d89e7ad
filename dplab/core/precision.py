"""Dtypes of a bucket, decided once from the strategy's precision and the model's own dtype.

Low precision on the wire never means low precision in a sum: the transports add 2-byte values in fp32. With
a window above 1 gradients are kept in fp32, since adding many micro-batches in 2 bytes loses the small ones.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from dplab.specs import Precision, Strategy

TORCH = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Dtypes:
    """`param`: weights that compute; `unreduced`: gradients of this rank; `grad`: owned sums; `master`: or None."""

    param: torch.dtype
    unreduced: torch.dtype
    grad: torch.dtype
    master: torch.dtype | None

    @classmethod
    def of(cls, strategy: Strategy, model: torch.dtype) -> Dtypes:
        """For parameters of the dtype `model` under `strategy`."""
        precision = strategy.precision
        param = TORCH[precision.param] if precision.param else model
        grad = TORCH[precision.grad] if precision.grad else param
        if strategy.accumulate > 1 and grad.itemsize < 4:
            grad = torch.float32
        unreduced = param if strategy.reduces_every_backward else grad
        master = TORCH[precision.master] if precision.master else None
        return cls(param, unreduced, grad, None if master == param else master)

    @classmethod
    def as_is(cls, model: torch.dtype) -> Dtypes:
        """For what stays in the model's own dtype: integers, which are only ever frozen, and weights of BatchNorm."""
        return cls(model, model, model, None)


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """What stands around a forward: torch.autocast where the precision asks for it."""
    if precision.autocast is None:
        return nullcontext()
    return torch.autocast(device.type, TORCH[precision.autocast])


def explain_mismatch(error: RuntimeError, precision: Precision, model: nn.Module) -> None:
    """Adds to torch's complaint of dtypes that do not match which buffers the precision has not cast."""
    if precision.param is None or "type" not in str(error):
        return
    wide = [f"{name!r} ({str(buffer.dtype).removeprefix('torch.')})" for name, buffer in model.named_buffers()
            if buffer.is_floating_point() and buffer.dtype != TORCH[precision.param]]
    if wide:
        error.add_note(f"under this precision weights and inputs are {precision.param}, and these buffers are not: "
                       f"{', '.join(wide[:4])}; cast what forward computes from them, or choose "
                       f"'amp-{precision.param}'")


def scales_loss(precision: Precision) -> bool:
    """fp16 gradients underflow without a scaled loss, wherever they are computed in fp16."""
    return "fp16" in (precision.param, precision.autocast)
