"""The ledger's gauge: what a run records of a rank's memory, with CUDA's allocator played where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dplab
from dplab.telemetry import recorder
from dplab.telemetry.events import ALLOCATOR_COUNTS, CATEGORIES
from dplab.telemetry.recorder import Recorder
from tests import worlds


class Gauges(Recorder):
    """Keeps the gauges of memory."""

    def __init__(self) -> None:
        self.memory: list[dict[str, Any]] = []

    def gauge(self, name: str, **values: Any) -> None:
        if name == "memory":
            self.memory.append(values)


@pytest.fixture
def gauges() -> Any:
    told = Gauges()
    recorder.install(told, process=True)
    yield told
    recorder.install(recorder.NULL, process=True)


def engine_after_a_step() -> Any:
    engine = dplab.parallelize(nn.Linear(64, 64), worlds.adamw, "ddp")
    engine.backward(engine(torch.ones(2, 64)).sum())
    engine.step()
    return engine


class Cuda:
    """A device whose allocator is asked."""

    type = "cuda"


def test_on_cuda_the_gauge_tells_the_allocators_counts_and_asks_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, asked = engine_after_a_step(), []
    device = Cuda()

    def allocator(of: Any) -> dict[str, Any]:
        asked.append(of)
        return {"num_alloc_retries": 3, "num_ooms": 1,
                "allocated_bytes": {"all": {"current": 1 << 30, "peak": 2 << 30}},
                "reserved_bytes": {"all": {"current": 3 << 30, "peak": 3 << 30}}}

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", allocator)
    monkeypatch.setattr(engine._ledger.buckets[0], "device", device)
    told = engine._ledger.gauge()
    assert asked == [device]
    assert {name: told[name] for name in ALLOCATOR_COUNTS} == {"num_alloc_retries": 3, "num_ooms": 1}
    assert (told["allocated"], told["reserved"], told["fragmentation"]) == (1 << 30, 3 << 30, 2 << 30)
    assert sum(told[name] for name in CATEGORIES) == (1 << 30) + told["activations"]
    # what engine.memory() gives are bytes, all of them
    assert engine.memory() == {name: value for name, value in told.items() if name not in ALLOCATOR_COUNTS}


def test_elsewhere_no_allocator_is_asked(gauges: Gauges, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", None)
    engine = engine_after_a_step()
    (told,) = gauges.memory
    assert not {*ALLOCATOR_COUNTS, "allocated", "reserved"} & {*told, *engine.memory()}
    assert told["params"] == engine.memory()["params"] >= 64 * 65 * 4
