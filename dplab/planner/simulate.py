"""A predicted step as events: the same type that a measured run records, so that both are read by the same eyes.

One rank stands for each pipeline stage (its data- and tensor-parallel siblings do the same at the same time). Two
lanes a rank: compute, and collectives in the order of their issue. Everything is predicted; nothing ran.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from dplab.planner import cost, laid, pipeline
from dplab.planner.cost import Pieces, gather_bytes, pieces, wire_bytes
from dplab.planner.hardware import Cluster
from dplab.planner.memory import stage_layers
from dplab.planner.profile import Profile
from dplab.planner.recipes import Recipe
from dplab.planner.split import Split
from dplab.telemetry.events import Event

_LARGEST_BUCKETS = 32
"""Buckets of a step at most: more add events, not accuracy."""
_AHEAD = 2
"""Units gathered ahead of the one that computes."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A predicted step: `events` of one rank a stage (times in ns from the step's start), its length in seconds."""

    events: tuple[Event, ...]
    step: float

    def busy(self, rank: int = 0) -> float:
        """Share of the step in which a rank computes."""
        spans = [event.t1 - event.t0 for event in self.events
                 if event.rank == rank and event.kind in ("forward", "backward", "optimizer")]
        return sum(spans) / 1e9 / self.step


def simulate(profile: Profile, split: Split, cluster: Cluster, recipe: Recipe) -> Timeline:
    """One optimizer step of one split, event by event."""
    made = pieces(profile, split, cluster, recipe)
    plan = laid.buckets(profile, split.zero, 4, recipe.bucket_mb) if recipe.ours else None
    contention = cluster.contention * made.groups.moving(float(made.numel * wire_bytes(split, recipe)))
    lanes = [_Lane(stage, made, split, recipe, _Place(contention, plan, max(1, profile.layers)))
             for stage in range(split.pp)]
    shares = stage_shares(profile, split, recipe)
    if split.pp == 1:
        _one_stage(lanes[0])
    else:
        forward, backward = _stage_times(made, shares, split)
        for op in pipeline.run(forward=forward, backward=backward, micro_batches=split.accumulate,
                               hop=float(made.hop), chunks=split.chunks):
            lanes[op.stage].compute(op.kind, f"micro-batch {op.micro_batch}", op.start, op.end)
        for lane, back in zip(lanes, backward, strict=True):
            lane.reduce_behind(lane.now - (back if recipe.overlap else 0.0), lane.now)
    adam = float(cost.optimizer(made, split, cluster, recipe))
    for lane in lanes:
        lane.finish(adam)
    end = max(lane.now for lane in lanes)
    events = [event for lane in lanes for event in lane.events]
    events += [Event("step", "train", lane.rank, 0, 0, _ns(end), {"micro_batches": split.accumulate, "moved": True})
               for lane in lanes]
    return Timeline(events=tuple(sorted(events, key=lambda event: (event.t1, event.rank))), step=end)


def stage_shares(profile: Profile, split: Split, recipe: Recipe) -> list[float]:
    """The share of all layers that each stage holds: first, middle and last as the recipe cuts them."""
    first, _, last = (float(count) for count in stage_layers(profile, split, recipe))
    depth = max(profile.layers, 1)
    if split.pp <= 2:
        return [first / depth, last / depth][:split.pp]
    middle = (depth - first - last) / (split.pp - 2)
    return [first / depth, *[middle / depth] * (split.pp - 2), last / depth]


def _stage_times(made: Pieces, shares: list[float], split: Split) -> tuple[list[float], list[float]]:
    """Seconds of each stage's forward and backward."""
    ahead = float(made.layers.forward + made.tensor.forward)
    back = float(made.layers.backward + made.layers.again + made.tensor.backward + made.tensor.again)
    forward = [share * ahead for share in shares]
    backward = [share * back for share in shares]
    forward[-1] += float(made.head.forward)
    backward[-1] += float(made.head.backward)
    return forward, backward


class _Sent(NamedTuple):
    """A collective that was issued: when it starts and is done, and its event's attributes."""

    start: float
    done: float
    attrs: dict[str, Any]


