"""Where parameters, gradients and optimizer state live: the whole difference between the strategies."""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass

from dplab.errors import UsageError


class Placement(enum.Enum):
    """Where a tensor lives along the shard axis of the mesh."""

    REPLICATED = "replicated"
    """every rank holds all of it"""
    SHARDED = "sharded"
    """every rank holds an equal slice of it"""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Placement of parameters, gradients and optimizer state: the whole difference between the strategies.

    Sharded parameters need sharded gradients, and sharded gradients a sharded optimizer (Rajbhandari et al.
    2020, arXiv:1910.02054, which calls the three steps stages 1 to 3).
    """

    params: Placement
    grads: Placement
    optim: Placement

    def __post_init__(self) -> None:
        order = [self.optim, self.grads, self.params]
        if any(later is Placement.SHARDED and earlier is Placement.REPLICATED
               for earlier, later in itertools.pairwise(order)):
            raise UsageError(
                f"Sharding(params={self.params.value}, grads={self.grads.value}, optim={self.optim.value}) is not "
                f"possible: sharded parameters need sharded gradients, and those a sharded optimizer; "
                f"use one of {', '.join(SHARDINGS)}"
            )

    @property
    def name(self) -> str:
        """`ddp`, `zero1`, `zero2` or `zero3`."""
        return next(name for name, sharding in SHARDINGS.items() if sharding == self)


_R, _S = Placement.REPLICATED, Placement.SHARDED
SHARDINGS: dict[str, Sharding] = {}
DDP = SHARDINGS["ddp"] = Sharding(params=_R, grads=_R, optim=_R)
ZERO1 = SHARDINGS["zero1"] = Sharding(params=_R, grads=_R, optim=_S)
ZERO2 = SHARDINGS["zero2"] = Sharding(params=_R, grads=_S, optim=_S)
ZERO3 = SHARDINGS["zero3"] = Sharding(params=_S, grads=_S, optim=_S)
