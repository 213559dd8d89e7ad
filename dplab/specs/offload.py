"""What of a rank's share lives in the host's memory instead of the device's, and with which strategies that goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dplab.specs.checks import check
from dplab.specs.sharding import Placement

if TYPE_CHECKING:
    from dplab.specs.strategy import Strategy

OFFLOADS = ("none", "optimizer", "parameters", "all")
"""`optimizer`: sums of gradients, master weights and moments, which are stepped there (ZeRO-Offload, Ren et al. 2021,
arXiv:2101.06840); `parameters`: the shards that units are gathered from (ZeRO-Infinity, Rajbhandari et al. 2021,
arXiv:2104.07857); `all`: both."""


def check_offload(strategy: Strategy) -> None:
    """Raises UsageError for an `offload` that is not known, or that the rest of the strategy leaves nothing for."""
    name, sharding = strategy.offload, strategy.sharding
    check("offload", name, name in OFFLOADS, f"one of {', '.join(OFFLOADS)}")
    if name == "none":
        return
    check("offload", name, sharding.optim is Placement.SHARDED,
          "for what a rank alone owns, and ddp shards nothing; use zero1, zero2 or zero3, or leave it out")
    if name == "optimizer":
        return
    check("offload", name, sharding.params is Placement.SHARDED,
          f"for sharded parameters, and under {sharding.name} every rank computes with all of them; use "
          f"offload=optimizer, or zero3")
    check("offload", name, name == "all" or strategy.precision.master is not None,
          "for precisions with a master copy, which stays on the device to be stepped; use offload=all, or bf16 or "
          "fp16")


def moves(offload: str) -> tuple[bool, bool]:
    """Whether the optimizer's part is on the host, and whether the parameters' shards are."""
    return offload in ("optimizer", "all"), offload in ("parameters", "all")
