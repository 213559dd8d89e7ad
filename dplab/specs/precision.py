"""In which dtypes a model computes, adds up, travels and is stepped."""

from __future__ import annotations

from dataclasses import dataclass, fields

from dplab.errors import UsageError

DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of one element of each dtype that a `Precision` can name."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Dtypes of the parameters, the accumulated gradients, the wire's sums and the optimizer's master copy.

    `None` keeps the model's own dtype (float64 stays float64); `reduce` is the dtype in which ranks are summed,
    fp32 whatever narrower dtype travels; `master=None` means that the optimizer steps the parameters
    themselves; `autocast` is the dtype of torch.autocast around the forward, or None.
    """

    param: str | None = None
    grad: str | None = None
    reduce: str | None = None
    master: str | None = None
    autocast: str | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and value not in DTYPE_BYTES:
                raise UsageError(f"Precision({field.name}={value!r}) is not a dtype; use one of "
                                 f"{', '.join(DTYPE_BYTES)}, or None")
        if self.reduce not in (None, "fp32"):
            raise UsageError(f"Precision(reduce={self.reduce!r}) is not allowed; gradients are summed over ranks in "
                             f"fp32 (float64 ones in float64): leave it out")

    @property
    def name(self) -> str | None:
        """The short name (`fp32`, `bf16`, ...) of this combination, or None when it has none."""
        return next((name for name, known in PRECISIONS.items() if known == self), None)


PRECISIONS = {
    "fp32": Precision(),
    "bf16": Precision(param="bf16", grad="bf16", reduce="fp32", master="fp32"),
    "fp16": Precision(param="fp16", grad="fp16", reduce="fp32", master="fp32"),
    "amp-bf16": Precision(autocast="bf16"),
    "amp-fp16": Precision(autocast="fp16"),
}
"""`fp32` casts nothing: compute, gradients and sums keep the model's own full-precision dtype."""
