"""What a rank contributes to a checkpoint, or wants of one: stretches of logical tensors, and small objects.

A path is the way to a value in the nested state dict, as torch.distributed.checkpoint has it; its key is the path
with dots. The parts: ("model", name), ("optim", "state", name, what), ("optim", "param_groups", i, option),
("dplab", ...).
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from dplab.checkpoint.manifest import Box, Shape, boxes
from dplab.errors import UsageError

Path = tuple[str | int, ...]


def key(path: Path) -> str:
    """A path as torch.distributed.checkpoint names it in its flat table."""
    return ".".join(map(str, path))


@dataclass(frozen=True)
class Piece:
    """Elements from `start` on of the tensor of `shape` at `path`; `run` holds them, 1-D and contiguous.

    A view of training's own memory, except in a snapshot: it is good until the next step. `held`: by the optimizer
    alone, so that until then nobody can have written to it.
    """

    path: Path
    shape: Shape
    start: int
    run: torch.Tensor
    held: bool = False

    @classmethod
    def whole(cls, path: Path, tensor: torch.Tensor) -> Piece:
        """All of a tensor; a copy where it is not contiguous."""
        return cls(path, tuple(tensor.shape), 0, tensor.detach().contiguous().view(-1))

    def boxes(self) -> list[tuple[Box, torch.Tensor]]:
        """The piece as boxes of the logical tensor, each with its view."""
        stop = self.start + self.run.numel()
        return [(box, self.run[box.at:box.at + box.numel].view(box.sizes))
                for box in boxes(self.shape, self.start, stop)]

    @property
    def nbytes(self) -> int:
        return self.run.numel() * self.run.element_size()

    def copied(self) -> Piece:
        """The same in host memory of its own."""
        return replace(self, run=self.run.to("cpu", copy=True))


@dataclass(frozen=True)
class Leaf:
    """A value that is no tensor, already turned into bytes that torch.load(weights_only=True) takes."""

    path: Path
    data: bytes

    @classmethod
    def of(cls, path: Path, value: Any) -> Leaf:
        """Raises UsageError for a value that could not be loaded again without running code out of a file."""
        buffer = io.BytesIO()
        try:
            torch.save(value, buffer)
            torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
        except Exception as error:
            raise UsageError(f"{key(path)!r} holds a {type(value).__name__} that cannot be stored safely (numbers, "
                             f"text, lists, dicts and tensors can): {_first_line(error)}") from error
        return cls(path, buffer.getvalue())


@dataclass(frozen=True)
class Share:
    """All that one rank writes."""

    pieces: tuple[Piece, ...]
    leaves: tuple[Leaf, ...]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces) + sum(len(leaf.data) for leaf in self.leaves)

    @property
    def paths(self) -> list[Path]:
        return [*(piece.path for piece in self.pieces), *(leaf.path for leaf in self.leaves)]

    def copied(self, *, held: bool) -> Share:
        """A snapshot, for a save that goes on while training does: of what the optimizer holds, or of the rest."""
        return replace(self, pieces=tuple(piece.copied() if piece.held == held else piece for piece in self.pieces))

    @classmethod
    def of(cls, items: Iterable[Piece | Leaf]) -> Share:
        """Sorts what comes."""
        listed = list(items)
        return cls(tuple(item for item in listed if isinstance(item, Piece)),
                   tuple(item for item in listed if isinstance(item, Leaf)))


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
