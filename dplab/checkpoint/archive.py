"""Where a tensor's bytes lie in an archive of torch.save's, so that they can be read straight to where they belong.

Only archives of one plain tensor are understood, as every writer of checkpoints makes them: nothing of a file is
believed that is not checked, and for whatever else is in one there is torch.load.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

from dplab.checkpoint.manifest import Shape

STORAGES = {"DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
            "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
            "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8,
            "BoolStorage": torch.bool}
_LONGEST = 1 << 16
"""Bytes of a pickle that may describe one tensor."""
_HEADER = struct.Struct("<4s22xHH")
"""Of a zip's member: its mark, and the lengths of the name and of what else stands before the bytes."""


@dataclass(frozen=True)
class Raw:
    """A row-major tensor whose elements begin at byte `start` of `file`."""

    file: BinaryIO
    start: int
    dtype: torch.dtype
    shape: Shape

    def copy(self, into: torch.Tensor, offsets: Shape) -> None:
        """Reads the box of `into`'s shape at `offsets`; casts to its dtype. Straight into it where nothing is to be
        cast and both are in one piece, else through memory as long as the box's part of the file."""
        strides = [math.prod(self.shape[dim + 1:]) for dim in range(len(self.shape))]
        first = sum(map(math.prod, zip(offsets, strides, strict=True)))
        count = 1 + sum((size - 1) * stride for size, stride in zip(into.shape, strides, strict=True))
        whole = count == into.numel()
        if whole and into.dtype == self.dtype and into.device.type == "cpu" and into.is_contiguous():
            self._read(into, first)
            return
        scratch = torch.empty(count, dtype=self.dtype)
        self._read(scratch, first)
        into.copy_(scratch.view(into.shape) if whole else scratch.as_strided(into.shape, strides))

    def _read(self, into: torch.Tensor, first: int) -> None:
        memory = into.detach().reshape(-1).view(torch.uint8).numpy().data
        self.file.seek(self.start + first * self.dtype.itemsize)
        if self.file.readinto(memory) != len(memory):  # type: ignore[attr-defined]
            raise EOFError(f"the file ends before the {len(memory)} bytes that it should hold")


def find(file: BinaryIO, info: Any) -> Raw | None:
    """The tensor that is all of the archive at `info.offset`; None where there is anything else."""
    try:
        return _find(file, info)
    except (zipfile.BadZipFile, pickle.UnpicklingError, struct.error, OSError, EOFError, KeyError, IndexError,
            ValueError, TypeError, AttributeError, OverflowError, NotImplementedError, RuntimeError):
        return None


def _find(file: BinaryIO, info: Any) -> Raw | None:
    members = {each.filename: each for each in zipfile.ZipFile(io.BufferedReader(
        _Window(file, info.offset, info.length), 4096)).infolist()}
    told = next(name for name in members if name.endswith("/data.pkl"))
    prefix = told.removesuffix("data.pkl")
    order = members.get(f"{prefix}byteorder")
    if sys.byteorder != "little" or (order is not None and _text(file, info, order) != b"little"):
        return None
    found = _Told(io.BytesIO(_text(file, info, members[told]))).load()
    if not isinstance(found, _Tensor):
        return None
    (kind, dtype, key, _, _), offset, shape, strides = found.storage, found.offset, tuple(found.size), found.stride
    member = members[f"{prefix}data/{key}"]
    plain = tuple(math.prod(shape[dim + 1:]) for dim in range(len(shape)))
    if kind != "storage" or offset != 0 or any(
            stride != wanted and size > 1 for stride, wanted, size in zip(strides, plain, shape, strict=True)):
        return None
    if math.prod(shape) * dtype.itemsize > member.file_size:
        return None
    return Raw(file, _begin(file, info, member), dtype, shape)


def _begin(file: BinaryIO, info: Any, member: zipfile.ZipInfo) -> int:
    """Where a member's bytes begin in the file; BadZipFile where they do not stand there as they are, or not inside."""
    file.seek(info.offset + member.header_offset)
    mark, name, extra = _HEADER.unpack(file.read(_HEADER.size))
    begin: int = info.offset + member.header_offset + _HEADER.size + name + extra
    if mark != b"PK\x03\x04" or member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1 or (
            begin + member.file_size > info.offset + info.length):
        raise zipfile.BadZipFile(member.filename)
    return begin


def _text(file: BinaryIO, info: Any, member: zipfile.ZipInfo) -> bytes:
    if member.file_size > _LONGEST:
        raise zipfile.BadZipFile(member.filename)
    file.seek(_begin(file, info, member))
    return file.read(member.file_size)


class _Window(io.RawIOBase):
    """A stretch of a file, as a file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        self._file.seek(self._start + self._at)
        got = self._file.read(max(0, min(len(buffer), self._length - self._at)))
        buffer[:len(got)] = got
        self._at += len(got)
        return len(got)


class _Tensor:
    """What a pickle says of a tensor: the arguments that it would be rebuilt from."""

    def __init__(self, storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> None:
        self.storage, self.offset, self.size, self.stride = storage, offset, size, stride


class _Told(pickle.Unpickler):
    """Takes a tensor's description, and calls nothing of anybody's."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _Tensor
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        raise pickle.UnpicklingError(name)

    def persistent_load(self, pid: Any) -> Any:
        return pid
