"""Plays a run of eight ranks at 50 steps a second into a run directory: `python -m tests.soak.writer DIR SECONDS`.

The events are those of the synthetic run of `tests.views`, squeezed to the rate and put on the clock; they go through
the recorder's own files (thinning, recent spans), so that what a reader meets is what a real run leaves.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from dplab.specs import RunSpec
from dplab.telemetry.event_file import EventFile, Record
from dplab.telemetry.files import write_json, write_reserved
from dplab.telemetry.process import Identity
from dplab.telemetry.rundir import RunDirectory
from dplab.telemetry.state import StatePage
from dplab.telemetry.thinning import RecentFiles, Thinning
from tests.views import synthetic

RANKS, RATE = 8, 50
_BATCH_SECONDS = 0.2


class Rank:
    """One rank's files."""

    def __init__(self, directory: RunDirectory, rank: int) -> None:
        self.rank, folder = rank, directory.rank(rank)
        self._file, self._thinning = EventFile(folder / "events.jsonl", rank), Thinning()
        self._recent, self._state = RecentFiles(folder, rank), StatePage(folder / "state")
        layout = {"shard": [rank, RANKS], "replicate": [0, 1], "limit": 8 * 10**9, "limit_of": "host, all ranks"}
        if rank == 0:
            layout |= {"sharding": {"params": "replicated", "grads": "sharded", "optim": "sharded"}, "buckets": [
                {"slots": [[f"blocks.{block}.{name}", 40_000] for name in ("attn", "mlp")], "itemsize": 4,
                 "trainable": True} for block in range(8)]}
        now = time.monotonic_ns()
        self._file.write([("gauge", "layout", 0, now, now, layout)])

    def write(self, steps: range, began: int) -> None:
        """Some steps that ended by now."""
        records: list[Record] = [record for step in steps for record in played(self.rank, step, began)]
        kept, recent = self._thinning.part(records)
        self._recent.write(recent)
        self._file.write(kept)
        self._state.write(steps.stop, "forward", -1)


def played(rank: int, step: int, began: int) -> list[Record]:
    """The synthetic step, so squeezed that one takes 1 / RATE seconds, in ns of this clock; printing now and then."""
    scale = 1e9 / RATE / (synthetic.PERIOD * synthetic.MS)

    def at(moment: int) -> int:
        return began + int((moment - synthetic.START) * scale)

    records: list[Record] = []
    for event in synthetic.step_events(rank, step):
        attrs = {name: int(value * scale) if name == "exposed" else at(value) if name == "filled" else value
                 for name, value in event.attrs.items()}
        if event.name == "utilization" and step % RATE:
            continue
        records.append((event.kind, event.name, step, at(event.t0), at(event.t1), attrs))
    if step % (10 * RATE) == 0:
        records.append(("log", "stdout", step, at(event.t1), at(event.t1), {"text": f"step {step}"}))
    return records


def main() -> None:
    path, seconds = Path(sys.argv[1]), float(sys.argv[2])
    directory = RunDirectory(path)
    directory.create({"spec": RunSpec(function="tests.soak.writer:main", world_size=RANKS, strategy="zero2",
                                      label="soak").to_dict(), "created": time.time_ns(), "versions": {}}, RANKS)
    ranks = [Rank(directory, rank) for rank in range(RANKS)]
    me = Identity.of(os.getpid())
    write_json(path / "pids.json", {"supervisor": me, "ranks": [me] * RANKS})
    began, done = time.monotonic_ns(), 0
    while (passed := (time.monotonic_ns() - began) / 1e9) < seconds:
        due = int(passed * RATE)
        for rank in ranks:
            rank.write(range(done, due), began)
        done = due
        time.sleep(_BATCH_SECONDS)
    write_reserved(path / "exit.json", {"state": "finished", "first": None, "collateral": [], "reason": None,
                                        "ranks": [], "notes": [], "ended": time.time_ns()})


if __name__ == "__main__":
    main()
