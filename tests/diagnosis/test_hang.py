"""A run that does not move: the rank that is missed and its line, on real processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dplab
from dplab.diagnosis import hang


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("DPLAB_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(hang, "STILL_SECONDS", 0.5)
    yield
    for run in dplab.runs():
        run.stop(timeout=0)


def train(where: str) -> None:
    import threading

    import torch

    engine = dplab.parallelize(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), torch.optim.AdamW)

    def waits_for_ever() -> None:
        threading.Event().wait()

    for step in range(10):
        if step == 2 and where == "loop" and dplab.init().rank == 1:
            waits_for_ever()
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()


def until_it_hangs(run: Any) -> Any:
    limit = time.monotonic() + 60
    while time.monotonic() < limit:
        found = run.diagnose().findings
        if found and found[0].kind == "hang" and "in step 3" in found[0].evidence and "is at" in found[0].evidence:
            return found[0]
        assert run.state in ("starting", "running"), run.failure
        time.sleep(0.1)
    raise AssertionError(f"no hang was found: {run.diagnose()}")


def test_the_rank_that_is_missed_is_named_with_its_line() -> None:
    run = dplab.launch(train, world_size=3, args=("loop",), detach=False)
    found = until_it_hangs(run)
    assert "ranks [0, 2] wait for [1]" in found.what
    assert "rank 1: after step 2, in its program; " in found.evidence
    assert "waits_for_ever" in found.evidence
    assert found.remedy.startswith("look at that line")
    assert run.state == "running"
    run.stop(timeout=0)
    assert not any(finding.kind == "hang" for finding in run.diagnose().findings)


def test_a_run_that_goes_on_or_has_ended_does_not_hang() -> None:
    run = dplab.launch(train, world_size=2, args=("nowhere",), detach=False)
    run.wait(60)
    assert not any(finding.kind == "hang" for finding in run.diagnose().findings)
    assert run.diagnose().summary.startswith("10 steps on 2 ranks")
