"""H34: a save that goes on beside training holds the moment of its call, and tells of its failure."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dplab
from dplab.checkpoint import store
from dplab.checkpoint.pieces import Share
from dplab.checkpoint.saving import Snapshot
from dplab.errors import CheckpointError
from tests.checkpoint.programs import BATCHES, moments, odd, same, train, two_groups, wrap
from tests.worlds import in_threads

ROWS = 2


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Writers wait for it, so that training is certainly ahead of them."""
    opened = threading.Event()
    real = store.write

    def slow(*args: Any) -> Any:
        assert opened.wait(30)
        return real(*args)

    monkeypatch.setattr(store, "write", slow)
    yield opened
    opened.set()


def content(place: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A checkpoint's weights and optimizer state, from one process."""
    def read() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        engine = wrap(odd(), "ddp", two_groups)
        engine.load(place)
        return engine.full_state_dict(), moments(engine)

    return in_threads(1, read)[0]


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "zero2+bf16"])
def test_h34_the_moment_of_the_call_is_saved_however_far_training_has_come(
        strategy: str, tmp_path: Path, gate: threading.Event) -> None:
    model = odd(torch.float32)

    def ranks() -> None:
        engine = wrap(model, strategy, two_groups)
        for turn in range(4):
            train(engine, turn, turn + 1, ROWS)
            gate.set()
            engine.save(tmp_path / f"now{turn}")
            gate.clear()  # both have written by now; both clear it before they meet in the next save
            saving = engine.save(tmp_path / f"beside{turn}", wait=False)
            assert not saving.done
            assert "under way" in repr(saving)
            train(engine, turn + 1, turn + 2, ROWS)
            with engine.gathered() as module, torch.no_grad():
                for parameter in module.parameters():
                    parameter.fill_(7)
            gate.set()
            saving.wait()
            assert saving.done
            engine.load(tmp_path / f"now{turn}")

    in_threads(2, ranks)
    for turn in range(4):
        (weights, state), (meant, meant_state) = content(tmp_path / f"beside{turn}"), content(tmp_path / f"now{turn}")
        assert same(weights, meant)
        assert same(state, meant_state)
        assert any(name.endswith(".step") and value == turn + 1 for name, value in state.items())


@pytest.mark.parametrize("by", ["step", "gathered", "full_state_dict"])
@pytest.mark.parametrize("strategy", ["ddp", "zero2+bf16", "zero3+bf16"])
def test_h34_what_the_optimizer_holds_is_copied_before_it_changes_and_no_sooner(
        strategy: str, by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy begins only when somebody waits for it, which nobody does before the next change of it."""
    copy_, taken, asked = Share.copied, Snapshot.taken, threading.Event()

    def late(share: Share, *, held: bool) -> Share:
        assert not held or asked.wait(20)
        return copy_(share, held=held)

    def waited_for(snapshot: Snapshot) -> None:
        asked.set()
        taken(snapshot)

    monkeypatch.setattr(Share, "copied", late)
    monkeypatch.setattr(Snapshot, "taken", waited_for)

    def ranks() -> None:
        engine = wrap(odd(torch.float32), strategy, two_groups)
        train(engine, 0, 1, ROWS)
        engine.save(tmp_path / "now")
        saving = engine.save(tmp_path / "beside", wait=False)
        x, y = BATCHES[0]
        engine.backward(engine(x, y))
        assert not asked.is_set()
        if by == "step":
            engine.step()
        else:
            if by == "gathered":
                with engine.gathered() as module, torch.no_grad():
                    for parameter in module.parameters():
                        parameter.fill_(7)
            else:
                for parameter in engine.module.parameters():
                    if strategy != "zero3+bf16":
                        parameter.data.fill_(7)
                engine.full_state_dict()
        saving.wait()

    in_threads(1, ranks)
    (weights, state), (meant, meant_state) = content(tmp_path / "beside"), content(tmp_path / "now")
    assert same(weights, meant)
    assert same(state, meant_state)


def test_h34_a_second_save_waits_for_the_first(tmp_path: Path, gate: threading.Event) -> None:
    came: list[str] = []

    def ranks() -> None:
        engine = wrap(odd(), "zero2", two_groups)
        engine.save(tmp_path / "first", wait=False)
        train(engine, 0, 1, ROWS)
        if engine.world.rank == 0:
            threading.Timer(0.2, lambda: (came.append("opened"), gate.set())).start()
        second = engine.save(tmp_path / "second", wait=False)
        came.append("second")
        second.wait()

    in_threads(2, ranks)
    assert came[0] == "opened"
    assert not same(content(tmp_path / "first")[0], content(tmp_path / "second")[0])


@pytest.mark.parametrize("told_by", ["wait", "save", "load"])
def test_h34_a_writer_that_fails_is_told_on_every_rank_at_the_next_call(
        told_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    real = store.write

    def fails(folder: Path, rank: int, share: Any) -> Any:
        if rank == 1 and "beside" in str(folder):
            raise OSError(28, "No space left on device")
        return real(folder, rank, share)

    monkeypatch.setattr(store, "write", fails)

    def ranks() -> str:
        engine = wrap(odd(), "zero1", two_groups)
        engine.save(tmp_path / "before")
        saving = engine.save(tmp_path / "beside", wait=False)
        train(engine, 0, 1, ROWS)
        saving._thread.join()
        with pytest.raises(CheckpointError) as caught:
            saving.wait() if told_by == "wait" else getattr(engine, told_by)(tmp_path / "before")
        # told once; the next call is a new one
        engine.load(tmp_path / "before") if told_by == "wait" else getattr(engine, told_by)(tmp_path / "before")
        train(engine, 1, 2, ROWS)
        return str(caught.value)

    for said in in_threads(2, ranks):
        assert "failed, and nothing there has changed: OSError: [Errno 28] No space left on device" in said
    assert "dplab: engine.save(" in capfd.readouterr().err  # heard of even where no call follows
    assert not (tmp_path / "beside").exists()
    assert not list(tmp_path.glob(".*"))


def test_a_program_that_ends_at_once_waits_for_its_last_checkpoint(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = ("import sys, torch, dplab\n"
            "engine = dplab.parallelize(torch.nn.Linear(3, 3), lambda ps: torch.optim.SGD(ps, lr=0.1))\n"
            "engine.save(sys.argv[1], wait=False)\n")
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "last")], check=True, timeout=120)
    assert (tmp_path / "last" / ".metadata").is_file()
    assert dplab.CheckpointManager(tmp_path).steps() == []
