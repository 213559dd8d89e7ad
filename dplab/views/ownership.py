"""The ownership map: who holds which slice of which tensor, before and after each verb of the engine.

Drawn from the layout that the run has recorded when its model was wrapped: a lane pair a rank (before, after), in each
a row for parameters, gradients and optimizer state, along the flat buffer of all parameters in launch order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dplab.layout import FlatLayout
from dplab.telemetry.events import Event
from dplab.views import theme
from dplab.views.records import Chart, Lanes, Text
from dplab.views.words import counted

VERBS = {
    "reduce": "the gradients of a backward become averages",
    "step": "the optimizer moves what a rank owns",
    "publish": "what was moved becomes everybody's",
    "unshard": "a unit is gathered around its forward and backward",
    "reshard": "its memory is given back",
}
ROWS = ("params", "grads", "optimizer")
ROLES = ("full", "owned", "partial", "stale")
SHOWN = 4
"""Ranks that are drawn; the others' slices follow by the same rule."""
_NAMED = 3


@dataclass(frozen=True)
class Bucket:
    """Names of the tensors in launch order, their places, and bytes an element."""

    layout: FlatLayout
    itemsize: int
    trainable: bool


class OwnershipPanel:
    """Takes the layout gauge of every rank; draws any verb."""

    def __init__(self) -> None:
        self._buckets: list[Bucket] = []
        self._sharding: dict[str, str] = {}
        self._shard: dict[int, tuple[int, int]] = {}
        """place and size along the shard axis, by rank"""
        self._charts: list[Chart] = []
        """as they were drawn last; empty where the layout is another since"""

    def feed(self, event: Event) -> None:
        """Takes layout gauges; those of a layout that is not understood (another version's) are left out."""
        if event.kind != "gauge" or event.name != "layout":
            return
        self._charts = []
        try:
            place, size = map(int, event.attrs["shard"])
            self._shard[event.rank] = (place, size)
            if "buckets" in event.attrs:
                self._buckets = [_bucket(told, size) for told in event.attrs["buckets"]]
                self._sharding = dict(event.attrs["sharding"])
        except (KeyError, TypeError, ValueError):
            return

    @property
    def verbs(self) -> tuple[str, ...]:
        """Those of this run's strategy."""
        sharded = [name for name in ROWS if self._sharding.get(_KEY[name]) == "sharded"]
        if "params" in sharded:
            return ("unshard", "reshard", "reduce", "step")
        return ("reduce", "step", "publish") if sharded else ("reduce", "step")

    def charts(self) -> list[Chart]:
        """One a verb; one that says what is missing before the layout is there."""
        if not self._buckets or not self._shard:
            return [Chart(key="ownership", title="Who holds what", x_label="", y_label="",
                          marks=(Text(text="the layout is not recorded (yet): dplab.parallelize does it"),))]
        if not self._charts:
            self._charts = [self.chart(verb) for verb in self.verbs]
        return self._charts

    def chart(self, verb: str) -> Chart:
        """Before and after one verb."""
        ranks = sorted(self._shard)[:SHOWN]
        total = sum(bucket.layout.numel for bucket in self._buckets)
        columns: list[tuple[float, ...]] = []
        texts: list[str] = []
        for lane, rank in enumerate(ranks):
            for after in (0, 1):
                start = 0
                for bucket in self._buckets:
                    for row, name in enumerate(ROWS):
                        for role, low, high in self._held(verb, after, name, bucket, rank):
                            columns.append((2 * lane + after, row, (start + low) / 1e6, (start + high) / 1e6,
                                            ROLES.index(role)))
                            texts.append(f"rank {rank} {'after' if after else 'before'}, {name}, "
                                         f"{theme.label(role)}: {_named(bucket.layout, low, high)}")
                    start += bucket.layout.numel
        held = np.array(columns, dtype=np.float64).reshape(-1, 5).T
        names = tuple(name for rank in ranks for name in (f"rank {rank}", "after"))
        more = "" if len(ranks) == len(self._shard) else f"; {len(ranks)} of {len(self._shard)} ranks"
        caption = f"{verb}: {VERBS[verb]}; rows: {', '.join(ROWS)}{more}"
        return Chart(
            key="ownership", choice=verb, title=f"Who holds what, before and after {verb}",
            x_label="M elements", y_label="", caption=caption, x_range=(0.0, total / 1e6),
            legend=tuple((role, theme.label(role)) for role in ROLES), note=self._note(verb),
            marks=(Lanes(names=names, rows=(len(ROWS),) * len(names), roles=ROLES, lane=held[0], row=held[1],
                         start=held[2], end=held[3], kind=held[4], texts=tuple(texts)),))

    def _held(self, verb: str, after: int, name: str, bucket: Bucket, rank: int) -> list[tuple[str, int, int]]:
        """(role, low, high) of what a rank holds of a bucket, in elements of the bucket."""
        if not bucket.trainable and name != "params":
            return []
        place, size = self._shard[rank]
        cut = self._sharding.get(_KEY[name]) == "sharded" and size > 1

        def pieces(role: str) -> list[tuple[str, int, int]]:
            return [(role, 0, bucket.layout.numel)]

        own = [("owned", *bucket.layout.shard(place))] if size > 1 else pieces("owned")
        if name == "optimizer":
            return own if cut else pieces("full")
        if name == "grads":
            # reduced into the own slice wherever the optimizer only needs that; the unreduced buffer may stay
            averaged = own if self._sharding.get("optim") == "sharded" and size > 1 else pieces("full")
            if verb in ("unshard", "reshard"):
                return []
            return pieces("partial") if verb == "reduce" and not after else (
                averaged if verb == "reduce" or (verb == "step" and not after) else [])
        if cut:
            gathered = (verb == "unshard" and after) or (verb == "reshard" and not after) or (
                verb == "reduce" and not after)
            return pieces("full") if gathered else own
        if self._sharding.get("optim") == "sharded" and size > 1 and (
                (verb == "step" and after) or (verb == "publish" and not after)):
            return [("stale", low, high) for low, high in _around(own[0][1:], bucket.layout.numel)] + own
        return pieces("full")

    def _note(self, verb: str) -> str:
        _, size = next(iter(self._shard.values()))
        kinds = ", ".join(f"{name} {self._sharding.get(_KEY[name], 'replicated')}" for name in ROWS)
        tensors = sum(len(bucket.layout.slots) for bucket in self._buckets)
        return (f"{counted(tensors, 'tensor')} in {counted(len(self._buckets), 'bucket')} over "
                f"{counted(size, 'shard')}; {kinds}; {verb}: {VERBS[verb]}")


_KEY = {"params": "params", "grads": "grads", "optimizer": "optim"}


def _bucket(told: dict[str, Any], shards: int) -> Bucket:
    layout = FlatLayout.of([(str(name), (int(numel),)) for name, numel in told["slots"]], shards)
    return Bucket(layout, int(told["itemsize"]), bool(told["trainable"]))


def _around(hole: Sequence[int], stop: int) -> list[tuple[int, int]]:
    return [(low, high) for low, high in ((0, hole[0]), (hole[1], stop)) if low < high]


def _named(layout: FlatLayout, low: int, high: int) -> str:
    """The tensors in [low, high), the first and the last by the part that lies inside."""
    inside = [slot for slot in layout.slots if slot.start < high and slot.stop > low]
    told = []
    for slot in inside:
        start, stop = max(low, slot.start) - slot.start, min(high, slot.stop) - slot.start
        told.append(slot.name if (start, stop) == (0, slot.numel) else f"{slot.name}[{start}:{stop}]")
    if len(told) > _NAMED:
        told = [*told[:2], f"... {len(told) - 3} more", told[-1]]
    return ", ".join(told) or "padding"
