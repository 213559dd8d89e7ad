"""The state page: a small memory-mapped file that says where a rank stands, also after `kill -9`.

The kernel keeps a mapped page of a file whatever happens to the process, so the last thing written is there to
read when a rank hangs or is gone. Writing costs one copy of 92 bytes, no system call.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path
from typing import Any, NamedTuple

from dplab.errors import RunError

_RECORD = struct.Struct("<4sIQqiq48sQ")
"""magic, version, sequence, step, bucket, monotonic ns, phase, sequence again (differs where a write was cut)."""
_MAGIC, _VERSION = b"dpst", 1
_PAGE = 4096
_BETWEEN = {"import": "importing its program", "running": "in its program", "paused": "paused", "resumed": "resumed",
            "returned": "returned"}
"""Phases in which no step is under way, and how they are said."""
_LOOKS = 5


class RankState(NamedTuple):
    """Where a rank stood when it last noted it; `time` in ns of the host's monotonic clock, `step` the steps that had
    ended: the index of the one under way."""

    sequence: int
    step: int
    bucket: int
    time: int
    phase: str
    whole: bool
    """False where the note was cut short by the end of the process."""

    def __str__(self) -> str:
        """In words, steps counted from 1: `in step 3, all_reduce grads, bucket 2`, `after step 3, paused`."""
        if (said := _BETWEEN.get(self.phase)) is not None:
            return f"after step {self.step}, {said}" if self.step else f"before its first step, {said}"
        bucket = f", bucket {self.bucket}" if self.bucket >= 0 else ""
        return f"in step {self.step + 1}, {self.phase or 'not started'}{bucket}"


def under_way(step: int) -> str:
    """Where a program is that has ended so many steps, in words that count from 1; whether it had begun the first one
    nobody knows."""
    return f"in step {step + 1}" if step else "before its first step was done"


class StatePage:
    """The writing end. One writer; readers may look at any time."""

    def __init__(self, path: Path) -> None:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.write(handle, bytes(_PAGE))  # real blocks: touching a sparse page on a full disk is a SIGBUS
            self._page: mmap.mmap | None = mmap.mmap(handle, _PAGE)
        finally:
            os.close(handle)
        self._sequence = 0

    def write(self, step: int, phase: str, bucket: int) -> None:
        """Notes where this rank stands now; nothing in a process that the rank forked."""
        if self._page is None:
            return
        self._sequence += 1
        # made whole, then laid there at once: pack_into empties the page first, and a rank may lose its core right then
        self._page[: _RECORD.size] = _RECORD.pack(_MAGIC, _VERSION, self._sequence, step, bucket, time.monotonic_ns(),
                                                  phase.encode()[:48], self._sequence)

    def detach(self) -> None:
        """Leaves the page to the process that owns it; later writes do nothing."""
        self._page = None


def read_state(path: Path) -> RankState | None:
    """What a rank last noted; None where it noted nothing. RunError where the file is something else.

    A page that is being written to is looked at again; what is still cut then was cut by the end of the process.
    """
    for look in range(_LOOKS):
        if look:
            time.sleep(0.001)
        found = _read(path)
        if found is None or (found[-1] == found[2] and found[0] in (_MAGIC, bytes(4))):
            break
    if found is None or found[0] == bytes(4):
        return None
    magic, version, sequence, step, bucket, when, phase, again = found
    if magic != _MAGIC or version != _VERSION:
        raise RunError(f"{path} is not a state page of this version ({_VERSION}); read it with the dplab that wrote it")
    return RankState(sequence, step, bucket, when, phase.rstrip(b"\0").decode(errors="replace"), sequence == again)


def _read(path: Path) -> tuple[Any, ...] | None:
    try:
        data = path.read_bytes()[: _RECORD.size]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}; only the run's owner may") from error
    return None if len(data) < _RECORD.size else _RECORD.unpack(data)
