"""The latest checkpoint, and the last few of them."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dplab
from dplab.checkpoint import store
from dplab.errors import CheckpointError, UsageError
from tests.checkpoint.programs import listing, odd, run, same, train, two_groups, wrap
from tests.worlds import in_threads


@pytest.mark.parametrize("wait", [True, False])
def test_the_last_few_are_kept_and_the_latest_is_found(wait: bool, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-00000009").mkdir()  # torn: nothing in it

    def ranks(stop: int) -> int:
        manager = dplab.CheckpointManager(tmp_path, keep=2)
        engine = wrap(odd(), "zero2", two_groups)
        start = manager.load(engine)
        for step in range(start, stop):
            train(engine, step, step + 1, 2)
            saving = manager.save(engine, wait=wait)
        saving.wait()
        return start

    assert in_threads(2, ranks, 3) == [0, 0]
    assert listing(tmp_path) == {"notes.txt", "step-00000009", "step-00000002", "step-00000003"}
    assert in_threads(3, ranks, 5) == [3, 3, 3]
    assert dplab.CheckpointManager(tmp_path).steps() == [4, 5]
    assert dplab.CheckpointManager(tmp_path).latest() == tmp_path / "step-00000005"


def test_killed_in_the_middle_of_a_save_the_last_one_goes_on(tmp_path: Path) -> None:
    program = f"""
import os, signal, dplab
from dplab.checkpoint import store
from tests.checkpoint.programs import odd, train, two_groups, wrap
engine, manager = wrap(odd(), "zero3", two_groups), dplab.CheckpointManager({str(tmp_path)!r})
train(engine, 0, 1, 2)
manager.save(engine)
train(engine, 1, 2, 2)
real = store.write
def killed(*given):
    real(*given)
    os.kill(os.getpid(), signal.SIGKILL)
store.write = killed
manager.save(engine)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2], timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    assert listing(tmp_path) == {"step-00000001", ".step-00000002.saving"}

    def resumed() -> dict[str, torch.Tensor]:
        manager, engine = dplab.CheckpointManager(tmp_path), wrap(model, "zero3", two_groups)
        assert manager.load(engine) == 1
        train(engine, 1, 2, 2)
        manager.save(engine)
        return engine.full_state_dict()

    model = odd()
    assert same(in_threads(1, resumed)[0], in_threads(1, run, model, "zero3", (0, 2), optimizer=two_groups, rows=2)[0])
    assert listing(tmp_path) == {"step-00000001", "step-00000002"}


def test_one_that_fails_takes_no_other_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ranks() -> None:
        manager = dplab.CheckpointManager(tmp_path, keep=1)
        engine = wrap(odd(), "zero2", two_groups)
        train(engine, 0, 1, 2)
        manager.save(engine)
        train(engine, 1, 2, 2)
        with pytest.raises(CheckpointError, match="No space left"):
            manager.save(engine)

    real, calls = store.finish, []

    def second_fails(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return real(*args)

    monkeypatch.setattr(store, "finish", second_fails)
    in_threads(2, ranks)
    assert dplab.CheckpointManager(tmp_path).steps() == [1]


@pytest.mark.parametrize("keep", [0, -1, True, 2.0, "3"])
def test_keep_is_a_number_of_checkpoints(keep: Any) -> None:
    with pytest.raises(UsageError, match="it is the number of checkpoints to keep, an integer >= 1"):
        dplab.CheckpointManager("x", keep=keep)
