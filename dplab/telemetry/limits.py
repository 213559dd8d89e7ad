"""How much memory there is on the host: what its processes together may use."""

from __future__ import annotations

from pathlib import Path

import psutil

_GROUPS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""A container's own limit, in the second and in the first version of control groups."""


def host_memory(groups: tuple[Path, ...] = _GROUPS) -> tuple[int, str]:
    """Bytes, and whose limit it is: the machine's memory, or less where a control group (a container) allows less."""
    total = int(psutil.virtual_memory().total)
    for path in groups:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < total:
            return int(text), "container, all ranks"
    return total, "host, all ranks"
