"""What the activations of a GPT depend on, where its shape is described by hand."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from dplab.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What the activations of a GPT depend on: `sequence` tokens, `micro_batch` sequences a rank."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    micro_batch: int = 1
    vocabulary: int = 0
    flash: bool = True

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "sequence", "micro_batch"):
            at_least(name, getattr(self, name), 1)

    def activations(self, *, element_bytes: int = 2, recompute: bool = False) -> tuple[int, str]:
        """Bytes that one micro-batch leaves for its backward, and the formula with its numbers.

        arXiv:2205.05198 Table 2 (GPT block with dropout): 34 bytes an element of s x b x h at 2-byte
        elements, plus 5as/h where the attention matrix is stored (`flash=False`); with full recomputation
        2 (a block's input). 4 bytes a logit are added when a vocabulary is given.
        """
        s, b, h = self.sequence, self.micro_batch, self.hidden
        each, text = Fraction(34), "34"
        many = f"{b} sequence{'s' * (b > 1)}"
        if recompute:
            each, text = Fraction(2), "2"
        elif not self.flash:
            each, text = 34 + Fraction(5 * self.heads * s, h), f"(34 + 5 x {self.heads} x {s} / {h})"
        size = self.layers * s * b * h * each * element_bytes / 2
        formula = f"{self.layers} layers x {s} tokens x {many} x {h} features x {text} bytes"
        if element_bytes != 2:
            formula += f" x {element_bytes}/2"
        if self.vocabulary:
            size += 4 * s * b * self.vocabulary
            formula += f" + {s} tokens x {many} x {self.vocabulary} logits x 4 bytes"
        return round(size), formula


def at_least(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < float("inf"):
        shown = repr(value) if isinstance(value, int | float | str) else f"a {type(value).__name__}"
        raise UsageError(f"estimate({name}={shown}) is not allowed; {name} is a number >= {least}")
