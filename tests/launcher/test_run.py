"""The handle: attaching, listing, stopping, comparing, showing; and what it refuses to load."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import rank_programs
import survivors

import dplab
from dplab.errors import RunError, UsageError
from dplab.telemetry.rundir import RunDirectory, runs_root


def test_attach_by_path_id_and_beginning(runs_folder: Path) -> None:
    first, second = (dplab.launch(rank_programs.place, detach=False, label=label) for label in ("one", "two"))
    first.wait(60)
    second.wait(60)
    assert [run.id for run in dplab.runs()] == [second.id, first.id]
    assert [run.spec.label for run in dplab.runs(runs_folder)] == ["two", "one"]
    for name in (first.path, str(first.path), first.id, first.id[:-1]):
        assert dplab.attach(name).wait() == [(0, 1)]
    with pytest.raises(RunError, match=rf"2 runs in {runs_folder} have an id that starts with '20'; `dplab runs`"):
        dplab.attach("20")
    with pytest.raises(RunError, match=r"no runs in .* have an id that starts with 'nothing'"):
        dplab.attach("nothing")
    with pytest.raises(UsageError, match="attach was given an empty name"):
        dplab.attach("")
    with pytest.raises(UsageError, match="attach was given a int; give a run's directory or id"):
        dplab.attach(3)  # type: ignore[arg-type]
    for timeout in (-1, "long"):
        with pytest.raises(UsageError, match=r"wait\(timeout=.*\) is not allowed; timeout is a number of seconds >= 0"):
            first.wait(timeout)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"compare was given a str; give another run, such as dplab\.attach"):
        first.compare(second.id)  # type: ignore[arg-type]


def test_a_directory_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=rf"{tmp_path} is not a run directory: it holds no run.json; give a directory"):
        dplab.attach(tmp_path)
    with pytest.raises(RunError, match="absent is not a run directory: it does not exist"):
        dplab.attach(tmp_path / "absent")
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(RunError, match=r"its run\.json is not one of dplab's"):
        dplab.attach(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(RunError, match=r"run\.json is not JSON \(.*\); the run directory is damaged"):
        dplab.attach(tmp_path)


def test_no_runs_yet(runs_folder: Path) -> None:
    assert dplab.runs() == []
    assert runs_root() == runs_folder


def test_default_root_is_the_user_s_data_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DPLAB_RUNS")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert runs_root() == tmp_path / "dplab" / "runs"
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert runs_root() == tmp_path / ".local" / "share" / "dplab" / "runs"


def test_results_that_another_user_could_have_written_are_not_loaded() -> None:
    run = dplab.launch(rank_programs.place, detach=False)
    assert run.wait(60) == [(0, 1)]
    os.chmod(run.path, 0o770)
    with pytest.raises(RunError, match=r"results of run \S+ are not loaded: the directory belongs to user \d+ with "
                                       r"mode 0770, .* it must belong to you \(\d+\) with mode 0700"):
        run.wait()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_results_of_another_user_are_not_loaded() -> None:
    run = dplab.launch(rank_programs.place, detach=False)
    run.wait(60)
    os.chown(run.path / "rank-0" / "result.pkl", 12345, 12345)
    with pytest.raises(RunError, match=r"result\.pkl is not loaded: it belongs to another user"):
        run.wait()
    os.chown(run.path, 12345, 12345)
    with pytest.raises(RunError, match="the directory belongs to user 12345 with mode 0700"):
        run.wait()


def test_stop_in_good_order() -> None:
    run = dplab.launch(rank_programs.train_until_stopped, world_size=2, strategy="zero1", detach=False)
    survivors.rank_pids(run.path, 2)
    survivors.poll(lambda: "loss" in repr(run), "the loss is shown")
    assert run.state == "running"
    assert f"<Run {run.id} · zero1 on 2 ranks · running · step " in repr(run)
    assert f"<b>Run {run.id}</b>" in run._repr_html_()
    run.request_stop()
    survivors.poll(lambda: run.state == "stopped", "the run has stopped")
    ended = RunDirectory(run.path).exit()
    assert ended is not None
    assert [rank["how"] for rank in ended["ranks"]] == ["returned", "returned"]  # nobody had to be forced
    assert run.wait() == [None, None]
    run.request_stop()  # of a run that is over: nothing
    with pytest.raises(UsageError, match=r"stop\(timeout=-1\) is not allowed; timeout is a number of seconds >= 0"):
        run.stop(timeout=-1)


def test_stop_before_the_start(tmp_path: Path) -> None:
    run = dplab.launch(rank_programs.wait_for, args=(str(tmp_path / "never"),), detach=False, warm=False)
    assert run.stop(timeout=0) == "stopped"


def test_events_carry_utilization_of_each_rank() -> None:
    run = dplab.launch(rank_programs.train_until_stopped, world_size=2, detach=False)

    def sampled() -> set[tuple[str, int]]:
        return {(event.name, event.rank) for event in run.events() if event.kind == "gauge" and event.attrs}

    wanted = {(name, rank) for name in ("utilization", "process") for rank in (0, 1)}
    survivors.poll(lambda: wanted <= sampled(), "gauges of both ranks")
    run.stop()
    values = [event.attrs for event in run.events() if event.name == "process"]
    assert all(0 < value["private"] <= value["resident"] for value in values)
    header = run.reader().header(0, file="utilization.jsonl")
    assert header is not None
    assert header["sources"]["cpu"] == {"name": "cpu", "unit": "percent of one core", "reason": None}
    assert header["sources"]["gpu"]["unit"] == "percent"


def test_compare_and_memory() -> None:
    runs = [dplab.launch(rank_programs.record_a_little, world_size=2, strategy=name, detach=False)
            for name in ("ddp", "zero3")]
    for run in runs:
        run.wait(60)
    table = runs[0].compare(runs[1])
    rows = {what: (left, right) for what, left, right in table.rows}
    assert rows["strategy"] == ("ddp", "zero3")
    assert rows["steps"] == (2, 2)
    assert rows["loss"] == (0.5, 0.5)
    assert rows["step, median ms"] == (3.0, 3.0)
    assert rows["exposed sync, median ms"] == (1.0, 1.0)
    assert rows["MB sent by rank 0"] == (0.008, 0.008)
    assert "exposed sync, median ms" in repr(table)
    assert "<td>zero3</td>" in table._repr_html_()
    assert runs[0].memory() == {0: {"params": 100}, 1: {"params": 101}}