class _Unit(NamedTuple):
    """Share of the weights that one part of a ZeRO-3 pass gathers, its seconds, share of the gradients it reduces."""

    gathers: float
    seconds: float
    reduces: float


class _Place(NamedTuple):
    """What a lane knows of where it runs: `buckets` of dplab's own engine, None for equal ones."""

    contention: float
    buckets: list[laid.Bucket] | None
    layers: int


class _Lane:
    """One rank's two lanes while they fill."""

    def __init__(self, rank: int, made: Pieces, split: Split, recipe: Recipe, place: _Place) -> None:
        self.rank, self.made, self.split, self.recipe, self.place = rank, made, split, recipe, place
        self.events: list[Event] = []
        self.now = 0.0
        """when compute is free"""
        self.wire = 0.0
        """when the last collective issued will be done"""
        self.numel = float(made.numel)
        self.grad = self.numel * float(wire_bytes(split, recipe))
        self.weights = self.numel * gather_bytes(recipe)
        self.talks = split.dp > 1
        self.last = True
        """whether this is the last micro-batch, whose gradients go to the other copies of a shard too"""
        self.open: list[_Sent] = []
        """collectives that nobody has waited for"""

    def compute(self, kind: str, name: str, start: float, end: float) -> None:
        self.events.append(Event(kind, name, self.rank, 0, _ns(start), _ns(end), {}))
        self.now = end

    def collective(self, name: str, size: float, ready: float, *, purpose: str = "grads",
                   bucket: int | None = None) -> _Sent:
        """Issues one at `ready`; it starts when the wire is free."""
        groups, shard, copies = self.made.groups, self.split.shard, self.split.groups if self.last else 1
        took = float({"all_reduce": groups.data.all_reduce, "all_gather": groups.shard.all_gather, "reduce_scatter":
                      groups.reduce_scatter if self.last else groups.shard.reduce_scatter}[name](size))
        start = max(ready, self.wire)
        self.wire = start + took
        sent = 2 * (self.split.dp - 1) / self.split.dp * size if name == "all_reduce" else (shard - 1) / shard * size
        sent += 2 * (copies - 1) / copies * size / shard if name == "reduce_scatter" else 0.0
        attrs = {"purpose": purpose, "bucket": bucket, "bytes": round(sent), "exposed": 0, "filled": _ns(ready)}
        self.events.append(Event("collective", name, self.rank, 0, _ns(ready), _ns(self.wire), attrs))
        self.open.append(_Sent(start, self.wire, attrs))
        return self.open[-1]

    def wait(self, sent: _Sent) -> float:
        """Compute waits for one; returns for how long."""
        blocked = max(0.0, sent.done - self.now)
        sent.attrs["exposed"] = _ns(blocked)
        self.now += blocked
        return blocked

    def wait_all(self) -> None:
        """Compute waits for all that was issued; what of each runs after compute has stopped is exposed."""
        for sent in self.open:
            if sent.done > self.now:
                sent.attrs["exposed"] = _ns(sent.done - max(self.now, sent.start))
        self.now = max(self.now, self.wire if self.open else 0.0)
        self.open.clear()

    def reduce_behind(self, start: float, end: float) -> None:
        """Gradients of a backward that ran from `start` to `end`, bucket by bucket as they come."""
        if not self.talks:
            return
        name = "all_reduce" if self.split.zero == 0 else "reduce_scatter"
        hidden, slowed = 0.0, self.place.contention
        for bucket, (share, ready) in enumerate(self.shares()):
            # what a hidden collective takes from compute fills the next bucket, and ends the backward, later by as much
            filled = start + (end - start) * ready + slowed * hidden
            sent = self.collective(name, self.grad * share, filled, bucket=bucket)
            hidden += max(0.0, min(sent.done, end + slowed * hidden) - sent.start)
        self.now = end + slowed * hidden
        last = max((place for place, event in enumerate(self.events) if event.kind == "backward"), default=None)
        if last is not None:
            self.events[last] = self.events[last]._replace(t1=_ns(self.now))

    def shares(self) -> list[tuple[float, float]]:
        """Share of the gradients in each bucket, and share of the backward after which it is full."""
        if self.place.buckets is None:
            count = max(1, min(_LARGEST_BUCKETS, round(self.grad / (25 * 2**20))))
            return [(1 / count, (bucket + 1) / count) for bucket in range(count)]
        back = float(self.made.layers.backward + self.made.layers.again)
        head = float(self.made.head.backward) / (back + float(self.made.head.backward))
        total = sum(bucket.numel for bucket in self.place.buckets)
        return [(bucket.numel / total, laid.ready(bucket.unit, self.place.layers, head))
                for bucket in self.place.buckets]

    def units(self, kind: str, seconds: float) -> list[_Unit]:
        """A pass of ZeRO-3 unit by unit."""
        layers, buckets = self.place.layers, self.place.buckets
        if buckets is None:
            return [_Unit(1 / layers, seconds / layers, 1 / layers)] * layers
        total = sum(bucket.numel for bucket in buckets)
        blocks = [bucket.numel / total for bucket in buckets if 0 < bucket.unit <= layers]
        root = 1 - sum(blocks)
        ends = float(self.made.head.forward if kind == "forward" else self.made.head.backward)
        inner = [_Unit(share, (seconds - ends) / layers, share) for share in blocks]
        if kind == "forward":
            return [_Unit(root, 0.0, 0.0), *inner, _Unit(0.0, ends, 0.0)]
        return [_Unit(0.0, ends, 0.0), *inner, _Unit(0.0, 0.0, root)]

    def finish(self, adam: float) -> None:
        """Optimizer once gradients are there; gathered weights of ZeRO-1 and 2 after it."""
        self.wait_all()
        self.compute("optimizer", "AdamW", self.now, self.now + adam)
        if self.talks and self.split.zero in (1, 2):
            self.wait(self.collective("all_gather", self.weights, self.now, purpose="params"))


