"""Saved-tensor hooks that take what is theirs and pass the rest to the hooks around them.

torch calls only the innermost pair. Without passing on, ours inside an activation checkpoint would keep
every tensor that the checkpoint means to drop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dplab.errors import StateError


class Taken:
    """What `take` returns for a tensor that it keeps in its own way; `read()` brings the tensor back."""

    def read(self) -> torch.Tensor:
        raise NotImplementedError


class Kept(Taken):
    """The tensor itself. torch checks versions only where there are no hooks, so the check is made here."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.version = tensor, tensor._version

    def read(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise StateError(f"a tensor of shape {tuple(self.tensor.shape)} needed for backward has been modified by "
                             f"an inplace operation since its forward: it is at version {self.tensor._version}, "
                             f"expected {self.version}; run the forward again (engine.step() moves the weights)")
        return self.tensor


def hooks(take: Callable[[torch.Tensor], Taken | None]) -> torch.autograd.graph.saved_tensors_hooks:
    """The context manager; `take` sees every tensor that autograd saves inside it."""
    around = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def pack(tensor: torch.Tensor) -> Any:
        taken = take(tensor)
        if taken is not None:
            return taken
        return Kept(tensor) if around is None else (around[1], around[0](tensor))

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, Taken):
            return packed.read()
        read, value = packed
        tensor: torch.Tensor = read(value)
        return tensor

    pack.take = take  # type: ignore[attr-defined]
    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def innermost(take: Callable[[torch.Tensor], Taken | None]) -> bool:
    """Whether the innermost hooks now are those of `take`."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top is not None and getattr(top[0], "take", None) == take
