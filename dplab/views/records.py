"""What a picture is before anybody draws it: a chart of marks, and marks of plain columns.

Every renderer (canvas, plotly, SVG, text) reads these. A mark names roles, never colours (`theme.ROLES`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Line:
    """y over x, both of shape (n,)."""

    role: str
    x: Floats
    y: Floats
    faint: bool = False
    label: str | None = None
    """None: the role's own"""


@dataclass(frozen=True, kw_only=True, eq=False)
class StackedArea:
    """Parts stacked over x: `ys` has shape (parts, n), x (n,)."""

    roles: tuple[str, ...]
    x: Floats
    ys: Floats


@dataclass(frozen=True, kw_only=True, eq=False)
class Lanes:
    """Bars on named lanes. Columns of shape (n,): lane and row (indices), start and end (ms), kind (into `roles`).

    A lane has `rows[lane]` rows, so that bars which overlap in time stay apart.
    """

    names: tuple[str, ...]
    rows: tuple[int, ...]
    roles: tuple[str, ...]
    lane: Floats
    row: Floats
    start: Floats
    end: Floats
    kind: Floats
    texts: tuple[str, ...] = ()
    """what a bar is, one a bar; for hovering"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Bars:
    """Stacked bars, one per name: `values` has shape (roles, names)."""

    names: tuple[str, ...]
    roles: tuple[str, ...]
    values: Floats


@dataclass(frozen=True, kw_only=True, eq=False)
class Text:
    """Words in the place of a picture, such as why there is none."""

    text: str


Mark = Line | StackedArea | Lanes | Bars | Text


@dataclass(frozen=True, kw_only=True, eq=False)
class Chart:
    """Marks on common axes. `note` is one sentence: the number that the picture stands for, and its definition."""

    key: str
    title: str
    x_label: str
    y_label: str
    marks: tuple[Mark, ...]
    note: str = ""
    y_max: float | None = None
    """top of the scale where the marks may pass it; None: they all fit"""
