"""A call in words: what ranks hold against each other, and are told where it differs."""

from __future__ import annotations

import torch


def words(name: str, flat: torch.Tensor, label: str = "") -> str:
    """`all_reduce(sum) of 12 float32 for w, b`."""
    return labelled(f"{name} of {flat.numel()} {dtype_name(flat.dtype)}", label)


def labelled(text: str, label: str) -> str:
    """A call, and what it carries where that is said."""
    return f"{text} for {label}" if label else text


def dtype_name(dtype: torch.dtype) -> str:
    """`float32`."""
    return str(dtype).removeprefix("torch.")
