"""Memory that the processes of one host share, without a name: an owner's memfd, opened by its peers.

A peer reaches it as /proc/<pid>/fd/<fd>. There is nothing in any directory, so a rank killed at any moment
leaves nothing behind, and nothing is bounded by the size of /dev/shm.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from dplab.errors import WireError

LARGE = 16 << 20
"""Bytes from which on it is worth asking first whether they are there."""
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_serials = itertools.count(1)


@dataclass(frozen=True)
class Place:
    """Where bytes of a process lie, as its peers need to know it: in which segment, from which byte on."""

    serial: int
    fd: int
    nbytes: int
    offset: int = 0


class Segment:
    """Shared memory owned by this process, all of it allocated; freed with the last tensor that lies in it.

    `wiped`: its pages go at once then. Otherwise they stay until the last peer lets go of them.
    """

    def __init__(self, nbytes: int, *, wiped: bool = True) -> None:
        _ask_for(nbytes)
        self.nbytes = nbytes
        self.fd = os.memfd_create("dplab", os.MFD_CLOEXEC)
        try:
            # pages that were not to be had are an error here; later they would be a SIGBUS
            os.posix_fallocate(self.fd, 0, nbytes)
            self.array = _mapped("self", self.fd, nbytes)
        except (OSError, RuntimeError) as error:
            os.close(self.fd)
            why = error.strerror if isinstance(error, OSError) else error
            raise WireError(f"{_size(nbytes)} of shared memory are not to be had ({why}); use fewer ranks, a smaller "
                            f"model or backend='gloo'") from error
        self.place = Place(next(_serials), self.fd, nbytes)
        weakref.finalize(self.array, _free, self.fd, nbytes if wiped else 0, os.getpid()).atexit = False

    def tensor(self) -> torch.Tensor:
        """All of it as bytes; keeps it alive."""
        return torch.from_numpy(self.array)


def _mapped(process: int | str, fd: int, nbytes: int) -> Bytes:
    """The memory behind another process' descriptor, or an own one; holds no descriptor itself."""
    return torch.from_file(f"/proc/{process}/fd/{fd}", shared=True, size=nbytes, dtype=torch.uint8).numpy()


def _free(fd: int, wiped: int, owner: int) -> None:
    # peers may have it mapped for long, and never read it again: the pages go now. Not by a fork of the owner.
    if wiped and os.getpid() == owner:
        with mmap.mmap(fd, wiped) as pages:
            pages.madvise(mmap.MADV_REMOVE)
    os.close(fd)


class Homes:
    """Which tensors of this process lie in segments of its own."""

    def __init__(self) -> None:
        self._segments: dict[int, Place] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in a segment of its own, which lives as long as its storage."""
        numel = math.prod(shape)
        if not numel:
            return torch.empty(tuple(shape), dtype=dtype)
        segment = Segment(numel * dtype.itemsize)
        tensor = segment.tensor().view(dtype)
        address = tensor.untyped_storage().data_ptr()
        self._segments[address] = segment.place
        weakref.finalize(segment.array, self._segments.pop, address, None).atexit = False
        return tensor.view(tuple(shape))

    def place(self, tensor: torch.Tensor) -> Place | None:
        """Where the tensor begins; None where it is private or has gaps."""
        address = tensor.untyped_storage().data_ptr()
        home = self._segments.get(address)
        if home is None or not tensor.is_contiguous():
            return None
        return Place(home.serial, home.fd, home.nbytes, tensor.data_ptr() - address)


HOMES = Homes()


class Cuts:
    """Tensors cut from one piece of memory: the same ones serve again and again."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._cut: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}

    def cut(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """`numel` values from byte `offset` on."""
        key = (offset, numel, dtype)
        tensor = self._cut.get(key)
        if tensor is None:
            if len(self._cut) >= 512:
                self._cut.clear()
            tensor = self._cut[key] = self._memory[offset:offset + numel * dtype.itemsize].view(dtype)
        return tensor


class Window(Cuts):
    """A peer's segment, mapped here."""

    def __init__(self, pid: int, place: Place) -> None:
        path = f"/proc/{pid}/fd/{place.fd}"
        try:
            if os.stat(path).st_size != place.nbytes:
                raise WireError(f"the memory of process {pid} is not what it said it is: it has gone on meanwhile")
            self.array = _mapped(pid, place.fd, place.nbytes)
        except WireError:
            raise
        except (OSError, RuntimeError) as error:
            raise WireError(f"the memory of process {pid} cannot be opened ({error}): it has ended, or runs in another "
                            f"container or under another user; use backend='gloo' there") from error
        super().__init__(torch.from_numpy(self.array))


class Windows:
    """Segments of peers that are mapped here; the longest unused ones go."""

    KEPT = 256

    def __init__(self) -> None:
        self._open: OrderedDict[tuple[int, int], Window] = OrderedDict()

    def at(self, pid: int, place: Place) -> Window:
        key = (pid, place.serial)
        window = self._open.get(key)
        if window is None:
            window = self._open[key] = Window(pid, place)
            if len(self._open) > self.KEPT:
                self._open.popitem(last=False)
        else:
            self._open.move_to_end(key)
        return window


WINDOWS = Windows()


def _ask_for(nbytes: int) -> None:
    """Refuses what the machine or this control group has no room for: the kernel would kill instead."""
    if nbytes < LARGE:
        return
    free = min(psutil.virtual_memory().available, _free_in_group())
    if nbytes > free:
        raise WireError(f"{_size(nbytes)} of shared memory are wanted where {_size(free)} are free; use fewer ranks, "
                        f"a smaller model or backend='gloo'")


def _free_in_group() -> float:
    """Bytes left in this process' control group (version 2); infinite where it has no limit or does not tell."""
    try:
        path = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2]
        folder = Path(f"/sys/fs/cgroup{path}")
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return math.inf
    return math.inf if limit == "max" else int(limit) - used + int(stat.get("inactive_file", 0))


def _size(nbytes: float) -> str:
    return f"{nbytes / 2**20:.1f} MiB" if nbytes < 2**30 else f"{nbytes / 2**30:.1f} GiB"
