"""Integers only: which boxes of an N-dimensional tensor a stretch of its elements is, and whether boxes cover it.

A stretch [start, stop) of a row-major tensor is at most 2 N - 1 boxes (a corner, a slab, a corner), each of which
lies in one piece in the stretch. That is what makes a flat shard an ordinary checkpoint of named tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dplab.errors import CheckpointError

Shape = tuple[int, ...]

MOST = 2**62
"""Elements of a tensor: more than any memory, and still an int64 in bytes of up to 2."""


@dataclass(frozen=True)
class Box:
    """`sizes` elements from `offsets` on in the tensor; element `at` on in the stretch."""

    offsets: Shape
    sizes: Shape
    at: int

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def boxes(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    """The boxes of elements [start, stop) of a row-major tensor, in order. A tensor without elements has one box."""
    if not math.prod(shape):
        yield Box((0,) * len(shape), shape, 0)
        return
    place = start
    while place < stop:
        dim, block = _largest(shape, place, stop)
        if dim is None:
            yield Box((), (), place - start)
            return
        index = _index(shape, place)
        repeats = min((stop - place) // block, shape[dim] - index[dim])
        yield Box(index, (1,) * dim + (repeats,) + shape[dim + 1:], place - start)
        place += repeats * block


def _largest(shape: Shape, place: int, stop: int) -> tuple[int | None, int]:
    """The outermost dim along which whole blocks begin at `place` and fit before `stop`; and such a block's length."""
    for dim in range(len(shape)):
        block = math.prod(shape[dim + 1:])
        if place % block == 0 and block <= stop - place:
            return dim, block
    return None, 1


def _index(shape: Shape, place: int) -> Shape:
    index = []
    for size in reversed(shape):
        place, rest = divmod(place, size)
        index.append(rest)
    return tuple(reversed(index))


def check_cover(name: str, shape: Shape, chunks: Sequence[tuple[Shape, Shape]]) -> None:
    """Raises CheckpointError, naming the tensor, unless chunks of (offsets, sizes) fill it exactly once."""
    if any(size < 0 for size in shape) or math.prod(shape) > MOST:
        raise CheckpointError(f"tensor {name!r} is said to have shape {shape}, which no tensor has")
    for offsets, sizes in chunks:
        fits = len(offsets) == len(sizes) == len(shape) and all(
            low >= 0 and 0 <= size <= full - low for low, size, full in zip(offsets, sizes, shape, strict=True))
        if not fits:
            raise CheckpointError(f"tensor {name!r} of shape {shape} is said to have a part of {sizes} at {offsets}, "
                                  f"which lies outside of it")
    volume = sum(math.prod(sizes) for _, sizes in chunks)
    if volume != math.prod(shape) or not chunks:
        raise CheckpointError(f"tensor {name!r} of shape {shape} has {math.prod(shape)} elements, and its parts hold "
                              f"{volume}")
    _refuse_overlap(name, chunks)


def _refuse_overlap(name: str, chunks: Sequence[tuple[Shape, Shape]]) -> None:
    filled = [(offsets, sizes) for offsets, sizes in chunks if math.prod(sizes)]
    if not filled or not filled[0][0]:
        if len(filled) > 1:
            raise CheckpointError(f"tensor {name!r} has one element and {len(filled)} parts")
        return
    # sorted by the dim that tells most parts apart, few are alive at the same place
    dim = max(range(len(filled[0][0])), key=lambda d: len({offsets[d] for offsets, _ in filled}))
    alive: list[tuple[Shape, Shape]] = []
    for offsets, sizes in sorted(filled, key=lambda chunk: chunk[0][dim]):
        alive = [(o, s) for o, s in alive if o[dim] + s[dim] > offsets[dim]]
        for other, theirs in alive:
            if all(a < b + n and b < a + m for a, m, b, n in zip(offsets, sizes, other, theirs, strict=True)):
                raise CheckpointError(f"tensor {name!r} has parts at {other} and {offsets} that overlap")
        alive.append((offsets, sizes))


def differences(wanted: Mapping[str, Shape | None], found: Mapping[str, Shape | None]) -> list[str]:
    """What of a model is not as in a checkpoint, in words, by name; None is the shape of what is no tensor."""
    missing = [name for name in wanted if name not in found]
    extra = [name for name in found if name not in wanted]
    other = [f"{name!r} has shape {_shape(found[name])} in the checkpoint and {_shape(wanted[name])} in the model"
             for name in wanted if name in found and wanted[name] != found[name]]
    said = []
    if other:
        said.append(_few(other))
    if missing:
        said.append(f"missing in the checkpoint: {_few([repr(name) + _of(wanted[name]) for name in missing])}")
    if extra:
        said.append(f"not in the model: {_few([repr(name) + _of(found[name]) for name in extra])}")
    return said


def _few(items: Sequence[str], most: int = 4) -> str:
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")


def _shape(shape: Shape | None) -> str:
    return "none (it is no tensor)" if shape is None else str(shape)


def _of(shape: Shape | None) -> str:
    return "" if shape is None else f" {shape}"
