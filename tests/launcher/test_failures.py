"""One rank fails, the others wait in a collective: the first cause arrives, and nothing is left."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import rank_programs

import dplab
from dplab.errors import RankFailed, RunError
from dplab.wire.world import without_shm


def failure(function: object, *, world_size: int = 3, **kwargs: object) -> RankFailed:
    run = dplab.launch(function, world_size=world_size, kwargs=kwargs, detach=False)
    with pytest.raises(RankFailed) as caught:
        run.wait(60)
    assert run.state == "failed"
    assert not list(run.path.glob("rank-*/.*"))
    assert not (run.path / "call.pkl").exists()
    return caught.value


@pytest.mark.parametrize(("how", "head"), [
    ("ValueError", "rank 1 of 3 failed in step 3: ValueError: boom in the third step"),
    ("exit", "rank 1 of 3 failed before its first step was done: SystemExit: sys.exit(3)"),
    ("unpicklable", "rank 1 of 3 failed before its first step was done: "
                    "rank_programs.raise_unpicklable.<locals>.Local: I hold a lock"),
    ("before init", "rank 1 of 3 failed before its first step was done: ValueError: no group today"),
    ("SIGKILL", "rank 1 of 3 was killed by SIGKILL (by somebody, or by the system when memory ran out), last seen "
                "before its first step, in its program"),
    ("SIGSEGV", "rank 1 of 3 was ended by SIGSEGV, last seen before its first step, in its program"),
    ("os._exit", "rank 1 of 3 ended with exit status 0 before its function returned, last seen before its "
                 "first step, in its program"),
])
def test_h37_first_cause_comes_first(how: str, head: str) -> None:
    error = failure(rank_programs.fail, how=how, on=1)
    message = str(error)
    assert message.startswith(head + "\n\n")
    assert error.rank == 1
    assert error.collateral == (0, 2)
    assert message.index(head) < message.index("Ended because of it:\n  rank 0: ")
    assert "\n  rank 2: " in message


@pytest.mark.parametrize("where", ["the loader", "a hook", "backward"])
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_h37_wherever_it_is_raised(where: str, strategy: str) -> None:
    error = failure(rank_programs.fail_in, where=where, on=1, strategy=strategy)
    assert str(error).startswith(f"rank 1 of 3 failed in step 2: ValueError: boom in {where}\n\n")
    assert error.collateral == (0, 2)


@pytest.mark.parametrize("counts", [(2, 3), (1, 2, 4), (0, 1)])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_h12_ranks_with_different_numbers_of_batches(strategy: str, counts: tuple[int, ...]) -> None:
    error = failure(rank_programs.steps, world_size=len(counts), counts=counts, strategy=strategy)
    least = min(counts)
    told = "did not end: rank" if without_shm() else f"rank {counts.index(least)} has left the group: it ended"
    assert f"in step {least + 1}, after {least} that every rank ended: " in str(error)
    assert told in str(error)
    assert ("Nothing failed on ranks [0]: their function had returned while others still waited for them. Give every "
            "rank as many steps (dplab.loader does).") in str(error)


def test_traceback_is_the_rank_s_own() -> None:
    error = failure(rank_programs.fail, how="ValueError", on=2)
    assert error.traceback.startswith("Traceback (most recent call last):\n  File \"" + rank_programs.__file__)
    assert 'raise ValueError("boom in the third step")' in error.traceback
    assert "dplab/launcher" not in error.traceback


def test_h37_first_of_two_causes_is_the_earlier() -> None:
    def both() -> None:
        rank_programs.join()
        rank, _ = rank_programs.place()
        if rank == 1:
            (rank_programs.here() / "ready").touch()
            raise KeyError("first")
        rank_programs.wait_for(f"{os.environ['DPLAB_RUN_DIR']}/rank-1/error.json")
        raise KeyError("second")

    assert failure(both, world_size=2).rank == 1


def test_exception_while_the_function_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "breaks_at_import.py").write_text("raise OSError('no data here')\ndef train(): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    error = failure("breaks_at_import:train", world_size=2)
    assert re.match(r"rank [01] of 2 failed before its first step was done: OSError: no data here", str(error))
    assert "breaks_at_import.py" in error.traceback


def test_module_without_the_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only importing the module can tell, the rank does."""
    (tmp_path / "has_no_train.py").write_text("from os.path import *\ntrained = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    error = failure("has_no_train:train", world_size=1)
    assert str(error).startswith(
        "rank 0 of 1 failed before its first step was done: dplab.errors.UsageError: launch was given "
        "'has_no_train:train', but module 'has_no_train' has no 'train' (did you mean 'trained'?); "
        "name a function of it\n")
    assert "'has_no_train:trained', which is a int and cannot be called; name a function" in str(
        failure("has_no_train:trained", world_size=1))


@pytest.mark.parametrize("how", ["gone", "closed", "replaced"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_program_that_spoils_its_streams(how: str, fails: bool) -> None:
    if fails:
        error = failure(rank_programs.spoil_streams, world_size=2, how=how, fails=True)
        assert "failed before its first step was done: ValueError: after the streams" in str(error)
    else:
        run = dplab.launch(rank_programs.spoil_streams, world_size=2, kwargs={"how": how}, detach=False)
        assert run.wait(60) == [how, how]
        assert not (run.path / "supervisor.log").read_text()
        assert run.logs(0) == "half a line"


@pytest.mark.parametrize(("how", "status"), [("returns", "0"), ("fails", "1")])
def test_a_child_that_the_program_forks_is_no_rank(how: str, status: str) -> None:
    run = dplab.launch(rank_programs.fork_and_come_back, args=(how,), detach=False)
    assert run.wait(60) == [status]
    assert ("ValueError: I am a child" in run.logs(0)) == (how == "fails")
    assert not (run.path / "rank-0" / "error.json").exists()


def test_what_a_rank_prints_last_is_kept() -> None:
    def speak() -> None:
        import sys

        print("one", end="", file=sys.__stdout__)
        print(", two", end="", file=sys.__stderr__)

    run = dplab.launch(speak, detach=False, warm=True)
    run.wait(60)
    assert run.logs(0) == "one, two"


def test_result_that_cannot_travel_back() -> None:
    message = str(failure(rank_programs.too_much, world_size=1))
    assert ("rank 0 returned something that cannot travel back: the returned value['bad'] (a _thread.lock) cannot be "
            "pickled") in message
    assert "return plain values, tensors or state dicts" in message


def test_failure_in_one_line() -> None:
    run = dplab.launch(rank_programs.fail, world_size=2, kwargs={"how": "ValueError", "on": 0}, detach=False)
    with pytest.raises(RankFailed):
        run.wait(60)
    assert run.failure == "rank 0 of 2 failed in step 3: ValueError: boom in the third step"
    assert run.failure in repr(run)
    again = dplab.attach(run.path)
    with pytest.raises(RankFailed, match="boom in the third step"):
        again.wait()


def test_a_very_long_message_is_told_short_in_one_line() -> None:
    def fail() -> None:
        raise ValueError("x" * 10_000 + "\nsecond line")

    run = dplab.launch(fail, detach=False)
    with pytest.raises(RankFailed, match="second line"):
        run.wait(60)
    assert run.failure is not None
    assert run.failure.startswith("rank 0 of 1 failed before its first step was done: ValueError: xxx")
    assert run.failure.endswith("xxx...")
    assert len(run.failure) < 500


def test_sys_exit_zero_is_a_return() -> None:
    assert dplab.launch(exit, world_size=1, args=(0,), detach=False).wait(60) == [None]


def test_a_run_that_never_started() -> None:
    run = dplab.launch(rank_programs.total, world_size=1, detach=False)
    run.wait(60)
    for name in ("exit.json", "pids.json"):
        (run.path / name).unlink()
    (run.path / "starter.json").write_text("[1, 0.0, \"another boot\"]")
    (run.path / "run.json").write_text(json.dumps({**json.loads((run.path / "run.json").read_text()), "created": 0}))
    with pytest.raises(RunError, match=r"the process that was to start it \(process 1\) ended before the run began"):
        run.wait()
