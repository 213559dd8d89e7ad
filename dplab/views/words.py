"""Numbers as a board says them: three digits, no more than an eye takes in."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable

COUNTED = ("step", "ranks")
"""Labels of axes on which there is nothing between two whole numbers."""
_UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9}


def short(value: float | None, digits: int = 3) -> str:
    """`2.94`, `97.5`, `1,234`; a dash for what is not known."""
    if value is None or not math.isfinite(value):
        return "–"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{float(f'{value:.{digits}g}'):g}"


def counted(count: int, what: str) -> str:
    """`1 shard`, `2 shards`."""
    return f"{count} {what}{'s' * (count != 1)}"


def percent(share: float | None) -> str:
    """`62 %` for 0.62; a dash for what is not known."""
    return "–" if share is None else f"{100 * share:.0f} %"


def size(nbytes: float) -> str:
    """`46.5 MB`, `16.4 GB`: bytes in powers of ten."""
    unit = next((name for name in ("GB", "MB") if nbytes >= _UNITS[name]), "kB")
    return f"{short(nbytes / _UNITS[unit])} {unit}"


def rows(lines: Iterable[tuple[int | str, str, str]], letters: int) -> list[tuple[str, str, str]]:
    """Lines of (whose, kind, text) cut into rows of so many letters; a row that goes on says no more whose it is."""
    found = []
    for whose, kind, text in lines:
        pieces = [piece for line in text.splitlines() for piece in textwrap.wrap(line.strip(), letters)]
        found += [("" if place else str(whose), kind, piece) for place, piece in enumerate(pieces)]
    return found
