"""The model's part of a checkpoint: the plain model's state dict, by its names and in its order.

Where the optimizer steps a master copy, its values are the ones stored. A tied weight is stored once, under all of
its names. Buffers and extra state are rank 0's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dplab.checkpoint.manifest import Shape, differences
from dplab.checkpoint.pieces import Leaf, Path, Piece
from dplab.checkpoint.trained import Trained
from dplab.errors import UsageError

if TYPE_CHECKING:
    from dplab.checkpoint.reading import Stored


class ModelState:
    """The state dict of `trained` at this moment; under ZeRO-3 without values, which are not here."""

    def __init__(self, trained: Trained) -> None:
        self.trained = trained
        self.raw: dict[str, Any] = trained.model.state_dict(keep_vars=True)
        self.entries = {trained.full.plain(name): value for name, value in self.raw.items()}

    @cached_property
    def firsts(self) -> dict[nn.Parameter, str]:
        """Parameters with a place, by the first name that each has in the state dict."""
        found: dict[nn.Parameter, str] = {}
        for name, value in self.entries.items():
            if isinstance(value, nn.Parameter) and value in self.trained.slots:
                found.setdefault(value, name)
        return found

    @property
    def tied(self) -> dict[str, str]:
        """Further names of tied weights, and the first one of each."""
        return {name: self.firsts[value] for name, value in self.entries.items()
                if isinstance(value, nn.Parameter) and value in self.firsts and self.firsts[value] != name}

    @property
    def others(self) -> dict[str, Any]:
        """What is no laid-out parameter: buffers, extra state."""
        return {name: value for name, value in self.entries.items()
                if not (isinstance(value, nn.Parameter) and value in self.firsts)}

    @property
    def shapes(self) -> dict[str, Shape | None]:
        """By name; None for what is no tensor."""
        return {name: tuple(value.shape) if isinstance(value, torch.Tensor) else None
                for name, value in self.entries.items()}

    def items(self) -> Iterator[Piece | Leaf]:
        """What this rank writes."""
        trained = self.trained
        for parameter, name in self.firsts.items():
            bucket, slot = trained.slots[parameter]
            stretch = trained.owned(bucket)[0], bucket.params.stepped
            for piece in trained.pieces(bucket, slot, ("model", name), stretch, trained.written(bucket)):
                yield replace(piece, held=bucket.params.master is not None)
        if trained.world.rank == 0:
            for name, value in self.others.items():
                path = ("model", name)
                yield Piece.whole(path, value) if isinstance(value, torch.Tensor) else Leaf.of(path, value)

    def paths(self, stored: Stored) -> dict[str, Path]:
        """Where a checkpoint has what this model is made of, by plain name.

        Model values stand under "model", or, in a checkpoint of nothing else, at the top. Of tied names one is enough.
        """
        under = stored.under("model")
        found: dict[str, Path] = {str(path[-1]): path for path in under or stored.paths
                                  if len(path) == (2 if under else 1)}
        for name, first in self.tied.items():
            if name in found or first in found:
                path = found.get(first) or found[name]
                found.setdefault(name, path)
                found.setdefault(first, path)
        return found

    def check(self, stored: Stored, *, strict: bool) -> dict[str, Path]:
        """The paths of what can be loaded. Raises UsageError for another shape; where strict, for any difference."""
        paths = self.paths(stored)
        found = {name: stored.shape(path) for name, path in paths.items()}
        if not strict:
            found = {name: shape for name, shape in found.items() if name in self.entries}
        wanted = {name: shape for name, shape in self.shapes.items() if strict or name in found}
        if said := differences(wanted, found):
            fits = all(wanted[name] == found[name] for name in wanted.keys() & found.keys())
            raise UsageError(f"checkpoint {stored.folder} is of another model: {'; '.join(said)}; build the model that "
                             f"was saved{', or load what fits with strict=False' if fits else ''}")
        for name, path in paths.items():
            value = self.entries.get(name)
            if isinstance(value, torch.Tensor) and _kind(stored.dtype(path)) != _kind(value.dtype):
                raise UsageError(f"{name!r} is {_dtype(stored.dtype(path))} in checkpoint {stored.folder} and "
                                 f"{_dtype(value.dtype)} in the model; build the model that was saved")
        return {name: path for name, path in paths.items() if name in self.entries}

    def read(self, stored: Stored, paths: dict[str, Path]) -> int:
        """Fills this rank's shards (and master copies), and the buffers; returns bytes read."""
        trained = self.trained
        pieces = [Piece(paths[name], piece.shape, piece.start, piece.run)
                  for parameter, name in self.firsts.items() if name in paths for bucket, slot in [
                      trained.slots[parameter]]
                  for piece in trained.pieces(bucket, slot, (), (trained.owned(bucket)[0], bucket.params.stepped),
                                              trained.owned(bucket))]
        nbytes = stored.read_into(pieces)
        for bucket in trained.buckets:
            bucket.params.round_master()
        for name, value in self.others.items():
            if name not in paths:
                continue
            if isinstance(value, torch.Tensor):
                scratch = torch.empty(value.numel(), dtype=value.dtype)
                nbytes += stored.read_into([Piece(paths[name], tuple(value.shape), 0, scratch)])
                value.detach().copy_(scratch.view(value.shape))
            else:
                self._module_of(name).set_extra_state(stored.value(paths[name]))
        return nbytes

    def _module_of(self, name: str) -> nn.Module:
        raw = next(key for key in self.raw if self.trained.full.plain(key) == name)
        return self.trained.model.get_submodule(raw.rpartition(".")[0])


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex"
    return "real" if dtype.is_floating_point else "bool" if dtype is torch.bool else "integer"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
