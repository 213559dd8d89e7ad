"""The systems by name, without torch: which module starts one, and why it may not be possible here."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass, replace

from dplab.errors import UsageError
from dplab.specs import BACKENDS, SHARDINGS, Strategy

PEERS = {"torch:ddp": "torch_ddp", "torch:zero1": "torch_zero1", "torch:fsdp2": "torch_fsdp2"}
TURNS, ANSWERS = "turns", "answers"
"""Named pipes of a kept world in each rank's directory: steps to make (a number a line; 0 ends), and what a turn
gave (one JSON object a line)."""



@dataclass(frozen=True, kw_only=True)
class System:
    """`module` below dplab.peers, `strategy` what its `start` gets, `needs` a distribution to install; `backend` is
    what was asked for by name."""

    name: str
    module: str
    strategy: str = ""
    needs: str | None = None
    backend: str | None = None

    @property
    def rival(self) -> bool:
        """True for another's system, which has what its own users have: CPU ranks talk over gloo."""
        return self.module not in ("ours", "single")

    def missing(self) -> str | None:
        """Why it cannot run here, or None."""
        if self.needs is None or importlib.util.find_spec(self.needs) is not None:
            return None
        return f"{self.needs} is not installed; pip install 'dplab[peers]'"


def system(name: str) -> System:
    """By the name that `dplab compare` takes, a backend behind an @ where one is wanted (`torch:ddp@shm`); UsageError
    for one that is not known or not implemented."""
    plain, at, backend = name.rpartition("@")
    if not at or (backend not in BACKENDS and "+topology=" in plain):      # links are named behind an @ too
        plain, at, backend = name, "", ""
    if at and backend not in BACKENDS:
        raise UsageError(f"system {name!r}: backend {backend!r} is not known; use one of {', '.join(BACKENDS)}")
    return replace(_system(plain), name=name, backend=backend or None)


def _system(name: str) -> System:
    if name == "single":
        return System(name=name, module="single")
    if name in PEERS:
        return System(name=name, module=PEERS[name])
    if re.fullmatch(r"deepspeed:[123]", name):
        return System(name=name, module="deepspeed", strategy=name[-1], needs="deepspeed")
    if name.split("+")[0] not in SHARDINGS:
        raise UsageError(f"system {name!r} is not known; use single, {', '.join(SHARDINGS)} (or a longer strategy such "
                         f"as zero2+accum4), {', '.join(PEERS)}, or deepspeed:1, :2, :3")
    strategy = Strategy.parse(name)
    if strategy.shares is not None:
        raise UsageError(f"system {name!r} cannot be compared: the others' ranks have equal batches; leave shares out")
    if strategy.accumulate > 1:
        raise UsageError(f"system {name!r} cannot be compared: a step of it is {strategy.accumulate} micro-batches, "
                         f"of the others one; leave accum{strategy.accumulate} out")
    return System(name=name, module="ours", strategy=name)
