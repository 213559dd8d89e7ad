"""Who a process is, whether it lives, and what it uses: read from outside, so that training is left alone."""

from __future__ import annotations

import functools
import re
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil

LINUX = sys.platform.startswith("linux")
SHARED = b"/memfd:dplab"
"""How the maps of a process show what it shares with other ranks."""
_PRIVATE, _SHARE = re.compile(rb"^Private_\w+: +(\d+)", re.MULTILINE), re.compile(rb"^Pss: +(\d+)", re.MULTILINE)
_ANONYMOUS = re.compile(rb"^RssAnon:\s+(\d+)", re.MULTILINE)
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Identity(NamedTuple):
    """A process beyond its pid, which the system reuses: the pid, when it was created, in which boot."""

    pid: int
    created: float
    boot: str = ""

    @classmethod
    def of(cls, pid: int) -> Identity | None:
        """The identity of a process that lives now, else None."""
        created = _created(pid)
        return None if created is None else cls(pid, created, boot())

    @classmethod
    def from_list(cls, values: list[Any]) -> Identity:
        """From the JSON array that the tuple becomes."""
        return cls(int(values[0]), float(values[1]), str(values[2]))

    def lives(self) -> bool:
        """True while this very process runs; a zombie does not."""
        return self.boot == boot() and _created(self.pid) == self.created


class Usage(NamedTuple):
    """What a process has used up to now: CPU seconds, private and resident bytes."""

    cpu_seconds: float
    private: int
    resident: int


def usage(pid: int) -> Usage | None:
    """Usage of a process now, None where it is gone.

    Private bytes are those that would come free if the process ended (smaps_rollup's Private_*): a rank forked
    from a preloaded parent shares the libraries' pages with it, and resident bytes would count them for each.
    Of the memory in which ranks share their buffers a page counts in equal parts for those that have it mapped.
    """
    return Meter(pid).read()


class Meter:
    """Usage of one process again and again, at little cost to it.

    To tell private bytes the kernel walks all pages of a process, and whoever wants a new page there waits (measured:
    17 ms for a rank of the small GPT). So that is asked for a share `WALKING` of the time at most; in between private
    bytes move as the anonymous ones do, of which the kernel keeps count.
    """

    WALKING = 0.003

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._due = 0.0
        """when pages may be walked again, on the monotonic clock"""
        self._apart = 0
        """private bytes less anonymous ones, when they were"""

    def read(self) -> Usage | None:
        """Usage now, None where the process is gone."""
        try:
            process = psutil.Process(self.pid)
            times, resident = process.cpu_times(), process.memory_info().rss
            private = self._private() if LINUX else int(process.memory_full_info().uss)
        except (psutil.Error, OSError):  # it ended between two reads, or is a zombie without memory
            return None
        return Usage(times.user + times.system, private, resident)

    def _private(self) -> int:
        began = time.monotonic()
        if began >= self._due:
            private = _private_linux(self.pid)
            self._apart = private - _anonymous(self.pid)
            ended = time.monotonic()
            self._due = ended + (ended - began) / self.WALKING
            return private
        return max(0, _anonymous(self.pid) + self._apart)


def _anonymous(pid: int) -> int:
    return _sum(Path(f"/proc/{pid}/status").read_bytes(), _ANONYMOUS)


def _private_linux(pid: int) -> int:
    if SHARED not in Path(f"/proc/{pid}/maps").read_bytes():
        return _sum(Path(f"/proc/{pid}/smaps_rollup").read_bytes(), _PRIVATE)
    smaps = Path(f"/proc/{pid}/smaps").read_bytes()
    shared = b"".join(mapping for mapping in smaps.split(b"VmFlags:") if SHARED in mapping)
    return _sum(smaps, _PRIVATE) + _sum(shared, _SHARE) - _sum(shared, _PRIVATE)


def _sum(smaps: bytes, field: re.Pattern[bytes]) -> int:
    return 1024 * sum(map(int, field.findall(smaps)))


def _created(pid: int) -> float | None:
    """Creation time in the platform's own unit; on Linux ticks since boot, which no clock change moves."""
    if LINUX:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        fields = stat[stat.rindex(")") + 2 :].split()  # the name before it may hold spaces and parentheses
        return None if fields[0] in "ZX" else float(fields[19])
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None


@functools.cache
def boot() -> str:
    """What tells this running kernel from every other one, containers included; empty where only Linux would tell."""
    return _BOOT.read_text().strip() if LINUX else ""
