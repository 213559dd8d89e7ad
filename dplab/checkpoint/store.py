"""Writing what torch.distributed.checkpoint reads: its files, its metadata, and no collective of its own.

Who writes what follows from the layout, so no plan has to be agreed on: every rank writes its pieces, and rank 0
puts the metadata together from what all have written. Any reader of torch.distributed.checkpoint takes the result.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import BinaryIO

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from dplab.checkpoint.manifest import boxes, check_cover
from dplab.checkpoint.pieces import Path, Piece, Share, key
from dplab.errors import CheckpointError

PORTION = 8 * 1024 * 1024
"""Bytes of a file from which on the disk is put to work: the sync at the end then has little left to wait for (216 MB
in 0.15 s instead of 0.21)."""


@dataclass(frozen=True)
class Written:
    """What one rank has written: where each value is, and the paths behind the keys."""

    items: list[WriteItem]
    results: list[WriteResult]
    paths: dict[str, Path]


def write(folder: FilePath, rank: int, share: Share) -> Written:
    """Writes a rank's share into a file of its own, synced; needs no other rank. Raises OSError.

    Each tensor is an archive of torch.save's, one behind the other, straight from training's own memory. What is
    copied is the chunk that is being written, from a GPU or where several runs hold it.
    """
    items, results, name, begun = [], [], f"__{rank}_0.distcp", 0
    with (folder / name).open("wb") as file:
        for item, source in _items(share):
            start = file.tell()
            if isinstance(source, bytes):
                file.write(source)
            else:
                _save(_alone(source), file)
            length = file.tell() - start
            results.append(WriteResult(index=item.index, size_in_bytes=length,
                                       storage_data=_StorageInfo(name, start, length)))
            items.append(item)
            if start + length - begun >= PORTION:
                begun = _begin_sync(file, begun)
        file.flush()
        os.fsync(file.fileno())
    return Written(items, results, {key(path): path for path in share.paths})


def _save(tensor: torch.Tensor, file: BinaryIO) -> None:
    """As torch.save; where a write failed, with the system's word for it rather than what came of it in torch's own."""
    try:
        torch.save(tensor, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise


def _begin_sync(file: BinaryIO, begun: int) -> int:
    """Lets the disk work on what was written from `begun` on while more is; returns where that ends.

    Linux takes the advice for bytes that are not on disk yet by starting to write them, and keeps them in memory.
    """
    file.flush()
    if sys.platform == "linux":
        os.posix_fadvise(file.fileno(), begun, file.tell() - begun, os.POSIX_FADV_DONTNEED)
    return file.tell()


def _alone(view: torch.Tensor) -> torch.Tensor:
    """The same memory, of the CPU, as a storage that is no longer than the view: torch.save writes whole storages."""
    flat = view.detach().cpu().reshape(-1)
    if not flat.numel():
        return torch.empty(view.shape, dtype=view.dtype)
    return torch.from_numpy(flat.view(torch.uint8).numpy()).view(view.dtype).view(view.shape)


def finish(folder: FilePath, every: Sequence[Written], order: Iterable[Path], aliases: dict[Path, Path]) -> int:
    """Writes the metadata of what all ranks have written; returns the bytes of the files.

    `order`: paths that come first, in this order. `aliases`: paths of tensors whose bytes are those of another
    path as well (tied weights). Raises CheckpointError where a tensor has a gap or was written twice.
    """
    _, metadata = create_default_global_save_plan([SavePlan(written.items) for written in every])
    paths = {name: path for written in every for name, path in written.paths.items()}
    results = [result for written in every for result in written.results]
    tables = metadata.state_dict_metadata
    for name, entry in tables.items():
        if isinstance(entry, TensorStorageMetadata):
            check_cover(name, tuple(entry.size), [(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks])
    for alias, first in aliases.items():
        tables[key(alias)], paths[key(alias)] = tables[key(first)], alias
        results += [replace(result, index=MetadataIndex(key(alias), result.index.offset))
                    for result in results if result.index.fqn == key(first)]
    rank_of = {key(path): place for place, path in enumerate(order)}
    names = sorted(tables, key=lambda name: rank_of.get(name, len(rank_of)))
    metadata = Metadata({name: tables[name] for name in names}, planner_data={name: paths[name] for name in names})
    _check_files(folder, results)
    writer = FileSystemWriter(folder)
    writer.set_up_storage_writer(True)
    writer.finish(metadata, [results])
    return sum(file.stat().st_size for file in folder.iterdir())


def _check_files(folder: FilePath, results: Sequence[WriteResult]) -> None:
    """What other ranks have written is in this rank's folder too: it may be another one of the same name."""
    ends: dict[str, int] = {}
    for result in results:
        place = result.storage_data
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end in ends.items():
        if not (folder / name).is_file() or (folder / name).stat().st_size < end:
            raise CheckpointError(f"rank 0 does not see {folder / name}, which another rank has written; all ranks "
                                  f"must see the same file system")


def _items(share: Share) -> Iterator[tuple[WriteItem, torch.Tensor | bytes]]:
    for row in _rows(share.pieces):
        first, last = row[0], row[-1]
        properties = TensorProperties(dtype=first.run.dtype)
        for box in boxes(first.shape, first.start, last.start + last.run.numel()):
            offsets, sizes = torch.Size(box.offsets), torch.Size(box.sizes)
            parts = [part for piece in row for low in [first.start + box.at - piece.start]
                     if (part := piece.run[max(0, low):max(0, low + box.numel)]).numel()] or [first.run]
            yield WriteItem(MetadataIndex(key(first.path), offsets), WriteItemType.SHARD, tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(offsets, sizes), properties=properties,
                size=torch.Size(first.shape))), (parts[0] if len(parts) == 1 else torch.cat(parts)).view(sizes)
    for leaf in share.leaves:
        yield WriteItem(MetadataIndex(key(leaf.path)), WriteItemType.BYTE_IO), leaf.data


def _rows(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces of one tensor that follow each other, which become as few chunks as one piece would."""
    rows: dict[Path, list[Piece]] = {}
    for piece in sorted(pieces, key=lambda piece: piece.start):
        row = rows.setdefault(piece.path, [])
        if row and row[-1].start + row[-1].run.numel() != piece.start:
            yield rows.pop(piece.path)
            row = rows.setdefault(piece.path, [])
        row.append(piece)
    yield from rows.values()
