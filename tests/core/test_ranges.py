"""Every span is a range of another profiler while it lasts (NVTX on CUDA), begun and ended where the span is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import dplab
from dplab.core.boundary import Boundary
from dplab.telemetry import recorder
from dplab.telemetry.recorder import Ranges, Recorder
from dplab.workloads import models
from tests.worlds import in_threads


class Profiler:
    """What NVTX is to us: `start` gives a handle, `end` takes it. `log` keeps both in order."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str]] = []

    def start(self, name: str) -> tuple[str, int]:
        self.log.append(("start", name))
        return name, len(self.log)

    def end(self, handle: tuple[str, int]) -> None:
        self.log.append(("end", handle[0]))

    def names(self, what: str) -> list[str]:
        return sorted(name for kind, name in self.log if kind == what)


class Watched(Recorder):
    def __init__(self, profiler: Profiler) -> None:
        self.ranges = Ranges(profiler.start, profiler.end)
        self.spans: list[tuple[str, str]] = []

    def span(self, kind: str, name: str, t0: int, t1: int, **attrs: Any) -> None:
        super().span(kind, name, t0, t1, **attrs)
        self.spans.append((kind, name))


def test_every_span_of_training_is_a_range_of_its_name(tmp_path: Path) -> None:
    def body() -> tuple[list[tuple[str, str]], Profiler]:
        profiler = Profiler()
        watched = Watched(profiler)
        recorder.install(watched)
        try:
            torch.manual_seed(0)
            engine = dplab.parallelize(models.build("tiny-gpt", width=32, heads=2, layers=2, sequence=8),
                                       torch.optim.AdamW, "zero3")
            data = torch.utils.data.TensorDataset(torch.randint(0, 256, (8, 8)), torch.randint(0, 256, (8, 8)))
            for x, y in dplab.loader(data, batch_size=2, seed=0):
                engine.backward(engine(x, y))
                engine.step()
            engine.save(tmp_path / "saved")
        finally:
            recorder.install(Recorder())
        return watched.spans, profiler

    for spans, profiler in in_threads(2, body):
        kinds = {kind for kind, _ in spans}
        assert kinds >= {"forward", "backward", "optimizer", "collective", "unshard", "reshard", "data", "checkpoint"}
        assert profiler.names("start") == profiler.names("end")      # none stays open
        told = sorted(kind for kind, _ in spans if kind != "log")
        assert sorted(name.split()[0] for name in profiler.names("start")) == told
        starts = [name for what, name in profiler.log if what == "start"]
        steps = [at for at, (what, name) in enumerate(profiler.log) if name == "step train"]
        assert [profiler.log[at][0] for at in steps] == ["start", "end"] * 2
        assert [profiler.log[at + 1] for at in steps[::2]] == [("start", "data loader")] * 2
        assert "optimizer AdamW" in starts
        assert "unshard blocks.0" in starts
        assert any(name.startswith("collective reduce_scatter blocks.1") for name in starts)


def test_what_never_became_a_span_ends_with_its_step() -> None:
    profiler = Profiler()
    watched = Watched(profiler)
    watched.open("forward", "that raised")
    moment = watched.open("backward", "b")
    watched.span("backward", "b", moment, moment + 1)
    watched.span("step", "train", moment, moment + 2)
    assert profiler.log == [("start", "step train"), ("start", "forward that raised"), ("start", "backward b"),
                            ("end", "backward b"), ("end", "forward that raised"), ("end", "step train")]


def test_without_another_profiler_nothing_is_begun() -> None:
    plain = Recorder()
    moment = plain.open("forward", "f")
    plain.span("forward", "f", moment, moment + 1)
    assert plain.ranges is None


def test_on_cuda_the_profiler_is_nvtx_and_on_a_cpu_there_is_none() -> None:
    cpu, cuda = Recorder(), Recorder()
    Boundary(cpu, torch.device("cpu"))
    Boundary(cuda, torch.device("cuda", 0))
    assert cpu.ranges is None
    assert cuda.ranges is not None
    assert cuda.ranges._start is torch.cuda.nvtx.range_start
    assert cuda.ranges._end is torch.cuda.nvtx.range_end
