"""An event file: whole lines appended, whole batches at a time, the clock anchored in the first."""

from __future__ import annotations

import errno
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

from dplab.errors import RunError
from dplab.telemetry.events import SCHEMA

_TAIL = 1 << 24
"""Bytes in which the last line of a file surely lies."""

Record = tuple[str, str, int, int, int, dict[str, Any]]
"""kind, name, step, t0, t1, attrs"""


class EventFile:
    """Appends events as lines to one file, whole batches at a time; the first line anchors the clock."""

    def __init__(self, path: Path, rank: int, **header: Any) -> None:
        self.path = path
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self._unwritten = b""
        self._encode = json.JSONEncoder(separators=(",", ":"), default=_plain).encode
        self._rank = rank
        anchor = {"schema": SCHEMA, "rank": rank, "pid": os.getpid(), "host": platform.node(),
                  "monotonic": time.monotonic_ns(), "wall": time.time_ns(), **header}
        if not self._goes_on():
            self._write(self._encode(anchor).encode() + b"\n")

    def _goes_on(self) -> bool:
        """Whether a rank of this number has written here before a restart; the line in which it was killed goes."""
        size = os.fstat(self._handle).st_size
        start = max(0, size - _TAIL)
        whole = os.pread(self._handle, _TAIL, start).rfind(b"\n") + 1
        if start + whole < size:
            os.ftruncate(self._handle, start + whole)
        return start + whole > 0

    def write(self, records: list[Record]) -> None:
        """Appends records `(kind, name, step, t0, t1, attrs)`; RunError on a full disk, which loses none of them."""
        self._write(("\n".join(map(self._encode, records)) + "\n").encode() if records else b"")

    def _write(self, data: bytes) -> None:
        self._unwritten += data
        try:
            while self._unwritten:
                # A write cut short (disk full) leaves a torn line; the next one goes on exactly there.
                self._unwritten = self._unwritten[os.write(self._handle, self._unwritten):]
        except OSError as error:
            reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
            raise RunError(f"rank {self._rank} cannot write its events to {self.path}: {reason}; "
                           f"free space there, or set DPLAB_RUNS to a folder on another disk") from error

    def close(self) -> None:
        """Closes the file; what `write` got is in it."""
        os.close(self._handle)


def _plain(value: Any) -> Any:
    """Values of numpy and torch as Python's; anything else as its text."""
    to_list = getattr(value, "tolist", None)
    return to_list() if callable(to_list) else str(value)
