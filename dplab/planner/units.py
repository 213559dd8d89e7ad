"""Units in which a table of bytes is told: one of 1000s and its neighbour of 1024s, both named."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Unit:
    """Names and bytes of the two; the texts are those of their headings."""

    name: str
    decimal: float
    decimal_text: str
    binary_name: str
    binary: float
    binary_text: str


UNITS = (Unit("GB", 1e9, "1e9", "GiB", 2**30, "2^30"), Unit("MB", 1e6, "1e6", "MiB", 2**20, "2^20"),
         Unit("kB", 1e3, "1e3", "KiB", 2**10, "2^10"))


def unit_of(total: float) -> Unit:
    """The largest unit of which a whole has ten or more, so that its small parts can be read too."""
    return next((unit for unit in UNITS if total >= 10 * unit.decimal), UNITS[-1])
