"""The event: one finished span or one gauge of one rank.

A line of `rank-<r>/events.jsonl` is the JSON array `[kind, name, step, t0, t1, attrs]`; the rank is the
file's. Times are `time.monotonic_ns()` of the host; the file's first line is a header (a JSON object) that
anchors them to the wall clock.

Kinds and what their `attrs` hold (bytes and ns are integers):

| kind | name | attrs |
|---|---|---|
| step | train | `micro_batches`, `moved` (False when the weights stayed), `thin` where its spans did not stay (`thinning`) |
| forward, backward, optimizer | module's class, ... | - |
| collective | all_reduce, reduce_scatter, all_gather, broadcast, ... | `purpose` (grads, params, control, init), `bucket` (index or None), `bytes` (sent by this rank), `exposed` (ns for which the caller was blocked), `filled` (ns, monotonic: last gradient came; only purpose grads), `link` (`inside` or `across` hosts, where these are known), `of` (the collective that it is a part of) ; t0 = issued, t1 = done |
| unshard, reshard | the unit's name | `bytes` |
| recompute | the unit's name | `bytes` that its forward did not keep |
| data | loader | `samples`, `tokens` |
| checkpoint | save, load | `bytes` |
| gauge | memory | bytes by category (see CATEGORIES); on CUDA also the counts of ALLOCATOR_COUNTS, which a run of an older dplab lacks |
| gauge | utilization | `cpu` (percent of one core), `gpu`, `gpu_memory`, `power` ...; a name that cannot be measured here is absent |
| gauge | process | `private` and `resident` bytes of the process; like utilization sampled by the supervisor |
| gauge | loss | `value`: this rank's mean over the backwards of the window; a run's loss is the mean over ranks |
| gauge | compression_error | `bucket`, `value`: what a codec lost of what this rank sent, relative L2; of one reduction in 16 |
| gauge | any other | whatever the program recorded |
| restart | run | `number`, `world_size` (ranks from then on), `why`; `step` is the first that is trained again: what came before of it and of later ones is void |
| pause | any | -; the program waited and did not train: steps are counted without it |
| log | any | `text` |
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

CATEGORIES = ("params", "grads", "optimizer", "master", "gathered", "buckets", "activations", "other")
"""Memory by category, in the order in which they are stacked; on CUDA also reserved, allocated, fragmentation, and what
lies in the host's memory (`host`) under a strategy that offloads."""

ALLOCATOR_COUNTS = ("num_alloc_retries", "num_ooms")
"""What of a CUDA memory gauge counts and is no size, by torch.cuda.memory_stats' names, since the process began: how
often cudaMalloc failed, so that all cached blocks were freed and it was asked again, and how often that failed too."""

SCHEMA = 1
"""Version of the run directory's files; a reader refuses a newer one by name."""


class Event(NamedTuple):
    """One finished span (t0 < t1) or gauge (t0 == t1) of one rank; times in ns of the host's monotonic clock. `step` is
    an index: 0 is the first, which every text and picture for people calls step 1."""

    kind: str
    name: str
    rank: int
    step: int
    t0: int
    t1: int
    attrs: dict[str, Any]

    def to_line(self) -> str:
        """The event's line, without the newline."""
        return json.dumps([self.kind, self.name, self.step, self.t0, self.t1, self.attrs], separators=(",", ":"))

    @classmethod
    def from_line(cls, line: str | bytes, rank: int) -> Event:
        """The event of a whole line; ValueError if the line is not one."""
        record = json.loads(line)
        if not isinstance(record, list) or len(record) != 6 or not isinstance(record[5], dict):
            raise ValueError(f"not an event: {line!r}")
        kind, name, step, t0, t1, attrs = record
        return cls(kind, name, rank, step, t0, t1, attrs)
