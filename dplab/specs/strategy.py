"""How a model is trained on several ranks, and the one-line form of that."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from dplab.errors import UsageError
from dplab.specs.checks import check, is_int, is_positive, lookup, nearest
from dplab.specs.compression import check_compression
from dplab.specs.offload import check_offload
from dplab.specs.precision import PRECISIONS, Precision
from dplab.specs.recompute import Recompute
from dplab.specs.sharding import DDP, SHARDINGS, Placement, Sharding

AccumulateMode = Literal["window", "micro_batch"]


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How a model is trained on several ranks. Every field has the default of a plain run.

    `accumulate`: backwards in a window; above 1 the gradient is their mean, at 1 further backwards add up as
    in plain torch. `accumulate_mode`: `window` reduces once a window (unreduced gradients stay whole on every
    rank), `micro_batch` after every backward (only the owned shard stays); None: what the sharding is for
    (`micro_batch` where gradients are sharded). `bucket_mb`: MiB of a reduction; None: min(25, max(1, gradient
    bytes / 16)). `prefetch`: gather ZeRO-3 units ahead. `reshard`: free a ZeRO-3 unit after its forward.
    `clip_grad_norm`: largest L2 norm of the averaged gradient. `recompute`: what a unit's forward leaves to be computed
    again in backward: `none`, `full` (all but its input), `keep:attention:matmul` (all but its input and the results of
    such operators: attention, matmul, convolution), or a budget (`200mb`: as few units as keep the activations' peak
    within 200 MiB, chosen from the first step). `topology`: hosts and links
    to emulate (`2x2@10gbe`; see dplab.topology). `hybrid`: shard inside a host and replicate across hosts; where
    nothing is sharded, sum inside hosts first. `wire`: in which form gradients travel between ranks (between hosts, if
    hybrid): `bf16`, `fp16`, `int8`, `int8-ef` (with error feedback), `powersgd4` (rank 4); None: as they are.
    `shares`: samples of each rank's micro-batch, in rank order, where ranks have unequal ones (`3:3:2`, for unequal
    devices): the mean loss that a rank gives to `engine.backward` weighs as many, so that every sample counts alike.
    `offload`: what a rank owns that lives in the host's memory, where a GPU computes: `optimizer` (sums of gradients,
    master weights and moments; the step runs there), `parameters` (the shards of ZeRO-3) or `all`.
    """

    sharding: Sharding = DDP
    precision: Precision = PRECISIONS["fp32"]
    accumulate: int = 1
    accumulate_mode: AccumulateMode | None = None
    bucket_mb: float | None = None
    recompute: str = "none"
    prefetch: bool = True
    reshard: bool = True
    clip_grad_norm: float | None = None
    topology: str | None = None
    hybrid: bool = False
    wire: str | None = None
    shares: tuple[int, ...] | None = None
    offload: str = "none"

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        if isinstance(self.sharding, str):
            set_(self, "sharding", lookup("strategy", self.sharding, SHARDINGS))
        if isinstance(self.precision, str):
            set_(self, "precision", lookup("precision", self.precision, PRECISIONS))
        if isinstance(self.shares, list):
            set_(self, "shares", tuple(self.shares))
        check("sharding", self.sharding, isinstance(self.sharding, Sharding), "a Sharding or its name")
        check("precision", self.precision, isinstance(self.precision, Precision), "a Precision or its name")
        check("accumulate", self.accumulate, is_int(self.accumulate) and self.accumulate >= 1, "an integer >= 1")
        modes = get_args(AccumulateMode)
        check("accumulate_mode", self.accumulate_mode, self.accumulate_mode in (None, *modes),
               f"one of {', '.join(modes)}, or None")
        check("bucket_mb", self.bucket_mb, self.bucket_mb is None or is_positive(self.bucket_mb),
               "a number of MiB above 0, or None")
        Recompute.parse(self.recompute)
        for name in ("prefetch", "reshard", "hybrid"):
            check(name, getattr(self, name), isinstance(getattr(self, name), bool), "True or False")
        check("clip_grad_norm", self.clip_grad_norm,
               self.clip_grad_norm is None or is_positive(self.clip_grad_norm), "a number above 0, or None")
        check("shares", self.shares, self.shares is None or (
            isinstance(self.shares, tuple) and len(self.shares) > 0 and all(is_int(n) and n >= 1 for n in self.shares)),
            "a number of samples >= 1 for each rank, such as 3:3:2, or None")
        check("topology", self.topology, self.topology is None or (
            isinstance(self.topology, str) and re.fullmatch(r"[^+\s]+", self.topology) is not None),
            "one line such as 2x2@10gbe, or None")
        check_compression(self)
        check_offload(self)

    @property
    def reduces_every_backward(self) -> bool:
        """True where every backward ends reduced, False where only a closing one does."""
        mode = self.accumulate_mode or (
            "micro_batch" if self.sharding.grads is Placement.SHARDED else "window")
        return mode == "micro_batch"

    def require_ranks(self, size: int) -> None:
        """Raises UsageError where `shares` are not for `size` ranks."""
        if self.shares is not None and len(self.shares) != size:
            raise UsageError(f"strategy {str(self)!r} has shares for {len(self.shares)} ranks, and the world has "
                             f"{size}; give one for each, or leave shares out")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` is its inverse."""
        values = asdict(self)
        values["sharding"] = self.sharding.name
        values["precision"] = self.precision.name or asdict(self.precision)
        values["shares"] = None if self.shares is None else list(self.shares)
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Strategy:
        """A strategy from `to_dict`'s values or from a part of them."""
        known = {field.name for field in fields(cls)}
        for name in values:
            if name not in known:
                raise UsageError(f"strategy has no field {name!r}{nearest(name, known)}; "
                                 f"it has {', '.join(sorted(known))}")
        values = dict(values)
        if isinstance(values.get("precision"), dict):
            values["precision"] = Precision(**values["precision"])
        return cls(**values)

    @classmethod
    def parse(cls, text: Strategy | str) -> Strategy:
        """A strategy from its one-line form, e.g. `zero3+bf16+accum4+recompute` or `zero2+bucket_mb=4`."""
        if isinstance(text, Strategy):
            return text
        if not isinstance(text, str):
            shown = f"{text!r} " if isinstance(text, int | float | None) else ""      # not a whole model's text
            raise UsageError(f"strategy {shown}is of type {type(text).__name__}; give a name such as 'zero2', "
                             f"or a dplab.Strategy")
        head, *tokens = text.split("+")
        values: dict[str, Any] = {"sharding": lookup("strategy", head, SHARDINGS)}
        given: dict[str, str] = {}
        for token in tokens:
            for name, value in cls._parse_token(token, text).items():
                if name in given:
                    raise UsageError(f"strategy {text!r} gives {name} twice, by {given[name]!r} and by {token!r}; "
                                     f"leave one out")
                values[name], given[name] = value, token
        return cls.from_dict(values)

    @staticmethod
    def _parse_token(token: str, text: str) -> dict[str, Any]:
        name, equals, value = token.partition("=")
        if token in PRECISIONS:
            return {"precision": PRECISIONS[token]}
        if token == "recompute":
            return {"recompute": "full"}
        if token == "hybrid":
            return {"hybrid": True}
        if re.fullmatch(r"accum[0-9]{1,9}", token):
            return {"accumulate": int(token[5:])}
        if equals and name in _TOKEN_PARSERS:
            try:
                return {name: _TOKEN_PARSERS[name](value)}
            except ValueError:
                raise UsageError(f"strategy {text!r}: {value!r} is not a value for {name}") from None
        if not token:
            raise UsageError(f"strategy {text!r} has nothing behind a '+'; leave that out, or name what is to be added")
        number = re.search(r"(?<![0-9])[0-9]{1,9}$", token)
        words = [*PRECISIONS, "recompute", "hybrid", f"accum{number[0] if number else ''}",
                 *(f"{known}={value if equals else '...'}" for known in _TOKEN_PARSERS)]
        allowed = [*PRECISIONS, "accum<N>", "recompute", "hybrid", *(f"{name}=..." for name in _TOKEN_PARSERS)]
        raise UsageError(f"strategy {text!r}: {token!r} is not known{nearest(token, words)}; after the name may stand "
                         f"{', '.join(allowed)}, joined by '+'")

    def __str__(self) -> str:
        """The one-line form; `parse` is its inverse."""
        tokens = [self.sharding.name]
        if self.precision.name is None:
            tokens.append("precision=" + ":".join(value or "-" for value in asdict(self.precision).values()))
        elif self.precision.name != "fp32":
            tokens.append(self.precision.name)
        if self.accumulate > 1:
            tokens.append(f"accum{self.accumulate}")
        if self.recompute == "full":
            tokens.append("recompute")
        if self.hybrid:
            tokens.append("hybrid")
        default = Strategy()
        for name in _TOKEN_PARSERS:
            value = getattr(self, name)
            if name != "precision" and (name, value) != ("recompute", "full") and value != getattr(default, name):
                tokens.append(f"{name}={_token_text(value)}")
        return "+".join(tokens)


def _parse_bool(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(text)
    return text == "true"


def _parse_precision(text: str) -> Precision:
    values = [None if part == "-" else part for part in text.split(":")]
    if len(values) != len(fields(Precision)):
        raise ValueError(text)
    return Precision(**dict(zip([field.name for field in fields(Precision)], values, strict=True)))


def _token_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ":".join(map(str, value))
    return str(value)


_TOKEN_PARSERS: dict[str, Any] = {
    "accumulate_mode": str,
    "bucket_mb": float,
    "prefetch": _parse_bool,
    "reshard": _parse_bool,
    "clip_grad_norm": float,
    "recompute": str,
    "topology": str,
    "wire": str,
    "offload": str,
    "shares": lambda text: tuple(int(part) for part in text.split(":")),
    "precision": _parse_precision,
}
