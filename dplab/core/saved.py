"""Saved-tensor hooks that take what is theirs and pass the rest to the hooks around them.

torch calls only the innermost pair. Without passing on, ours inside an activation checkpoint would keep
every tensor that the checkpoint means to drop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Taken:
    """What `take` returns for a tensor that it keeps in its own way; `read()` brings the tensor back."""

    def read(self) -> torch.Tensor:
        raise NotImplementedError


def hooks(take: Callable[[torch.Tensor], Taken | None]) -> torch.autograd.graph.saved_tensors_hooks:
    """The context manager; `take` sees every tensor that autograd saves inside it."""
    around = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def pack(tensor: torch.Tensor) -> Any:
        taken = take(tensor)
        if taken is not None:
            return taken
        return tensor if around is None else (around[1], around[0](tensor))

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, Taken):
            return packed.read()
        if isinstance(packed, torch.Tensor):
            return packed
        read, value = packed
        tensor: torch.Tensor = read(value)
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