def _one_stage(lane: _Lane) -> None:
    """All micro-batches of a model that is not cut into stages."""
    made, split, recipe = lane.made, lane.split, lane.recipe
    ahead = float(made.layers.forward + made.tensor.forward + made.head.forward)
    back = float(made.layers.backward + made.layers.again + made.tensor.backward + made.tensor.again
                 + made.head.backward)
    for micro_batch in range(split.accumulate):
        name, lane.last = f"micro-batch {micro_batch}", micro_batch == split.accumulate - 1
        if split.zero == 3 and lane.talks:
            _units(lane, "forward", name, ahead)
            _units(lane, "backward", name, back)
            continue
        lane.compute("forward", name, lane.now, lane.now + ahead)
        start = lane.now
        lane.compute("backward", name, start, start + back)
        if split.zero == 2 or lane.last:
            lane.reduce_behind(start if recipe.overlap else lane.now, lane.now)
            if split.zero == 2:
                lane.wait_all()


def _units(lane: _Lane, kind: str, name: str, seconds: float) -> None:
    """A pass of ZeRO-3: each unit waits for its weights, and in backward leaves its gradients to be reduced."""
    units = lane.units(kind, seconds)
    ahead = _AHEAD if lane.recipe.overlap else 0
    asked: list[_Sent | None] = []
    first, hidden, blocked = lane.now, 0.0, 0.0
    for index, unit in enumerate(units):
        while len(asked) < min(len(units), index + ahead + 1):
            share = units[len(asked)].gathers
            sent = lane.collective("all_gather", lane.weights * share, lane.now, purpose="params",
                                   bucket=len(asked)) if share else None
            hidden += sent.done - sent.start if sent else 0.0
            asked.append(sent)
        weights = asked[index]
        blocked += lane.wait(weights) if weights else 0.0
        lane.now += unit.seconds
        if kind == "backward" and unit.reduces:
            sent = lane.collective("reduce_scatter", lane.grad * unit.reduces, lane.now, bucket=index)
            hidden += sent.done - sent.start
    hidden = max(0.0, hidden - blocked)
    lane.compute(kind, name, first, lane.now + lane.place.contention * hidden)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
