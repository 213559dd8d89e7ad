"""Reading what torch.distributed.checkpoint wrote, by whomever, and believing none of it.

Its metadata file is a pickle: here only its own record types come out of one, and every number in it is checked
before it is used. Tensors are read from their files straight to where they belong, and what does not lie there plainly,
like all other values, is loaded with weights_only.
"""

from __future__ import annotations

import itertools
import pickle
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path as FilePath
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from dplab.checkpoint import archive
from dplab.checkpoint.archive import Raw
from dplab.checkpoint.folder import METADATA
from dplab.checkpoint.manifest import Shape, check_cover
from dplab.checkpoint.pieces import Path, Piece, key
from dplab.errors import CheckpointError

RECORDS = {(module.__name__, name): getattr(module, name) for module, names in (
    (metadata, ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex",
                "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    (filesystem, ("_StorageInfo",))) for name in names}
"""All classes that a metadata file may name, besides torch.Size, dtypes, layouts and the path it was written to."""


class _Records(pickle.Unpickler):
    """Makes records of data, and calls nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        found: Any = RECORDS.get((module, name))
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            found = getattr(torch, name)
        elif (module, name) == ("torch.serialization", "_get_layout"):
            found = torch.serialization._get_layout
        elif module.split(".")[0] == "pathlib" and name in ("PosixPath", "WindowsPath"):
            found = _forget
        if found is None:
            raise CheckpointError(f"its {METADATA} names {module}.{name}, which no checkpoint holds")
        return found


def _forget(*_: Any) -> None:
    """Stands for the path that a checkpoint was written to, which is of no interest here."""


class Stored:
    """A complete checkpoint in `folder`. Everything that its metadata says is checked when this is made.

    Raises CheckpointError naming the file or the tensor.
    """

    def __init__(self, folder: FilePath) -> None:
        self.folder = folder
        try:
            self._metadata = _load_metadata(folder / METADATA)
            self.paths = _paths(self._metadata)
            self._check()
        except CheckpointError as error:
            raise CheckpointError(f"checkpoint {folder} cannot be used: {error}") from error
        except (AttributeError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise CheckpointError(f"checkpoint {folder} cannot be used: its {METADATA} holds records that are not "
                                  f"whole ({type(error).__name__})") from error

    def shape(self, path: Path) -> Shape | None:
        """A tensor's shape; None for a value that is no tensor."""
        entry = self._entry(path)
        return tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None

    def dtype(self, path: Path) -> torch.dtype:
        """A tensor's dtype as it is stored."""
        entry = self._entry(path)
        assert isinstance(entry, TensorStorageMetadata)
        return entry.properties.dtype

    def under(self, *prefix: str | int) -> list[Path]:
        """Paths that begin so, in the checkpoint's order."""
        return [path for path in self.paths if path[:len(prefix)] == prefix]

    def read_into(self, pieces: Iterable[Piece]) -> int:
        """Fills every piece's run; returns the bytes of the runs. Casts to the run's dtype."""
        targets: dict[MetadataIndex, list[tuple[torch.Tensor, Shape, Shape, Shape]]] = defaultdict(list)
        nbytes = 0
        for piece in pieces:
            nbytes += piece.nbytes
            if not piece.run.numel():
                continue
            name, entry = self.paths[piece.path], self._entry(piece.path)
            views = {tuple(box.offsets): view for box, view in piece.boxes()}
            chunks = [ChunkStorageMetadata(torch.Size(offsets), view.size()) for offsets, view in views.items()]
            for item in create_read_items_for_chunk_list(name, entry, chunks):
                assert item.dest_index.offset is not None
                targets[item.storage_index].append((views[tuple(item.dest_index.offset)], tuple(item.dest_offsets),
                                                    tuple(item.storage_offsets), tuple(item.lengths)))
        for place, indices in itertools.groupby(sorted(targets, key=self._order), key=self._file):
            with _opened(place) as file:
                for index in indices:
                    stored = self._raw(file, index) or _Loaded(self._tensor(index))
                    for view, into, out_of, sizes in targets[index]:
                        self._copy(index, stored, _cut(view, into, sizes), out_of)
        return nbytes

    def tensor(self, path: Path) -> torch.Tensor:
        """A whole tensor, on the CPU; for small ones."""
        made = torch.empty(self.shape(path) or (), dtype=self.dtype(path))
        self.read_into([Piece.whole(path, made)])
        return made

    def value(self, path: Path) -> Any:
        """A value that is no tensor."""
        if self.shape(path) is not None:
            return self.tensor(path)
        return self._load(MetadataIndex(self.paths[path]))

    def _entry(self, path: Path) -> Any:
        return self._metadata.state_dict_metadata[self.paths[path]]

    def _info(self, index: MetadataIndex) -> Any:
        return self._metadata.storage_data[index]

    def _order(self, index: MetadataIndex) -> tuple[str, int]:
        info = self._info(index)
        return str(info.relative_path), int(info.offset)

    def _raw(self, file: BinaryIO, index: MetadataIndex) -> Raw | None:
        """Where the part lies in the file, if that holds what is said of it and nothing else."""
        found = archive.find(file, self._info(index))
        entry: Any = self._metadata.state_dict_metadata[index.fqn]
        chunk = next(c for c in entry.chunks if c.offsets == index.offset)
        return found if found is not None and (found.shape, found.dtype) == (
            tuple(chunk.sizes), entry.properties.dtype) else None

    def _copy(self, index: MetadataIndex, stored: Raw | _Loaded, into: torch.Tensor, offsets: Shape) -> None:
        try:
            stored.copy(into, offsets)
        except (OSError, EOFError) as error:
            raise CheckpointError(f"{self._file(index)} cannot be read where {index.fqn!r} is: {error}") from error

    def _tensor(self, index: MetadataIndex) -> torch.Tensor:
        stored = self._load(index)
        entry: Any = self._metadata.state_dict_metadata[index.fqn]
        chunk = next(c for c in entry.chunks if c.offsets == index.offset)
        if not isinstance(stored, torch.Tensor) or stored.shape != chunk.sizes or (
                stored.dtype != entry.properties.dtype or stored.layout is not torch.strided):
            raise CheckpointError(f"{self._file(index)} holds something else than the part of {index.fqn!r} that its "
                                  f"{METADATA} says is there; the checkpoint is damaged")
        return stored

    def _load(self, index: MetadataIndex) -> Any:
        info = self._info(index)
        try:
            with self._file(index).open("rb") as file:
                return torch.load(FileSystemReader(self.folder)._slice_file(file, info), map_location="cpu",
                                  weights_only=True)
        except FileNotFoundError as error:
            raise CheckpointError(f"{self._file(index)} is missing; the checkpoint is not whole") from error
        except Exception as error:
            raise CheckpointError(f"{self._file(index)} does not hold {index.fqn!r} in a form that is safe to load: "
                                  f"{str(error).strip().splitlines()[0][:200]}") from error

    def _file(self, index: MetadataIndex) -> FilePath:
        return self.folder / str(self._info(index).relative_path)

    def _check(self) -> None:
        """Every tensor covered once, every part in a file of this folder that is long enough."""
        storage = self._metadata.storage_data
        lengths: dict[str, int] = {}
        for name, entry in self._metadata.state_dict_metadata.items():
            chunks = [(_ints(c.offsets), _ints(c.sizes)) for c in entry.chunks] if isinstance(
                entry, TensorStorageMetadata) else []
            if isinstance(entry, TensorStorageMetadata):
                check_cover(name, _ints(entry.size), chunks)
            for index in [MetadataIndex(name, offsets) for offsets, _ in chunks] or [MetadataIndex(name)]:
                if index not in storage:
                    raise CheckpointError(f"it says of no file that it holds {name!r}")
                self._check_place(name, storage[index], lengths)

    def _check_place(self, name: str, info: Any, lengths: dict[str, int]) -> None:
        file, offset, length = info.relative_path, info.offset, info.length
        if not isinstance(file, str) or FilePath(file).name != file or file in ("", ".", "..") or "\\" in file:
            raise CheckpointError(f"it places {name!r} in {file!r}, which is not a file of its own folder")
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(f"{file} was written through {info.transform_descriptors}, which dplab does not "
                                  f"read; save it again without extensions")
        if file not in lengths:
            try:
                lengths[file] = (self.folder / file).stat().st_size
            except OSError as error:
                raise CheckpointError(f"file {file} is missing, and {name!r} is in it") from error
        if not all(type(number) is int and number >= 0 for number in (offset, length)) or (
                offset + length > lengths[file]):
            raise CheckpointError(f"file {file} has {lengths[file]} bytes, and {name!r} is said to be {length} of them "
                                  f"from {offset} on; the file is torn")


def _load_metadata(path: FilePath) -> Metadata:
    try:
        with path.open("rb") as file:
            loaded = _Records(file).load()
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(f"it has no {METADATA}") from error
    except Exception as error:  # a pickle that is damaged raises whatever it likes
        raise CheckpointError(f"its {METADATA} is damaged ({type(error).__name__})") from error
    tables = getattr(loaded, "state_dict_metadata", None), getattr(loaded, "storage_data", None)
    if not isinstance(loaded, Metadata) or not all(isinstance(table, dict) for table in tables):
        raise CheckpointError(f"its {METADATA} holds no tables of tensors and files")
    for name, entry in loaded.state_dict_metadata.items():
        tensor = isinstance(entry, TensorStorageMetadata) and isinstance(getattr(entry, "chunks", None), list) and all(
            isinstance(chunk, ChunkStorageMetadata) for chunk in entry.chunks) and isinstance(
                getattr(getattr(entry, "properties", None), "dtype", None), torch.dtype)
        if not isinstance(name, str) or not (tensor or isinstance(entry, BytesStorageMetadata)):
            raise CheckpointError(f"its {METADATA} has an entry {str(name)[:80]!r} that describes no value")
    for index, info in loaded.storage_data.items():
        if not isinstance(index, MetadataIndex) or not isinstance(info, filesystem._StorageInfo):
            raise CheckpointError(f"its {METADATA} has a place that is none")
    return loaded


def _paths(loaded: Metadata) -> dict[Path, str]:
    """Keys by path. Without a table of paths, a key is a path of one."""
    told = loaded.planner_data if isinstance(loaded.planner_data, dict) else {}
    found: dict[Path, str] = {}
    for name in loaded.state_dict_metadata:
        path = told.get(name, (name,))
        if not isinstance(path, tuple) or not path or not all(isinstance(part, str | int) for part in path) or (
                key(path) != name or path in found):
            raise CheckpointError(f"its {METADATA} has a path for {name!r} that is none")
        found[path] = name
    return found


def _ints(values: Sequence[Any]) -> Shape:
    if not isinstance(values, tuple) or not all(type(value) is int for value in values):
        raise CheckpointError(f"its {METADATA} has a size that is no list of integers")
    return values


class _Loaded:
    """A stored tensor as torch.load gives it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def copy(self, into: torch.Tensor, offsets: Shape) -> None:
        """As `Raw.copy`."""
        into.copy_(_cut(self._tensor, offsets, tuple(into.shape)))


def _opened(path: FilePath) -> BinaryIO:
    try:
        return path.open("rb")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; the checkpoint is not whole") from error


def _cut(tensor: torch.Tensor, offsets: Shape, sizes: Shape) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor
