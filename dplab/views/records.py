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


@dataclass(frozen=True, kw_only=True, eq=False)
class Log:
    """Lines of words, (whose, kind, text) each: a rank, the stream it said it on, and what it said, oldest first.

    `prose`: sentences, set as such, that go on in the next line and take the whole width; whose and kind are then what
    part of a finding a sentence is.
    """

    lines: tuple[tuple[int | str, str, str], ...]
    prose: bool = False


Mark = Line | StackedArea | Lanes | Bars | Log | Text


@dataclass(frozen=True, kw_only=True, eq=False)
class Chart:
    """Marks on common axes, and every word and scale around them, so that all renderers say and show the same."""

    key: str
    title: str
    x_label: str
    y_label: str
    marks: tuple[Mark, ...]
    value: str = ""
    """the number that the picture stands for, beside its title"""
    note: str = ""
    """the picture in one sentence, where there is none: text displays, screen readers, diffs"""
    caption: str = ""
    """small print below the picture: a definition"""
    legend: tuple[tuple[str, str], ...] = ()
    """(role, text); empty: the roles of the marks with their own labels"""
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None
    """ends of the scales; None: what the marks need"""
    rank: int | None = None
    """the rank that is shown; None: all of them"""
    choice: str | None = None
    """which of several pictures in the same place this is; None where there is one"""
    alert: bool = False
    """True where `value` says that something is not as it should be: it stands in red"""

    @property
    def name(self) -> str:
        """Its key, with the rank or the choice that it is of."""
        of = self.choice if self.rank is None else self.rank
        return self.key if of is None else f"{self.key}/{of}"

    @property
    def words(self) -> str | None:
        """What stands in the place of a picture; None where there is one."""
        return next((mark.text for mark in self.marks if isinstance(mark, Text)), None)


@dataclass(frozen=True, kw_only=True)
class Head:
    """The line above a board: the run's state, facts as (name, value), and what is wrong, if anything is."""

    state: str
    facts: tuple[tuple[str, str], ...]
    problem: str | None = None
