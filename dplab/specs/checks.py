"""How a value that is not allowed is refused: by name, with what is allowed and what may have been meant."""

from __future__ import annotations

import difflib
from typing import Any

from dplab.errors import UsageError


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def check(name: str, value: Any, holds: bool, allowed: str, *, what: str = "Strategy") -> None:
    if not holds:
        raise UsageError(f"{what}({name}={value!r}) is not allowed; {name} is {allowed}")


def nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name.lower(), list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def lookup(what: str, name: str, known: dict[str, Any]) -> Any:
    if name not in known:
        raise UsageError(f"{what} {name!r} is not known{nearest(name, known)}; use one of {', '.join(known)}")
    return known[name]
