"""Writing through torch.distributed.checkpoint: its file writer, its metadata, and no collective of its own.

Who writes what follows from the layout, so no plan has to be agreed on: every rank writes its pieces, and rank 0
puts the metadata together from what all have written. Any reader of torch.distributed.checkpoint takes the result.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from dplab.checkpoint.manifest import check_cover
from dplab.checkpoint.pieces import Path, Share, key
from dplab.errors import CheckpointError

PORTION = 16 * 1024 * 1024
"""Bytes from which on a file may be closed; until then torch's writer keeps a copy of all that it has written to it."""
FILES = 16
"""About as many files has a rank, unless they would be larger than a unit."""


@dataclass(frozen=True)
class Written:
    """What one rank has written: where each value is, and the paths behind the keys."""

    items: list[WriteItem]
    results: list[WriteResult]
    paths: dict[str, Path]


class _Sources(DefaultSavePlanner):
    """Hands the writer what stands behind an item: a view, or bytes."""

    def __init__(self, sources: dict[MetadataIndex, torch.Tensor | bytes]) -> None:
        super().__init__()
        self._sources = sources

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        source = self._sources[write_item.index]
        return io.BytesIO(source) if isinstance(source, bytes) else source.detach()


def write(folder: FilePath, rank: int, share: Share) -> Written:
    """Writes a rank's share into files of its own, synced; needs no other rank. Raises OSError."""
    sources: dict[MetadataIndex, torch.Tensor | bytes] = {}
    items = list(_items(share, sources))
    results: list[WriteResult] = []
    largest = max(PORTION, min(share.unit, share.nbytes // FILES))
    for number, portion in enumerate(_portions(items, largest)):
        writer = FileSystemWriter(folder)
        # the writer names its files after the rank; ours has several sets of them
        writer.set_up_storage_writer(False, rank=f"{rank}_{number}", use_collectives=False)
        plan = writer.prepare_local_plan(SavePlan(portion))
        results += writer.write_data(plan, _Sources(sources)).wait()
    return Written(items, results, {key(path): path for path in share.paths})


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


def _items(share: Share, sources: dict[MetadataIndex, Any]) -> Iterator[WriteItem]:
    for piece in share.pieces:
        properties = TensorProperties(dtype=piece.run.dtype)
        for box, view in piece.boxes():
            offsets, sizes = torch.Size(box.offsets), torch.Size(box.sizes)
            index = MetadataIndex(key(piece.path), offsets)
            sources[index] = view
            yield WriteItem(index, WriteItemType.SHARD, tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(offsets, sizes), properties=properties, size=torch.Size(piece.shape)))
    for leaf in share.leaves:
        index = MetadataIndex(key(leaf.path))
        sources[index] = leaf.data
        yield WriteItem(index, WriteItemType.BYTE_IO)


def _portions(items: Sequence[WriteItem], largest: int) -> Iterator[list[WriteItem]]:
    portion: list[WriteItem] = []
    held = 0
    for item in items:
        size = item.tensor_storage_size() or 0
        if portion and held + size > largest:
            yield portion
            portion, held = [], 0
        portion.append(item)
        held += size
    if portion:
        yield portion
