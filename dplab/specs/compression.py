"""In which form gradients travel, by name, and with which strategies that goes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dplab.errors import UsageError
from dplab.specs.checks import nearest

if TYPE_CHECKING:
    from dplab.specs.strategy import Strategy

POWERSGD = re.compile(r"powersgd([1-9][0-9]{0,3})")
NAMES = ("bf16", "fp16", "int8", "int8-ef", "powersgd<rank>")


def check_compression(strategy: Strategy) -> None:
    """Raises UsageError for a `wire` that is not known, or that cannot do with the rest of the strategy."""
    name = strategy.wire
    if name is None:
        return
    if not isinstance(name, str) or not (name in NAMES[:-1] or POWERSGD.fullmatch(name)):
        close = nearest(name, [*NAMES[:-1], "powersgd4"]) if isinstance(name, str) else ""
        raise UsageError(f"Strategy(wire={name!r}) is not known{close}; gradients travel as {', '.join(NAMES)}, or as "
                         f"they are (None)")
    remembers = name == "int8-ef" or POWERSGD.fullmatch(name)
    if remembers and strategy.sharding.name in ("zero2", "zero3"):
        raise UsageError(f"wire={name} keeps what it left out of a whole model's gradients on every rank, which "
                         f"{strategy.sharding.name} is there to avoid; use wire=int8, wire=bf16, ddp or zero1")
    if remembers and "fp16" in (strategy.precision.param, strategy.precision.autocast):
        raise UsageError(f"wire={name} adds what it left out to the next gradients, and fp16's loss scale changes "
                         f"between them; use precision bf16 or amp-bf16, or wire=int8")
    if POWERSGD.fullmatch(name) and strategy.hybrid:
        raise UsageError(f"wire={name} needs whole matrices, and hybrid cuts them before they cross hosts; use "
                         f"wire=int8 or wire=bf16, or leave hybrid out")
