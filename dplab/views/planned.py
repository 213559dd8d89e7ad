"""Predictions as charts: what a rank would hold, where its step would go, and a predicted step over a measured one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from dplab.errors import UsageError
from dplab.planner.plans import Plan
from dplab.telemetry.events import CATEGORIES, Event
from dplab.telemetry.steps import Step, StepAssembler
from dplab.views.records import Bars, Chart, Lanes, Text
from dplab.views.studies import bar_chart
from dplab.views.sync import LEGEND, lanes
from dplab.views.words import short

PARTS = ("compute", "tensor", "bubble", "exposed", "step_optimizer")
_PART_OF = {"compute": "compute", "tensor": "tensor", "bubble": "bubble", "data": "exposed",
            "optimizer": "step_optimizer"}
_CATEGORY_OF = {"working": "activations", "logits": "activations", "slack": "other", "context": "other"}

_THIN = 0.005
"""Share of the highest bar below which a category is not seen: it is drawn with `other`."""


def memory_bars(plans: Mapping[str, Plan], *, limit: float | None = None) -> Chart:
    """Predicted memory of one rank by category, a bar a plan, in GB (1e9 bytes; MB where all is small). `limit`: bytes
    that a rank may use."""
    sizes = np.zeros((len(CATEGORIES), len(plans)))
    for column, plan in enumerate(plans.values()):
        for name, size in plan.memory.to_dict().items():
            if name != "total":
                sizes[CATEGORIES.index(_CATEGORY_OF.get(name, name)), column] += size
    thin = sizes.max(axis=1, initial=0.0) < _THIN * sizes.sum(axis=0).max(initial=0.0)
    other = CATEGORIES.index("other")
    thin[other] = False
    sizes[other] += sizes[thin].sum(axis=0)
    sizes[thin] = 0
    scale, unit = (1e9, "GB") if sizes.sum(axis=0).max(initial=0.0) >= 1e9 else (1e6, "MB")
    used = [row for row in range(len(CATEGORIES)) if sizes[row].any()]
    totals = dict(zip(plans, sizes.sum(axis=0), strict=True))
    over = [] if limit is None else [name for name, total in totals.items() if total > limit]
    caption = "one rank"
    if limit is not None:
        caption += f"; {limit / scale:,.4g} {unit} are allowed" + (f", too much: {', '.join(over)}" if over else "")
    return bar_chart("predicted-memory", "Memory, predicted", unit, caption, Bars(
        names=tuple(plans), roles=tuple(CATEGORIES[row] for row in used), values=sizes[used] / scale))


def anatomy(plans: Mapping[str, Plan]) -> Chart:
    """Where a predicted step goes, a bar a plan, in ms."""
    times = np.zeros((len(PARTS), len(plans)))
    for column, plan in enumerate(plans.values()):
        told = {name: float(value) for name, value in plan.cost.parts.items()}
        # the simulated step divides as the closed form does
        scale = 1e3 * plan.step / sum(told.values())
        for name, seconds in told.items():
            times[PARTS.index(_PART_OF[name]), column] += scale * seconds
    used = [row for row in range(len(PARTS)) if times[row].any()]
    return bar_chart("predicted-step", "Step, predicted", "ms", "one step of the slowest rank", Bars(
        names=tuple(plans), roles=tuple(PARTS[row] for row in used), values=times[used]))


def overlay(predicted: Iterable[Event], measured: Iterable[Event], *, rank: int = 0, quantile: float = 0.5) -> Chart:
    """A predicted step over a measured one, on one time scale from the start of each: lanes of work and of the wire.

    Of the measured steps that one of `rank` whose length is the `quantile` (the median; 0.25 is what a calibration
    takes, as others who compute on the machine only ever lengthen a step); the first, which sets things up, left out.
    Raises UsageError for a quantile that is not from 0 to 1.
    """
    if not 0 <= quantile <= 1:
        raise UsageError(f"overlay(quantile={quantile!r}) is not allowed; it is a number from 0 (the shortest) to 1")
    told, steps = _steps(predicted, 0), _steps(measured, rank)
    real = sorted(steps[1:] or steps, key=lambda step: step.t1 - step.t0)
    if not told or not real:
        missing = "measured" if told else "predicted"
        return Chart(key="overlay", title="Predicted over measured", x_label="ms", y_label="",
                     marks=(Text(text=f"no {missing} step is complete yet"),))
    rows = {"plan": told[0], "run": real[int(quantile * (len(real) - 1))]}
    mark = _stacked([lanes([_from_zero(step)]) for step in rows.values()], tuple(rows))
    which = "the median" if quantile == 0.5 else f"quantile {quantile:g}"
    lengths = {name: (step.t1 - step.t0) / 1e6 for name, step in rows.items()}
    value = f"{lengths['plan'] / lengths['run']:.2f} x the measured"
    return Chart(key="overlay", title="Predicted over measured", x_label="ms", y_label="", marks=(mark,), value=value,
                 legend=LEGEND, x_range=(0.0, float(mark.end.max(initial=0.0)) or 1.0),
                 caption=f"one step of one rank; plan: predicted; run: measured, step {rows['run'].index + 1}",
                 note=f"predicted {short(lengths['plan'])} ms, measured {short(lengths['run'])} ms "
                      f"(step {rows['run'].index + 1} of rank {rank}, {which} of {len(real)}): {value}")


def _steps(events: Iterable[Event], rank: int) -> list[Step]:
    """A rank's steps. A prediction's step ends with its last span, so it is put after everything that ends with it."""
    mine = [event for event in events if event.rank == rank]
    assembler = StepAssembler()
    done = (assembler.feed(event) for event in sorted(mine, key=lambda event: (event.t1, event.kind == "step")))
    return [step for step in done if step is not None]


def _from_zero(step: Step) -> Step:
    def moved(event: Event) -> Event:
        attrs = event.attrs
        if attrs.get("filled"):
            attrs = {**attrs, "filled": attrs["filled"] - step.t0}
        return event._replace(t0=event.t0 - step.t0, t1=event.t1 - step.t0, attrs=attrs)

    return Step(step.rank, step.index, 0, step.t1 - step.t0, [moved(span) for span in step.spans])


def _stacked(marks: list[Lanes], names: tuple[str, ...]) -> Lanes:
    """Lanes of several steps below each other; the work lanes take these names."""
    offsets = np.cumsum([0, *(len(mark.names) for mark in marks[:-1])])
    columns = {name: np.concatenate([getattr(mark, name) for mark in marks])
               for name in ("row", "start", "end", "kind")}
    return Lanes(names=tuple(name for given, mark in zip(names, marks, strict=True)
                             for name in (given, *mark.names[1:])),
                 rows=tuple(row for mark in marks for row in mark.rows), roles=marks[0].roles,
                 lane=np.concatenate([mark.lane + offset for mark, offset in zip(marks, offsets, strict=True)]),
                 texts=tuple(text for mark in marks for text in mark.texts), **columns)
