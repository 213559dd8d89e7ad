"""Buffers of the model (running statistics, counters): made equal on all ranks when the weights have moved.

Forwards write them, each rank from its own batches. They are made equal at the end of a step and not at a
forward, because autograd may hold those that a forward has used until backward has run. Which ones have
changed somewhere is told by the control message, so that constant ones (masks, tables) never travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import nn

from dplab.errors import UsageError
from dplab.wire.collectives import Collectives

Rule = Literal["rank0", "mean", "local"]
SAME, CHANGED, OTHER_SHAPE = 0, 1, 2
"""What a rank says of a buffer; the largest of all ranks' counts, and one of another shape stays local."""


class Buffers:
    """`rank0`: rank 0's values. `mean`: the ranks' average, integers rank 0's. `local`: each rank its own."""

    def __init__(self, model: nn.Module, rule: Rule, world: Collectives) -> None:
        if rule not in get_args(Rule):
            raise UsageError(f"buffers={rule!r} is not allowed; it is one of {', '.join(get_args(Rule))}")
        self.rule, self.world = rule, world
        taken: set[torch.Tensor] = set()
        self._places: list[tuple[nn.Module, str]] = []
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.numel() and buffer not in taken and rule != "local":
                    taken.add(buffer)
                    self._places.append((module, name))
        self._laid = [(t.shape, t.dtype) for t in self._now() if t is not None]
        self.settle()

    def said(self) -> list[int]:
        """One number a buffer: what has become of it here since the last `sync`.

        Kernels of normalisation write running statistics past autograd's version counters, so what has
        changed in a module counts for all its buffers.
        """
        now = self._now()
        changed = {module for (module, _), tensor, (seen, version) in zip(self._places, now, self._seen, strict=True)
                   if tensor is not seen or (tensor is not None and tensor._version != version)}
        return [OTHER_SHAPE if tensor is None or (tensor.shape, tensor.dtype) != laid
                else CHANGED if module in changed else SAME
                for (module, _), tensor, laid in zip(self._places, now, self._laid, strict=True)]

    @torch.no_grad()
    def sync(self, said: Sequence[int]) -> None:
        """Makes equal what changed somewhere; `said` is the maximum over all ranks. Collective."""
        tensors = [t for t, told in zip(self._now(), said, strict=True) if t is not None and told == CHANGED]
        if self.rule == "mean":
            averaged = [t for t in tensors if t.is_floating_point() or t.is_complex()]
            for dtype in dict.fromkeys(t.dtype for t in averaged):
                self._average([t for t in averaged if t.dtype == dtype])
            tensors = [t for t in tensors if not (t.is_floating_point() or t.is_complex())]
        if tensors:
            plain = [t.contiguous().view(-1).view(torch.uint8) for t in tensors]
            flat = torch.cat(plain)
            self.world.broadcast(flat, purpose="buffers").wait()
            if self.world.rank:
                for tensor, part in zip(tensors, torch.split(flat, [p.numel() for p in plain]), strict=True):
                    # a clone: a view of another dtype wants its own alignment
                    tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))
        self.settle()

    def _average(self, tensors: Sequence[torch.Tensor]) -> None:
        flat = torch.cat([t.reshape(-1) for t in tensors])
        wide = flat.float() if flat.element_size() < 4 else flat
        self.world.all_reduce(torch.view_as_real(wide) if wide.is_complex() else wide, purpose="buffers").wait()
        wide /= self.world.size
        for tensor, part in zip(tensors, torch.split(wide, [t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))

    def _now(self) -> list[torch.Tensor | None]:
        return [module._buffers.get(name) for module, name in self._places]

    def settle(self) -> None:
        """The values are the same on all ranks as they are now."""
        # the tensor itself, not its id: an id may be given to another one
        self._seen = [(tensor, 0 if tensor is None else tensor._version) for tensor in self._now()]
