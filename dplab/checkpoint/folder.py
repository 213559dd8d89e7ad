"""A checkpoint's folder on disk: complete, or not there.

A checkpoint is written into a hidden folder beside its place and renamed into it, so what stands there is whole at
every moment. One that it replaces is kept until then; between the two renames it stands under a hidden name, under
which a reader finds it.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from dplab.errors import CheckpointError, UsageError

METADATA = ".metadata"
"""torch's name of the file that is written last."""


class Folder:
    """The place of one checkpoint."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        if not self.path.name:
            raise UsageError(f"{str(path)!r} is no place for a checkpoint; give the path of a folder of its own")
        self.new = self.path.parent / f".{self.path.name}.saving"
        self._old = self.path.parent / f".{self.path.name}.old"

    def refuse_other_content(self) -> None:
        """Raises UsageError where something stands that is no checkpoint."""
        if self.path.is_file():
            raise UsageError(f"{self.path} is a file; give engine.save() a folder (or a name that ends in "
                             f".safetensors)")
        if self.path.is_dir() and any(self.path.iterdir()) and not (self.path / METADATA).is_file():
            raise UsageError(f"{self.path} is not empty and is no checkpoint; give engine.save() a folder of its own")

    def begin(self) -> None:
        """Makes an empty folder to write into, and clears what a save that died has left. On one rank."""
        if not self.path.exists() and (self._old / METADATA).is_file():
            self._old.rename(self.path)
        for left in (self.new, self._old):
            if left.exists():
                shutil.rmtree(left)
        self.new.mkdir(parents=True)

    def appears(self, limit: float = 10.0) -> bool:
        """Whether the folder that `begin` made on another rank is here too; networks may take a moment to say so."""
        deadline = time.monotonic() + limit
        while not self.new.is_dir():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def publish(self) -> None:
        """What was written becomes the checkpoint. On one rank, when all have written."""
        _sync(self.new)
        if self.path.exists():
            self.path.rename(self._old)
        try:
            self.new.rename(self.path)
        except OSError:
            if self._old.exists():
                self._old.rename(self.path)
            raise
        _sync(self.path.parent)
        if self._old.exists():
            shutil.rmtree(self._old, ignore_errors=True)

    def abandon(self) -> None:
        """Drops what was written so far. On one rank."""
        shutil.rmtree(self.new, ignore_errors=True)

    def readable(self) -> Path:
        """Where the complete checkpoint lies. Raises CheckpointError where there is none, saying what there is."""
        for place in (self.path, self._old):
            if (place / METADATA).is_file():
                return place
        if not self.path.exists():
            torn = f"; a save into it was torn off ({self.new.name} beside it is not complete)" if self.new.exists() \
                else ""
            raise CheckpointError(f"there is no checkpoint {self.path}{torn}")
        raise CheckpointError(f"{self.path} is no complete checkpoint: it has no {METADATA} file; give the folder that "
                              f"engine.save() or torch.distributed.checkpoint wrote")


def _sync(folder: Path) -> None:
    """Makes names in a folder survive a loss of power, where the system can."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        pass  # not every file system syncs folders; the files themselves are
    finally:
        os.close(handle)
