"""PowerSGD: matrices of gradients travel as two thin factors, found by one power iteration (Vogels et al. 2019,
arXiv:1905.13727). What the factors leave out is added to the next gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from dplab.layout import Slot
from dplab.wire.codec import MEASURED_EVERY
from dplab.wire.collectives import Collectives, Pending


@dataclass
class _Matrix:
    """A parameter seen as n x m; `start`: of the bucket. `right` (m x rank) is where the next iteration starts."""

    start: int
    n: int
    m: int
    right: torch.Tensor | None = None
    owed: torch.Tensor | None = None

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.start:self.start + self.n * self.m].view(self.n, self.m)


class PowerSgd:
    """Rank-`rank` factors of every parameter of two dimensions or more that they make smaller; the rest travels as it
    is, in fp32. Only linear operations meet on the wire, so both factors are all-reduced."""

    def __init__(self, slots: Sequence[Slot], *, rank: int) -> None:
        self.rank = rank
        self.error: float | None = None
        self._calls = 0
        self._matrices: list[_Matrix] = []
        self._plain: list[tuple[int, int]] = []
        for slot in slots:
            n = slot.shape[0] if len(slot.shape) > 1 else 1
            m = slot.numel // n if n else 0
            if min(n, m) > 1 and (n + m) * rank < n * m:
                self._matrices.append(_Matrix(slot.start, n, m))
            else:
                self._plain.append((slot.start, slot.stop))

    remembers = True

    @property
    def name(self) -> str:
        return f"PowerSgd{self.rank}"

    def state_dict(self) -> dict[str, torch.Tensor]:
        """By matrix: where its next iteration starts and what is owed, fp32 (float64 where the gradients are)."""
        return {f"{place}-{what}": value for place, matrix in enumerate(self._matrices)
                for what, value in (("right", matrix.right), ("owed", matrix.owed)) if value is not None}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """As `dplab.wire.codec.Remembering`."""
        for place, matrix in enumerate(self._matrices):
            matrix.right, matrix.owed = state.get(f"{place}-right"), state.get(f"{place}-owed")

    @property
    def held_bytes(self) -> int:
        """What is owed, and the right factors."""
        return sum(each.numel() * each.element_size() for matrix in self._matrices
                   for each in (matrix.right, matrix.owed) if each is not None)

    def all_reduce(self, flat: torch.Tensor, axis: Collectives) -> Iterator[Pending]:
        wide = flat.to(torch.promote_types(flat.dtype, torch.float32))
        meant = [matrix.of(wide) if matrix.owed is None else matrix.of(wide) + matrix.owed for matrix in self._matrices]
        lefts = [each @ _right(matrix, self.rank, each) for matrix, each in zip(self._matrices, meant, strict=True)]
        sent = torch.cat([*(left.view(-1) for left in lefts), *(wide[start:stop] for start, stop in self._plain)])
        yield axis.all_reduce(sent)
        lefts = [_orthogonal(left) for left in _cut(sent, [(matrix.n, self.rank) for matrix in self._matrices])]
        rights = [each.T @ left for each, left in zip(meant, lefts, strict=True)]
        self._keep(meant, lefts, rights)
        factors = torch.cat([sent[:0], *(right.reshape(-1) for right in rights)])
        yield axis.all_reduce(factors)
        rights = _cut(factors, [(matrix.m, self.rank) for matrix in self._matrices])
        for matrix, left, right in zip(self._matrices, lefts, rights, strict=True):
            matrix.of(flat).copy_(left @ right.T)
            # nothing of an overflow stays
            matrix.right = right.clone() if bool(torch.isfinite(right).all()) else None
        plain = sent[sum(left.numel() for left in lefts):]
        for start, stop in self._plain:
            flat[start:stop].copy_(plain[:stop - start])
            plain = plain[stop - start:]

    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor, axis: Collectives) -> Iterator[Pending]:
        yield from self.all_reduce(flat, axis)
        own = axis.segment(flat)
        if out.data_ptr() != own.data_ptr():
            out.copy_(own)

    def _keep(self, meant: list[torch.Tensor], lefts: list[torch.Tensor], rights: list[torch.Tensor]) -> None:
        """Notes what this rank's factors leave out of what it meant."""
        for matrix, each, left, right in zip(self._matrices, meant, lefts, rights, strict=True):
            matrix.owed = (each - left @ right.T).nan_to_num_(0.0, 0.0, 0.0)
        self._calls += 1
        self.error = None
        if self._calls % MEASURED_EVERY == 1:
            whole = _norm(meant)
            self.error = _norm([matrix.owed for matrix in self._matrices if matrix.owed is not None]) / whole if (
                whole > 0) else 0.0


def _right(matrix: _Matrix, rank: int, like: torch.Tensor) -> torch.Tensor:
    """Where the iteration goes on, or the same random numbers on every rank to start from."""
    if matrix.right is None:
        generator = torch.Generator().manual_seed(matrix.start + matrix.m)
        matrix.right = torch.randn(matrix.m, rank, generator=generator, dtype=torch.float64).to(like)
    return matrix.right


def _orthogonal(left: torch.Tensor) -> torch.Tensor:
    """Orthonormal columns that span the same space; any where it is less than that."""
    if not bool(torch.isfinite(left).all()):
        return torch.full_like(left, torch.nan)
    columns: torch.Tensor = torch.linalg.qr(left)[0]
    return columns


def _cut(flat: torch.Tensor, shapes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    pieces = torch.split(flat[:sum(n * m for n, m in shapes)], [n * m for n, m in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)] if shapes else []


def _norm(tensors: Sequence[torch.Tensor]) -> float:
    return math.sqrt(sum(float(torch.linalg.vector_norm(each, dtype=torch.float64)) ** 2 for each in tensors))
