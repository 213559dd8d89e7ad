"""What recording costs, an event at a time: `python tests/benchmarks/bench_telemetry.py` prints microseconds.

Each figure is the best of a few rounds, as a machine's other work only ever adds.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from dplab.specs import RunSpec
from dplab.telemetry import file_recorder
from dplab.telemetry.file_recorder import FileRecorder
from dplab.telemetry.process import usage
from dplab.telemetry.reader import RunReader
from dplab.telemetry.recorder import Recorder
from dplab.telemetry.rundir import RunDirectory

EVENTS = 20_000
ROUNDS = 7


def best(call: Callable[[], object], events: int) -> float:
    """Microseconds an event of the fastest round."""
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds) / events * 1e6


def spans(events: Recorder, count: int = EVENTS) -> None:
    """What a reduction of a bucket records."""
    for number in range(count):
        events.span("collective", "reduce_scatter", 123_456_789_000, 123_456_999_000, purpose="grads",
                    bucket=number & 7, bytes=1_048_576, exposed=12_345, filled=123_456_780_000)


def measure(folder: Path) -> dict[str, float]:
    """Figures by name."""
    directory = RunDirectory(folder / "run")
    directory.create({"spec": RunSpec(function="m:f", world_size=1).to_dict()}, 1)
    file_recorder.FLUSH_SECONDS = 3600.0  # the thread's share is measured on its own
    events = FileRecorder(directory.rank(0), 0)
    figures: dict[str, float] = {}
    figures["nothing recorded (outside a run)"] = best(lambda: spans(Recorder()), EVENTS)
    figures["span"] = best(lambda: spans(events), EVENTS)
    events.flush()
    figures["span, encoded and written"] = best(lambda: (spans(events), events.flush()), EVENTS)
    figures["gauge"] = best(lambda: [events.gauge("loss", value=1.5) for _ in range(EVENTS)], EVENTS)
    figures["state page"] = best(lambda: [events.phase("all_reduce grads", bucket=3) for _ in range(EVENTS)], EVENTS)
    figures["look for a wish to stop"] = best(lambda: [events.stop_requested() for _ in range(EVENTS)], EVENTS)
    figures["flush of one step of 20 events"] = best(lambda: [
        (spans(events, 20), events.flush()) for _ in range(200)], 200)
    events.close()
    count = len(RunReader(directory.path).poll())
    figures["read"] = best(lambda: RunReader(directory.path).poll(), count)
    figures["sample of one rank's process, by the supervisor"] = best(
        lambda: [usage(os.getpid()) for _ in range(20)], 20)
    return figures


def main() -> None:
    """Prints the table."""
    with tempfile.TemporaryDirectory() as folder:
        for name, microseconds in measure(Path(folder)).items():
            print(f"{name:<50} {microseconds:10.2f} us")


if __name__ == "__main__":
    main()
