"""Numbers with units, as people write them: rates, sizes and times, in SI units afterwards."""

from __future__ import annotations

import re

from dplab.errors import UsageError

_SCALES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30,
           "Ti": 2.0**40}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


def rate(text: str, *, what: str) -> float:
    """Bytes a second from `50GB/s` or `400Gb/s` (a capital B is bytes, a small b bits)."""
    value, form = _quantity(text, r"([bB])(?:/s|ps)", what=what,
                            write="50GB/s (bytes) or 400Gb/s (bits), one direction")
    return value / (8 if form[3] == "b" else 1)


def size(text: str, *, what: str) -> float:
    """Bytes from `80GB` (1e9) or `79GiB` (2^30)."""
    return _quantity(text, "B", what=what, write="80GB (1e9 bytes) or 75GiB (2^30 bytes)")[0]


def seconds(text: str, *, what: str) -> float:
    """Seconds from `30us` or `0.5ms`; 0 is one too."""
    form = re.fullmatch(rf"([\d.]+)\s*({'|'.join(_SECONDS)})", text.strip())
    try:
        if form is not None:
            return float(form[1]) * _SECONDS[form[2]]
    except ValueError:
        pass
    raise UsageError(f"{what} {text!r} is no time; write 30us or 0.5ms")


def _quantity(text: str, unit: str, *, what: str, write: str) -> tuple[float, re.Match[str]]:
    """A number above 0 with its scale taken in, and the match. UsageError for any other text, saying what to write."""
    form = re.fullmatch(rf"([\d.]+)\s*([kMGT]i?|){unit}", text.strip())
    value = _value(form)
    if form is None or value is None:
        raise UsageError(f"{what} {text!r} is no number above 0 with its unit; write {write}")
    return value * _SCALES[form[2]], form


def _value(form: re.Match[str] | None) -> float | None:
    """The number of a match, None where there is none above 0."""
    try:
        value = float(form[1]) if form else 0.0
    except ValueError:
        return None
    return value if value > 0 else None
