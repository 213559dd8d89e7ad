"""Codecs by the names that a strategy gives them."""

from __future__ import annotations

from functools import partial

from dplab.specs import POWERSGD
from dplab.wire.codec import MakeCodec
from dplab.wire.powersgd import PowerSgd
from dplab.wire.quantised import Bf16, Fp16, Int8

_NAMED: dict[str, MakeCodec] = {"bf16": Bf16, "fp16": Fp16, "int8": Int8, "int8-ef": partial(Int8, feedback=True)}


def named(name: str) -> MakeCodec:
    """`bf16`, `fp16`, `int8`, `int8-ef` (with error feedback) or `powersgd4` (rank 4), as a strategy has checked."""
    rank = POWERSGD.fullmatch(name)
    return _NAMED[name] if rank is None else partial(PowerSgd, rank=int(rank[1]))
