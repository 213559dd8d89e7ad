"""Charts of one's own figures: what was predicted and measured over what is turned, and bars of parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dplab.errors import UsageError
from dplab.views import theme
from dplab.views.records import Bars, Chart, Line
from dplab.views.words import short


def against(x: Sequence[float], predicted: Sequence[float], measured: Sequence[float], *, title: str, x_label: str,
            y_label: str, caption: str = "", labels: tuple[str, str] = ("predicted", "measured")) -> Chart:
    """`predicted` and `measured` (or what `labels` calls the two) over `x`, in the unit that `y_label` names.
    UsageError where they differ in length."""
    if not len(x) == len(predicted) == len(measured) or not len(x):
        raise UsageError(f"against() got {len(x)} values of x, {len(predicted)} predicted and {len(measured)} "
                         f"measured; give as many of each, at least one")
    columns = [np.asarray(values, dtype=np.float64) for values in (predicted, measured)]
    said = "; ".join(f"{short(float(at))}: {short(told)} {labels[0]}, {short(real)} {labels[1]}"
                     for at, told, real in zip(x, *columns, strict=True))
    top = 1.1 * max(float(values.max()) for values in columns)
    places = np.asarray(x, dtype=np.float64)
    lines = tuple(Line(role=role, x=places, y=values, label=label) for role, values, label in zip(
        ("predicted", "measured"), columns, labels, strict=True))
    return Chart(key="study", title=title, x_label=x_label, y_label=y_label, caption=caption, marks=lines,
                 note=f"{y_label} by {x_label}: {said}", y_range=(0.0, top))


def stacked(rows: Mapping[str, Mapping[str, float]], *, title: str, unit: str, caption: str = "") -> Chart:
    """A bar a row, of parts by role (`theme.ROLES`) in `unit`, in the order in which roles are first seen."""
    roles = tuple(dict.fromkeys(role for parts in rows.values() for role, value in parts.items() if value))
    unknown = next((role for role in roles if role not in theme.ROLES), None)
    if unknown is not None:
        raise UsageError(f"stacked() got a part {unknown!r}; a part is one of {', '.join(theme.ROLES)}")
    values = np.array([[parts.get(role, 0.0) for parts in rows.values()] for role in roles], dtype=np.float64)
    bars = Bars(names=tuple(rows), roles=roles, values=values.reshape(len(roles), len(rows)))
    return Chart(key="study", title=title, x_label="", y_label=unit, caption=caption, marks=(bars,),
                 note=f"{heights(bars)} {unit}")


def bar_chart(key: str, title: str, unit: str, caption: str, bars: Bars) -> Chart:
    """Bars, and their heights in words."""
    return Chart(key=key, title=title, x_label="", y_label=unit, marks=(bars,), caption=caption,
                 note=f"{heights(bars)} {unit} ({caption})")


def heights(bars: Bars) -> str:
    """Each bar's name and the sum of its parts."""
    sums = zip(bars.names, bars.values.sum(axis=0), strict=True)
    return ", ".join(f"{name} {short(height)}" for name, height in sums)
