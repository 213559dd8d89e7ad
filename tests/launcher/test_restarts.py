"""Restarts: a killed rank costs the steps behind the last checkpoint and nothing else."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import survivors

import dplab
from dplab.cli import main
from dplab.errors import RankFailed, RunError, UsageError
from dplab.launcher import watch
from dplab.telemetry.reader import RunReader
from dplab.telemetry.summary import Summary
from dplab.views import past
from dplab.workloads.train import train

STEPS, EVERY = 12, 4


def curve(run: dplab.Run) -> list[float]:
    """The run's loss by step, as its reader tells it: the mean over ranks."""
    found: dict[int, list[float]] = defaultdict(list)
    for event in RunReader(run.path).poll():
        if event.kind == "gauge" and event.name == "loss":
            found[event.step].append(event.attrs["value"])
    assert sorted(found) == list(range(STEPS))
    return [statistics.fmean(found[step]) for step in range(STEPS)]


def start(world_size: int = 2, steps: int = STEPS, **options: object) -> dplab.Run:
    return dplab.launch(train, world_size=world_size, strategy="zero2", detach=False,
                        kwargs={"steps": steps, "checkpoint_every": EVERY, "batch_size": 4}, threads=1, **options)


def killed(rank: int, at: int, times: int = 1):
    """The train program, in which a rank kills itself in a step of the first attempts."""
    def program(**kwargs: object) -> object:
        import torch

        before = torch.optim.AdamW.step

        def step(self: object, *args: object, **more: object) -> object:
            from dplab.telemetry import recorder
            attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
            if os.environ["RANK"] == str(rank) and recorder.current().step == at and attempt < times:
                os.kill(os.getpid(), signal.SIGKILL)
            return before(self, *args, **more)

        torch.optim.AdamW.step = step
        return train(**kwargs)

    return program


def killed_run(rank: int, at: int, times: int = 1, world_size: int = 2, **options: object) -> dplab.Run:
    return dplab.launch(killed(rank, at, times), world_size=world_size, strategy="zero2", detach=False, threads=1,
                        kwargs={"steps": STEPS, "checkpoint_every": EVERY, "batch_size": 4}, **options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], list[float]]:
    """The uninterrupted run's curve, and rank 0's losses."""
    run = start(root=tmp_path_factory.mktemp("whole"))
    return (run.wait(120)[0]["losses"], curve(run))


def test_the_same_ranks_go_on_to_the_bit(whole: tuple[list[float], list[float]]) -> None:
    run = killed_run(1, 6, max_restarts=1)
    assert run.wait(120)[0]["losses"] == whole[0]
    assert curve(run) == whole[1]
    assert run.state == "finished"
    (again,) = run.restarts
    assert (again.rank, again.ranks, again.world_size) == (1, 2, 2)
    assert again.why.startswith("rank 1 of 2 was killed by SIGKILL")
    assert "finished · restarted once, last on 2 of 2 ranks: rank 1 of 2 was killed by SIGKILL" in repr(run)
    assert Summary().feed(run.events()).steps == STEPS
    # a reader that has seen the steps which were trained again is told from which on
    (told,) = [event for event in run.events() if event.kind == "restart"]
    assert told.step == 4
    assert told.attrs["world_size"] == 2


def test_the_ranks_that_are_left_go_on(whole: tuple[list[float], list[float]]) -> None:
    run = killed_run(0, 9, max_restarts=2, min_ranks=1)
    results = run.wait(120)
    assert len(results) == 1
    assert run.restarts[0].world_size == 1
    assert curve(run) == pytest.approx(whole[1], rel=1e-6)
    assert len(curve(run)) == STEPS
    assert set(run.memory()) == {0}
    assert run.steps == STEPS
    assert "1 rank" in str(run.diagnose())


def test_before_the_first_checkpoint_it_begins_anew(whole: tuple[list[float], list[float]]) -> None:
    run = killed_run(1, 2, times=2, max_restarts=2)
    assert run.wait(120)[0]["losses"] == whole[0]
    assert [again.number for again in run.restarts] == [1, 2]
    assert curve(run) == whole[1]


def test_restarts_come_to_an_end() -> None:
    run = killed_run(1, 2, times=9, max_restarts=1)
    with pytest.raises(RankFailed, match=r"rank 1 of 2 was killed by SIGKILL") as caught:
        run.wait(120)
    assert "And it had been restarted once." in str(caught.value)
    survivors.assert_none(run.path)


def test_too_few_that_are_left_are_told() -> None:
    run = killed_run(1, 2, times=9, max_restarts=3, min_ranks=2)
    with pytest.raises(RankFailed) as caught:
        run.wait(120)
    assert ("And it was not restarted: rank 1 of 2 died, and the 1 that are left are fewer than min_ranks=2."
            in str(caught.value))
    assert run.restarts == []


