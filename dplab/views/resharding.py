"""Who reads which bytes of whose: a checkpoint of some ranks, loaded by others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dplab.errors import UsageError
from dplab.layout import FlatLayout
from dplab.views.records import Chart, Lanes

ROLES = ("full", "owned", "partial", "stale", "gathered", "activations")
"""Of writers in turn."""


def resharding(shapes: Sequence[tuple[str, tuple[int, ...]]], writers: int, readers: int, *,
               itemsize: int = 4) -> Chart:
    """A lane a rank: above what each of `writers` ranks has written, below what each of `readers` reads, in the colour
    of the rank that wrote it, along all parameters in order. `shapes`: names and shapes of the tensors, `itemsize`:
    bytes of an element. Raises UsageError for fewer than one rank, and for nothing to cut."""
    for name, count in (("writers", writers), ("readers", readers)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise UsageError(f"resharding({name}={count!r}) is not allowed; {name} is a number of ranks >= 1")
    if not shapes:
        raise UsageError("resharding() got no tensors; give names and shapes, such as "
                         "[(name, tuple(p.shape)) for name, p in model.named_parameters()]")
    whole = FlatLayout.of(list(shapes), 1).slots[-1].stop
    bars: list[tuple[float, ...]] = []
    texts: list[str] = []
    cuts = [_shards(shapes, ranks, whole) for ranks in (writers, readers)]
    scale = itemsize / 1e6
    crossing = 0.0
    for writer, (start, stop) in enumerate(cuts[0]):
        bars.append((writer, start * scale, stop * scale, writer % len(ROLES)))
        texts.append(f"rank {writer} wrote {(stop - start) * scale:.2f} MB")
    for reader, (low, high) in enumerate(cuts[1]):
        for writer, (start, stop) in enumerate(cuts[0]):
            left, right = max(low, start), min(high, stop)
            if left < right:
                bars.append((writers + reader, left * scale, right * scale, writer % len(ROLES)))
                texts.append(f"rank {reader} reads {(right - left) * scale:.2f} MB that rank {writer} wrote")
                crossing += (right - left) * scale * (reader != writer)
    lane, left_ends, right_ends, kind = np.array(bars, dtype=np.float64).T
    names = [f"wrote {rank}" for rank in range(writers)] + [f"reads {rank}" for rank in range(readers)]
    mark = Lanes(names=tuple(names), rows=(1,) * len(names), roles=ROLES, lane=lane, row=np.zeros_like(lane),
                 start=left_ends, end=right_ends, kind=kind, texts=tuple(texts))
    total = whole * scale
    note = (f"{writers} ranks wrote {total:.2f} MB, {readers} read them in {len(bars) - writers} pieces; "
            f"{crossing / total:.0%} of the bytes change hands")
    legend = tuple((ROLES[rank % len(ROLES)], f"of rank {rank}") for rank in range(min(writers, len(ROLES))))
    return Chart(key="resharding", title=f"From {writers} ranks to {readers}", x_label="MB", y_label="", marks=(mark,),
                 note=note, value=f"{crossing / total:.0%} change hands", legend=legend, x_range=(0.0, total))


def _shards(shapes: Sequence[tuple[str, tuple[int, ...]]], ranks: int, whole: int) -> list[tuple[int, int]]:
    """Bounds of every rank's slice in elements, without the padding at the end."""
    layout = FlatLayout.of(list(shapes), ranks)
    return [(min(low, whole), min(high, whole)) for low, high in map(layout.shard, range(ranks))]
