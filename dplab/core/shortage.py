"""Out of memory, told in bytes: who holds what on this rank, and what would take less.

torch's own error stays the cause and its class stays, so that whoever catches it still does.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from dplab.core.ledger import Ledger
from dplab.layout import MIB
from dplab.specs import SHARDINGS, Placement, Sharding, Strategy
from dplab.telemetry.recorder import Recorder
from dplab.wire.world import Mesh, World

SNAPSHOT = "out-of-memory.pickle"
"""File of a rank's directory with CUDA's allocator as it was, for https://docs.pytorch.org/memory_viz."""
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": MIB, "GiB": 2**30}
_WORDS = ("can't allocate memory", "not enough memory", "out of memory")
_FRAGMENTED = 0.2
"""Share of what is reserved that is not allocated, from which on expandable segments are advised."""


class Shortage:
    """Tells of this rank's memory when there is no more."""

    def __init__(self, ledger: Ledger, strategy: Strategy, mesh: Mesh, world: World, recorder: Recorder) -> None:
        self.ledger, self.strategy, self.world, self.recorder = ledger, strategy, world, recorder
        self.ranks = mesh.shard.size if mesh.shard.size > 1 else world.size
        """among which states are cut, or would be"""

    @contextmanager
    def told(self, where: str, steps: int) -> Iterator[None]:
        """An error of memory inside says what `where` found, in the step that comes after so many of the engine's."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_shortage(error) or hasattr(error, "_dplab_told"):
                raise
            told = type(error)(self._text(error, f"{where} of step {steps + 1}"))
            told._dplab_told = True  # type: ignore[union-attr]
            raise told from error

    def _text(self, error: BaseException, where: str) -> str:
        held = self.ledger.bytes()
        first = (str(error) or type(error).__name__).partition("\n")[0].rstrip(".")
        categories = ", ".join(f"{name} {size / MIB:.1f} MiB" for name, size in held.items()
                               if size and name not in ("allocated", "reserved", "fragmentation"))
        advice = self._advice(held, wanted(str(error)))
        text = (f"out of memory in the {where} on rank {self.world.rank} of "
                f"{self.world.size}: {first}. It holds {categories}{_allocator(held)}. {advice}")
        return text + self._snapshot()

    def _advice(self, held: dict[str, int], request: int | None) -> str:
        """The next cheaper strategies, as far as the first that frees what was asked for; and what else there is."""
        now = self.strategy.sharding
        before = _states(held, now, now, self.ranks)
        told: list[str] = []
        for name, sharding in SHARDINGS.items():
            freed = before - _states(held, now, sharding, self.ranks)
            if freed <= 0:
                continue
            enough = request is not None and freed >= request
            told.append(f"strategy {name} would hold {freed / MIB:.1f} MiB less"
                        + (", which is enough" if enough else ""))
            if enough:
                break
        moved = held["optimizer"] + held["master"] + (held["grads"] if now.grads is Placement.SHARDED else 0)
        if moved and self.world.device.type == "cuda" and now.optim is Placement.SHARDED and (
                self.strategy.offload == "none"):
            told.append(f"offload=optimizer would move {moved / MIB:.1f} MiB to the host's memory")
        if self.strategy.recompute == "none" and held["activations"]:
            told.append(f"recompute would keep of the activations ({held['activations'] / MIB:.1f} MiB) little more "
                        f"than each unit's input")
        told.append("a smaller micro-batch with accumulate takes less at once")
        if self.world.size == 1 and now.optim is Placement.SHARDED:
            told.append("more ranks would share the states")
        return f"What would help: {'; '.join(told)}."

    def _snapshot(self) -> str:
        folder = self.recorder.folder
        if folder is None or self.world.device.type != "cuda":
            return ""
        with contextlib.suppress(RuntimeError, OSError):      # no memory for it, a full disk: the error itself matters
            path = Path(folder) / SNAPSHOT
            torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
            return f" The allocator's blocks are in {path}."
        return ""


def is_shortage(error: BaseException) -> bool:
    """Whether an error tells of memory, of a device or of the host."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        type(error) is RuntimeError and any(word in str(error).lower() for word in _WORDS))


def wanted(message: str) -> int | None:
    """Bytes that torch could not get, as its message says; None where it does not."""
    found = re.search(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", message)
    return None if found is None else int(float(found[1]) * _UNITS[found[2]])


def _states(held: dict[str, int], now: Sharding, other: Sharding, size: int) -> int:
    """Bytes of this rank's model states under another sharding, from what it holds under this one."""
    total = 0.0
    for category, role in (("params", "params"), ("grads", "grads"), ("optimizer", "optim"), ("master", "optim")):
        whole = held[category] * (size if getattr(now, role) is Placement.SHARDED else 1)
        total += whole / (size if getattr(other, role) is Placement.SHARDED else 1)
    return round(total)


def _allocator(held: dict[str, int]) -> str:
    """What CUDA's allocator says, where there is one."""
    if "reserved" not in held:
        return ""
    retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    text = (f"; CUDA's allocator has {held['allocated'] / MIB:.1f} MiB allocated of {held['reserved'] / MIB:.1f} MiB "
            f"reserved, after {retries} retries")
    if held["fragmentation"] > _FRAGMENTED * held["reserved"]:
        text += (" (much of it in pieces: PYTORCH_ALLOC_CONF=expandable_segments:True, set at the start, joins "
                 "them)")
    return text
