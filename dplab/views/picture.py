"""A still picture for a notebook's cell, with words for wherever pictures are not shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dplab.views.records import Chart
from dplab.views.svg import svg


@dataclass(frozen=True)
class Picture:
    """An SVG and what it says: the words stand alone in a text display and in a notebook that is not trusted yet."""

    svg: str
    words: str

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        return {"image/svg+xml": self.svg, "text/plain": self.words}

    def __str__(self) -> str:
        return self.words


def picture(charts: Sequence[Chart], *, title: str = "") -> Picture:
    """Charts in a grid below a title."""
    lines = [title] if title else []
    lines += [f"{chart.title}: {chart.words or chart.note}" for chart in charts]
    return Picture(svg(charts, title=title), "\n".join(lines))
