"""Reducing the ranks' values in rank order: the same bits on every rank, whatever the timing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dplab.errors import WireError
from dplab.wire.calls import dtype_name

CHUNK = 1 << 17
"""Values that are taken through all ranks before the next ones, so that the sum stays in the cache."""

_INTO: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add, "avg": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum,
    "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor,
}
OPS = tuple(_INTO)
_WIDENED = ("sum", "avg", "product")


def check(op: str, dtype: torch.dtype) -> None:
    """Refuses a reduction that means nothing for a dtype, before anybody waits for it."""
    real = dtype.is_floating_point or dtype.is_complex
    if (op == "avg" and not real) or (op in ("band", "bor", "bxor") and real):
        raise WireError(f"{op} of {dtype_name(dtype)} is not defined; averages are of floating-point "
                        f"values, bitwise reductions of integers and bool")


def reduce_into(out: torch.Tensor, parts: Sequence[torch.Tensor], op: str) -> None:
    """`out` = the reduction of `parts`, one a rank and in rank order. `out` may be one of them, or wider.

    16-bit values are added in fp32 and rounded once.
    """
    for start in range(0, out.numel(), CHUNK):
        stop = start + CHUNK
        whole = start == 0 and stop >= out.numel()
        _reduce(out if whole else out[start:stop], parts if whole else [part[start:stop] for part in parts], op)


def _reduce(out: torch.Tensor, parts: Sequence[torch.Tensor], op: str) -> None:
    into, first = _INTO[op], parts[0]
    if first.is_floating_point() and first.element_size() < 4 and op in _WIDENED:
        total = first.float()
        for part in parts[1:]:
            into(total, part, out=total)
        _finish(total, op, len(parts))
        out.copy_(total)
        return
    address = out.data_ptr()
    own = next((index for index, part in enumerate(parts) if part.data_ptr() == address), 0)
    # `out` must not be written before its own turn has come
    total = out if own <= 1 and out.dtype == first.dtype else torch.empty_like(first)
    into(first, parts[1], out=total)
    for part in parts[2:]:
        into(total, part, out=total)
    _finish(total, op, len(parts))
    if total is not out:
        out.copy_(total)


def _finish(total: torch.Tensor, op: str, ranks: int) -> None:
    if op == "avg":
        total.div_(ranks)
