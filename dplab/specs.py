"""What a run is asked to do, as values: placements, precision, strategy, run.

Everything here is frozen, checked when it is made, and survives a round trip through a dict (JSON) and,
for a strategy, through its one-line form. No torch: a planner, a notebook and a command line share these.
"""

from __future__ import annotations

import difflib
import enum
import itertools
import re
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

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

AccumulateMode = Literal["window", "micro_batch"]
RECOMPUTE = ("none", "full")


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How a model is trained on several ranks. Every field has the default of a plain run.

    `accumulate`: backwards in a window; above 1 the gradient is their mean, at 1 further backwards add up as
    in plain torch. `accumulate_mode`: `window` reduces once a window (unreduced gradients stay whole on every
    rank), `micro_batch` after every backward (only the owned shard stays); None: what the sharding is for
    (`micro_batch` where gradients are sharded). `bucket_mb`: MiB of a reduction; None: min(25, max(1, gradient
    bytes / 16)). `prefetch`: gather ZeRO-3 units ahead. `reshard`: free a ZeRO-3 unit after its forward.
    `clip_grad_norm`: largest L2 norm of the averaged gradient. `recompute`, `topology`, `shares`: not
    implemented yet, refused by name when a run starts.
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
    shares: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        if isinstance(self.sharding, str):
            set_(self, "sharding", _lookup("strategy", self.sharding, SHARDINGS))
        if isinstance(self.precision, str):
            set_(self, "precision", _lookup("precision", self.precision, PRECISIONS))
        if isinstance(self.shares, list):
            set_(self, "shares", tuple(self.shares))
        _check("sharding", self.sharding, isinstance(self.sharding, Sharding), "a Sharding or its name")
        _check("precision", self.precision, isinstance(self.precision, Precision), "a Precision or its name")
        _check("accumulate", self.accumulate, _is_int(self.accumulate) and self.accumulate >= 1, "an integer >= 1")
        modes = get_args(AccumulateMode)
        _check("accumulate_mode", self.accumulate_mode, self.accumulate_mode in (None, *modes),
               f"one of {', '.join(modes)}, or None")
        _check("bucket_mb", self.bucket_mb, self.bucket_mb is None or _is_positive(self.bucket_mb),
               "a number of MiB above 0, or None")
        _check("recompute", self.recompute, self.recompute in RECOMPUTE, f"one of {', '.join(RECOMPUTE)}")
        for name in ("prefetch", "reshard"):
            _check(name, getattr(self, name), isinstance(getattr(self, name), bool), "True or False")
        _check("clip_grad_norm", self.clip_grad_norm,
               self.clip_grad_norm is None or _is_positive(self.clip_grad_norm), "a number above 0, or None")

    @property
    def reduces_every_backward(self) -> bool:
        """True where every backward ends reduced, False where only a closing one does."""
        mode = self.accumulate_mode or (
            "micro_batch" if self.sharding.grads is Placement.SHARDED else "window")
        return mode == "micro_batch"

    @property
    def not_implemented(self) -> list[str]:
        """Fields that ask for something this version cannot do; a run with any of them is refused."""
        asked = []
        if self.recompute != "none":
            asked.append(f"recompute={self.recompute}")
        asked += [f"{name}={getattr(self, name)!r}" for name in ("topology", "shares")
                  if getattr(self, name) is not None]
        return asked

    def require_implemented(self) -> None:
        """Raises UsageError naming every field that a run of this version cannot honour."""
        if self.not_implemented:
            raise UsageError(
                f"strategy {self}: {', '.join(self.not_implemented)} is not implemented yet; "
                f"leave it out (estimate and explain accept it)"
            )

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
                raise UsageError(f"strategy has no field {name!r}{_nearest(name, known)}; "
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
        values: dict[str, Any] = {"sharding": _lookup("strategy", head, SHARDINGS)}
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
        words = [*PRECISIONS, "recompute", *_TOKEN_PARSERS, f"accum{number[0] if number else ''}"]
        allowed = [*PRECISIONS, "accum<N>", "recompute", *(f"{name}=..." for name in _TOKEN_PARSERS)]
        raise UsageError(f"strategy {text!r}: {token!r} is not known{_nearest(token, words)}; after the name may stand "
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
        default = Strategy()
        for name in _TOKEN_PARSERS:
            value = getattr(self, name)
            if name != "precision" and value != getattr(default, name):
                tokens.append(f"{name}={_token_text(value)}")
        return "+".join(tokens)


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """What `launch` was asked for; the first thing written into a run directory.

    `strategy` is a one-line form or None where the program chooses; `function` says what every rank runs.
    """

    function: str
    world_size: int
    strategy: str | None = None
    backend: str | None = None
    detach: bool = True
    label: str | None = None

    def __post_init__(self) -> None:
        _check("world_size", self.world_size, _is_int(self.world_size) and self.world_size >= 1,
               "an integer >= 1", what="launch")
        for name in ("strategy", "backend", "label"):
            _check(name, getattr(self, name), isinstance(getattr(self, name), str | None), "a string", what="launch")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunSpec:
        """From `to_dict`'s values; names that a later version added are left out."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})


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
    "topology": str,
    "shares": lambda text: tuple(int(part) for part in text.split(":")),
    "precision": _parse_precision,
}


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def _check(name: str, value: Any, holds: bool, allowed: str, *, what: str = "Strategy") -> None:
    if not holds:
        raise UsageError(f"{what}({name}={value!r}) is not allowed; {name} is {allowed}")


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name.lower(), list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _lookup(what: str, name: str, known: dict[str, Any]) -> Any:
    if name not in known:
        raise UsageError(f"{what} {name!r} is not known{_nearest(name, known)}; use one of {', '.join(known)}")
    return known[name]
