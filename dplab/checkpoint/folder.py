"""A checkpoint's folder on disk: complete, or not there.

A checkpoint is written into a hidden folder beside its place and renamed into it, so what stands there is whole at
every moment. One that it replaces is kept until then; between the two renames it stands under a hidden name, under
which a reader finds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from dplab.errors import CheckpointError, UsageError

METADATA = ".metadata"
"""torch's name of the file that is written last."""
_BUSY_S = 10.0
"""So long a save waits for another into the same place: as long as the processes of one that died may take to end."""


class Folder:
    """The place of one checkpoint."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        if self.path.is_symlink():      # renamed, it would be the link that is replaced, and not what it stands for
            self.path = Path(os.path.realpath(self.path))
        if not self.path.name:
            raise UsageError(f"{str(path)!r} is no place for a checkpoint; give the path of a folder of its own")
        self.new = self.path.parent / f".{self.path.name}.saving"
        self._old = self.path.parent / f".{self.path.name}.old"
        self._let_go: Callable[[], object] = lambda: None

    def refuse_other_content(self) -> None:
        """Raises UsageError where something stands that is no checkpoint."""
        if self.path.is_file():
            raise UsageError(f"{self.path} is a file; give engine.save() a folder (or a name that ends in "
                             f".safetensors)")
        if self.path.is_dir() and any(self.path.iterdir()) and not (self.path / METADATA).is_file():
            raise UsageError(f"{self.path} is not empty and is no checkpoint; give engine.save() a folder of its own")

    def begin(self) -> None:
        """Makes an empty folder to write into, and clears what a save that died has left. On one rank. CheckpointError
        where another save into the same place goes on and on."""
        deadline = time.monotonic() + _BUSY_S
        while not self._begun():
            if time.monotonic() > deadline:
                raise CheckpointError(f"another save into {self.path} is under way, of another engine or program; wait "
                                      f"until it has ended, or give each engine a folder of its own")
            time.sleep(0.05)

    def _begun(self) -> bool:
        """Whether the folder is made, and this save's alone."""
        with contextlib.ExitStack() as kept:      # whatever goes wrong, no lock outlives this call
            if self.new.exists() and not self._cleared(kept):
                return False
            try:
                self.new.mkdir(parents=True)
            except FileExistsError:
                return False
            held = _lock(self.new)
            if held is None:
                return False
            kept.callback(held)
            if self.path.exists():      # by a save that still clears away the one before?
                published = _lock(self.path)
                if published is None:
                    self.new.rmdir()
                    return False
                published()
            elif (self._old / METADATA).is_file():
                self._old.rename(self.path)
            if self._old.exists():
                shutil.rmtree(self._old)
            kept.pop_all()
            self._let_go = weakref.finalize(self, held)
        return True

    def _cleared(self, kept: contextlib.ExitStack) -> bool:
        """Whether what a save that died has left is gone; False where it goes on."""
        left = _lock(self.new)
        if left is not None:
            kept.callback(left)
            shutil.rmtree(self.new)
        return left is not None

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
        self._let_go()

    def abandon(self) -> None:
        """Drops what was written so far. On one rank."""
        shutil.rmtree(self.new, ignore_errors=True)
        self._let_go()

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


def _lock(folder: Path) -> Callable[[], None] | None:
    """Locks a folder, so that who comes sees that a save is at it; returns what lets go of it, as a process' end does.
    None where another has it, or has put another in its place."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return None

    def let_go() -> None:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)      # by itself: a child that was forked meanwhile has the same handle
        os.close(handle)

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        let_go()
        return None
    except OSError:
        pass  # not every file system locks; there a second save is not noticed
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(handle), os.stat(folder)):
            return let_go
    let_go()
    return None


def _sync(folder: Path) -> None:
    """Makes names in a folder survive a loss of power, where the system can."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        pass  # not every file system syncs folders; the files themselves are
    finally:
        os.close(handle)
