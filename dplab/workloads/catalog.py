"""The workloads by name, without torch: what the command line offers and `models.build` builds."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from dplab.errors import UsageError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and what it trains on. `model` is a class of `workloads.models`, `options` its arguments."""

    model: str
    data: Literal["text", "images"]
    about: str
    options: dict[str, Any] = field(default_factory=dict)


CATALOG = {
    "tiny-gpt": Workload(model="GPT", data="text", about="byte GPT of 0.9 M parameters, learns visibly in a minute"),
    "bench-gpt": Workload(model="GPT", data="text",
                          about="GPT of 7.4 M parameters, heavy to synchronise for its compute",
                          options={"layers": 4, "width": 256, "heads": 8, "sequence": 128, "vocabulary": 8192}),
    "paced": Workload(model="Paced", data="text", about="emulated compute: 8 layers of 1 M parameters that wait 5 ms "
                      "forward and 10 ms backward, for emulated links and more ranks than cores"),
    "mlp": Workload(model="MLP", data="images", about="three linear layers on digits"),
    "cnn": Workload(model="CNN", data="images", about="residual convolutions with group norm on digits"),
}
OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD"}
"""Classes of torch.optim by the name that a command line gives."""


def workload(name: str) -> Workload:
    """By name; UsageError with the nearest one otherwise."""
    return _lookup("model", name, CATALOG)


def optimizer_class(name: str) -> str:
    """Name of a class of torch.optim; UsageError with the nearest one otherwise."""
    return _lookup("optimizer", name, OPTIMIZERS)


def _lookup(what: str, name: str, known: dict[str, T]) -> T:
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        nearest = f" (did you mean {close[0]!r}?)" if close else ""
        raise UsageError(f"{what} {name!r} is not known{nearest}; use one of {', '.join(known)}")
    return known[name]
