"""The weights alone as one .safetensors file, with the plain model's names: what Hugging Face's tools read and write.

The file is a length, a table of names in JSON, and the values in that order; it is written one bucket at a time, so
that nobody holds more than one unit over its shard. Reading takes just the rows that a rank owns.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path as FilePath
from typing import Any

import torch
from torch import nn

from dplab.checkpoint.manifest import Shape, differences
from dplab.checkpoint.model import ModelState
from dplab.checkpoint.pieces import Piece
from dplab.core.bucket import Bucket
from dplab.errors import CheckpointError, UsageError

SUFFIX = ".safetensors"
INDEX = ".safetensors.index.json"
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
          torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}


def is_tensor_file(place: Any) -> bool:
    """Whether a place asks for this format."""
    return str(place).endswith((SUFFIX, INDEX))


def safetensors() -> Any:
    """The library. Raises UsageError where it is not installed."""
    try:
        import safetensors
    except ImportError as error:
        raise UsageError("safetensors files need the package safetensors; install it with pip install safetensors "
                         "(transformers brings it along)") from error
    return safetensors


class Export:
    """One file being written by rank 0; `state` is every rank's. Tied weights stand under their first name."""

    def __init__(self, state: ModelState, file: FilePath) -> None:
        safetensors()
        if not str(file).endswith(SUFFIX) or file.is_dir():
            raise UsageError(f"{file} is no place for weights; give a file name that ends in {SUFFIX}")
        self.state, self.file = state, file
        self.partial = file.with_name(f".{file.name}.saving")
        self._places, self._header = self._table()
        self._nbytes = len(self._header) + sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in self._tensors())

    def _table(self) -> tuple[dict[str, int], bytes]:
        """Where each tensor starts in the file, and the bytes before the first."""
        table: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # what transformers asks for
        places, start = {}, 0
        for name, dtype, shape in self._tensors():
            if dtype not in DTYPES:
                raise UsageError(f"{name!r} is {dtype}, which a {SUFFIX} file cannot hold; give engine.save() a folder")
            stop = start + math.prod(shape) * dtype.itemsize
            table[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
            places[name], start = start, stop
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        return {name: len(header) + place for name, place in places.items()}, header

    def _tensors(self) -> list[tuple[str, torch.dtype, Shape]]:
        """What is stored, widest dtype first as the library has it."""
        slots = self.state.trained.slots
        named = [(name, slots[value][0].params.stepped.dtype if isinstance(value, nn.Parameter) and value in slots
                  else value.dtype, tuple(value.shape)) for name, value in self.state.entries.items()
                 if isinstance(value, torch.Tensor) and name not in self.state.tied]
        return sorted(named, key=lambda item: -item[1].itemsize)

    def write(self) -> int:
        """Streams every bucket through rank 0 into the file, and renames it; collective. Returns bytes of the file.

        Rank 0 raises OSError where it cannot write, after it has taken part in every gather.
        """
        trained, problem = self.state.trained, None
        try:
            file = self.partial.open("wb") if trained.world.rank == 0 else None
        except OSError as error:
            file, problem = None, error
        for bucket in trained.buckets:
            bucket.params.refresh_master()
            try:
                self._put_all(file, self._whole(bucket))
            except OSError as error:
                problem, file = error, None
        if problem is None and file is not None:
            self._put_all(file, {name: value.detach() for name, value in self.state.others.items()
                                 if isinstance(value, torch.Tensor)})
            file.seek(0)
            file.write(self._header)
            file.flush()
            os.fsync(file.fileno())
            file.close()
            self.partial.replace(self.file)
        if problem is not None:
            self.partial.unlink(missing_ok=True)
            raise problem
        return self._nbytes

    def _whole(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        """A bucket's full values by name; collective. Given away at once, so that there are never two of them."""
        return {self.state.firsts[parameter]: tensor for parameter, tensor in zip(
            bucket.parameters, bucket.whole(bucket.params.stepped), strict=True) if parameter in self.state.firsts}

    def _put_all(self, file: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items() if file is not None else ():
            flat = tensor.cpu().contiguous().view(-1)
            if flat.numel():
                file.seek(self._places[name])
                file.write(flat.view(torch.uint8).numpy().data)


class Import:
    """The weights of a .safetensors file, or of the files that an index names. Raises UsageError, CheckpointError."""

    def __init__(self, state: ModelState, file: FilePath, *, strict: bool) -> None:
        self._open = safetensors().safe_open
        self.state = state
        self._handles: dict[FilePath, Any] = {}
        self._files = self._found(file)
        shapes = {name: self._shape(name) for name in self._files}
        for name, first in state.tied.items():
            if name in shapes or first in shapes:
                held = first if first in shapes else name
                for alias in (name, first):
                    shapes.setdefault(alias, shapes[held])
                    self._files.setdefault(alias, self._files[held])
        wanted = {name: shape for name, shape in state.shapes.items() if shape is not None}
        if not strict:
            shapes = {name: shape for name, shape in shapes.items() if name in wanted}
            wanted = {name: shape for name, shape in wanted.items() if name in shapes}
        if said := differences(wanted, shapes):
            raise UsageError(f"{file} is of another model: {'; '.join(said)}; build the model that was saved")
        for name in wanted:
            real = state.entries[name].dtype.is_floating_point
            if ("F" in self._slice(name).get_dtype()) != real:
                raise UsageError(f"{name!r} is {self._slice(name).get_dtype()} in {file} and "
                                 f"{state.entries[name].dtype} in the model; build the model that was saved")

    def _found(self, file: FilePath) -> dict[str, tuple[FilePath, str]]:
        """Which file holds a name, and under which name."""
        if not file.is_file():
            raise CheckpointError(f"there is no file {file}")
        if not str(file).endswith(INDEX):
            return {name: (file, name) for name in list(self._handle(file).keys())}
        try:
            table = json.loads(file.read_text())["weight_map"]
            listed = {str(name): str(part) for name, part in table.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{file} is no index of {SUFFIX} files") from error
        for part in set(listed.values()):
            if FilePath(part).name != part or not (file.parent / part).is_file():
                raise CheckpointError(f"{file} names {part!r}, which is not a file beside it")
        return {name: (file.parent / part, name) for name, part in listed.items()}

    def _handle(self, file: FilePath) -> Any:
        """The file, mapped into memory once."""
        if file not in self._handles:
            try:
                self._handles[file] = self._open(file, "pt").__enter__()
            except Exception as error:  # the library's own class, which has moved between versions
                raise CheckpointError(f"{file} is no {SUFFIX} file, or is torn ({error})") from error
        return self._handles[file]

    def _slice(self, name: str) -> Any:
        file, inside = self._files[name]
        if inside not in set(self._handle(file).keys()):
            raise CheckpointError(f"{file} does not hold {inside!r}, which its index says is there")
        return self._handle(file).get_slice(inside)

    def _shape(self, name: str) -> Shape:
        return tuple(self._slice(name).get_shape())

    def read(self) -> int:
        """Fills this rank's shards and the buffers; returns bytes."""
        trained, nbytes = self.state.trained, 0
        for parameter, name in self.state.firsts.items():
            if name in self._files:
                bucket, slot = trained.slots[parameter]
                stretch = (trained.owned(bucket)[0], bucket.params.stepped)
                for piece in trained.pieces(bucket, slot, (name,), stretch, trained.owned(bucket)):
                    nbytes += self._fill(name, piece)
        for bucket in trained.buckets:
            bucket.params.round_master()
        for name, value in self._tensors_among(self.state.others):
            value.detach().copy_(self._read(name, tuple(slice(0, size) for size in value.shape)))
        return nbytes

    def _tensors_among(self, values: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, value) for name, value in values.items()
                if isinstance(value, torch.Tensor) and name in self._files)

    def _fill(self, name: str, piece: Piece) -> int:
        for box, view in piece.boxes():
            if view.numel():
                view.copy_(self._read(name, tuple(slice(low, low + size) for low, size in zip(
                    box.offsets, box.sizes, strict=True))))
        return piece.nbytes

    def _read(self, name: str, where: tuple[slice, ...]) -> torch.Tensor:
        file, inside = self._files[name]
        value: torch.Tensor = self._slice(name)[where] if where else self._handle(file).get_tensor(inside)
        return value