def test_a_stop_is_no_failure() -> None:
    run = start(steps=10_000, max_restarts=3)
    survivors.poll(lambda: run.steps, "it steps")
    assert run.stop() == "stopped"
    assert run.restarts == []


@pytest.mark.parametrize(("options", "message"), [
    ({"max_restarts": -1}, "launch(max_restarts=-1) is not allowed; max_restarts is an integer >= 0"),
    ({"min_ranks": 3}, "launch(min_ranks=3) is not allowed; min_ranks is an integer from 1 to world_size, or None"),
])
def test_bad_input(options: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        start(**options)
    assert str(caught.value) == message


@pytest.mark.parametrize("text", [
    '{"number": 1}', '[{"number": 1}]', "[3]", "[" * 5000,
    '[{"number": 1, "at": 0, "wall": 0, "rank": 0, "ranks": 2, "world_size": 3, "why": ""}]',
    '[{"number": "1", "at": 0, "wall": 0, "rank": 0, "ranks": 2, "world_size": 2, "why": ""}]'])
def test_a_damaged_record_is_told(text: str, tmp_path: Path) -> None:
    run = dplab.launch(os.getpid, detach=False)
    run.wait(60)
    (run.path / "restarts.json").write_text(text)
    with pytest.raises(RunError, match=r"restarts.json is (damaged: it tells no restarts|not JSON)"):
        _ = run.restarts
    assert "restarts.json is" in repr(run)


def test_a_fresh_interpreter_restarts_too(whole: tuple[list[float], list[float]]) -> None:
    run = killed_run(1, 6, max_restarts=1, warm=False)
    assert run.wait(120)[0]["losses"] == whole[0]


def test_the_command_restarts_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--min-ranks", "1"]) == 2
    assert "--min-ranks says how a run restarts; give --max-restarts too" in capsys.readouterr().err
    arguments = ["train", "--steps", "3", "--batch-size", "2", "--checkpoint-every", "2", "--max-restarts", "1",
                 "--strategy", "zero3+recompute", "--json"]
    assert main(arguments) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["restarts"] == []
    assert set(told["recomputed"]) == {f"blocks.{index}" for index in range(len(told["recomputed"]))}
    assert [path.name for path in Path(told["run_dir"], "checkpoints").iterdir()] == ["step-00000002"]


PROGRAM = """
import json, os, signal, sys
import torch
import dplab
from dplab.workloads import models

world = dplab.init()
torch.manual_seed(0)
model = models.build("tiny-gpt", layers=1, width=16, heads=1)
engine = dplab.parallelize(model, lambda params: torch.optim.AdamW(params), "zero2")
batches = dplab.loader([(torch.arange(9)[:8] + i % 5, torch.arange(9)[1:] + i % 5) for i in range(64)], batch_size=2)
manager = dplab.CheckpointManager(sys.argv[1])
manager.load(engine, loader=batches)
losses = {}
for x, y in batches:
    loss = engine(x, y)
    engine.backward(loss)
    if engine.steps == 6 and world.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGKILL)
    engine.step()
    losses[engine.steps] = loss.item()
    if engine.steps % 4 == 0:
        manager.save(engine, loader=batches)
    if engine.steps == 10:
        break
if world.rank == 0:
    print(json.dumps(losses))
"""


def test_torchrun_restarts_the_same_program(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def losses(name: str, killed_in: str) -> dict[str, float]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                   "--max-restarts", "1", "--log-dir", str(tmp_path / "logs"), str(program), str(tmp_path / name),
                   killed_in]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
        told: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return told

    whole = losses("whole", "never")
    again = losses("again", "0")
    assert sorted(map(int, again)) == list(range(5, 11))
    assert all(again[step] == whole[step] for step in again)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_past_of_a_restarted_run_holds_no_void_step(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the files are so long that they are read in pieces, and a piece may end before the restart."""
    run = killed_run(rank, 6, max_restarts=1)
    run.wait(120)
    monkeypatch.setattr(past, "PIECE", 256)
    monkeypatch.setattr(watch, "PIECE", 256)
    took = {(row["step"], row["rank"]): row["step_ms"] for row in run.table()}
    board = watch.Watch(run)
    board.read()
    for step in (STEPS, 1, 2, 3, STEPS, 2):
        board.seek(step)
        shown = board.shown
        for one, series in shown.steps.series.items():
            assert series["total"].tolist() == pytest.approx([took[number, one] for number in range(1, step + 1)])
        assert list(shown.throughput.series["step"]) == list(range(1, step + 1))
