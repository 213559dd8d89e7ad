"""What of a forward is computed again in backward instead of kept: the rule and its one-word form."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from dplab.errors import UsageError

KINDS = ("attention", "matmul", "convolution")
"""Kinds of operators whose results `keep:...` keeps: fused attention, matrix products, convolutions."""

FORMS = "none, full, keep:KIND[:KIND...] of " + ", ".join(KINDS) + ", or a budget such as 200mb"


@dataclass(frozen=True)
class Recompute:
    """`text`: the one-word form. `keep`: kinds of operators whose results stay; `budget`: bytes of activations a rank
    may hold at its peak, None: every unit is computed again."""

    text: str = "none"
    on: bool = False
    keep: tuple[str, ...] = ()
    budget: int | None = None

    @classmethod
    def parse(cls, text: object) -> Recompute:
        """From `none`, `full`, `keep:attention:matmul`, or a budget of activations in MiB: `200mb`."""
        if text == "none":
            return cls()
        if text == "full":
            return cls(text="full", on=True)
        if isinstance(text, str) and text.startswith("keep:"):
            kinds = tuple(text.split(":")[1:])
            if set(kinds) <= set(KINDS) and len(set(kinds)) == len(kinds):
                return cls(text=text, on=True, keep=kinds)
        if isinstance(text, str) and re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,6})?mb", text):
            budget = math.floor(float(text[:-2]) * 2**20)
            if budget > 0:
                return cls(text=text, on=True, budget=budget)
        raise UsageError(f"Strategy(recompute={text!r}) is not allowed; recompute is one of {FORMS}")

    def everything(self, who: str) -> bool:
        """True for `full`, False for `none`; UsageError for what `who` has no figure of."""
        if self.text not in ("none", "full"):
            raise UsageError(f"{who} has no figure of recompute={self.text}; give none or full, or ask dplab.estimate "
                             f"with a model's name or config for its memory")
        return self.on
