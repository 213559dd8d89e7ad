"""`train`, `compare` and what looks at runs, as a shell uses them: real ranks on real text."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest
import torch

import dplab
from dplab.cli import main, parser
from dplab.commands.kept import KeptWorld
from dplab.commands.train import threads_of
from dplab.errors import RankFailed
from dplab.planner.footprint import volume
from dplab.specs import SHARDINGS
from dplab.telemetry.rundir import RunDirectory
from dplab.views.fold import Fold
from dplab.wire.world import without_shm

TRAIN_KEYS = {"strategy", "world_size", "backend", "steps", "loss_first", "loss_last", "tokens_per_s",
              "step_ms_median", "sync_ms_median", "peak_bytes", "memory", "wire", "run_dir"}
QUICK = ("--batch-size", "1", "--world-size", "2")


def said(capsys, *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    out, err = capsys.readouterr()
    return status, out, err


@pytest.fixture(scope="module")
def trained() -> dict:
    """What `dplab train --json` said, once."""
    done = subprocess.run([sys.executable, "-m", "dplab", "train", "--strategy", "zero2", "--steps", "12", "--json",
                           "--label", "a test", *QUICK], capture_output=True, text=True, check=False, timeout=180)
    assert done.returncode == 0, done.stderr
    assert "step 12/12" in done.stderr
    return json.loads(done.stdout)


def test_train_reports_the_contracts_keys(trained):
    assert set(trained) == TRAIN_KEYS | {"recomputed", "restarts"}
    assert (trained["strategy"], trained["world_size"], trained["steps"]) == ("zero2", 2, 12)
    assert trained["backend"] == ("gloo" if without_shm() else "shm")
    assert abs(trained["loss_first"] - math.log(256)) < 0.3
    assert trained["loss_last"] < trained["loss_first"] - 0.5
    assert len(trained["peak_bytes"]) == 2
    assert min(trained["peak_bytes"]) > 0
    assert trained["step_ms_median"] > trained["sync_ms_median"] >= 0
    assert trained["tokens_per_s"] > 0


def test_the_wire_of_train_is_the_footprints_volume(trained):
    numel = trained["memory"]["params"] // 4
    expected = volume(numel, sharding=SHARDINGS["zero2"], shard=2)
    for name in ("reduce_scatter", "all_gather"):
        assert trained["wire"][name]["bytes"] == 4 * trained["steps"] * expected[name]
    assert trained["memory"]["grads"] == trained["memory"]["params"] // 2


def threads() -> int:
    """What a launched rank runs: how many threads it computes on."""
    import torch

    return torch.get_num_threads()


@pytest.mark.parametrize(("given", "variable", "expected"), [
    ((), None, 1), (("--threads", "2"), None, 2), (("--threads", "2"), "3", 2), ((), "3", 3)])
def test_a_rank_computes_on_one_thread_unless_told(given, variable, expected, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    args = parser().parse_args(["train", "--world-size", "1", *given])
    run = dplab.launch(threads, threads=threads_of(args), detach=False)
    assert run.wait(60) == [expected]


def test_train_in_words(capsys):
    status, out, _ = said(capsys, "train", "--steps", "4", *QUICK)
    lines = {line.split()[1]: line for line in out.splitlines() if line.startswith("wire")}
    assert status == 0
    told = re.fullmatch(r"wire +all_reduce: ([\d.]+) MB a step; ([\d.]+) MB sent by rank 0 in the whole run, \d+ times",
                        lines["all_reduce:"])
    assert float(told[2]) == pytest.approx(4 * float(told[1]), abs=0.05)
    assert "before the first step" in lines["init:"]
    alone = said(capsys, "train", "--steps", "1", "--world-size", "1", "--batch-size", "1")
    assert "ddp on 1 rank, which has nobody to talk to" in alone[1]
    assert "offload" not in alone[1]
    offloaded = said(capsys, "train", "--steps", "1", "--world-size", "1", "--batch-size", "1", "--strategy",
                     "zero1+offload=optimizer")
    where = "host" if torch.cuda.is_available() else "offload     moved nothing: the ranks compute in the host's memory"
    assert where in offloaded[1]
    assert alone[2].count("step 0/1") <= 1


def test_runs_lists_it(trained, capsys):
    status, out, _ = said(capsys, "runs", "--json")
    row = next(row for row in json.loads(out)["runs"] if row["run_dir"] == trained["run_dir"])
    assert status == 0
    assert (row["state"], row["strategy"], row["label"]) == ("finished", "zero2", "a test")
    assert row["id"] in said(capsys, "runs")[1]


def test_attach_tells_a_run_that_is_over(trained, capsys):
    status, out, err = said(capsys, "attach", trained["run_dir"], "--json")
    data = json.loads(out)
    assert (status, data["state"], data["steps"]) == (0, "finished", 12)
    assert "step" not in data
    assert data["step_ms_median"] == pytest.approx(trained["step_ms_median"])
    assert "step 12" in err


def test_trace_writes_what_perfetto_opens(trained, capsys, tmp_path):
    status, out, _ = said(capsys, "trace", trained["run_dir"], "-o", str(tmp_path / "trace.json"))
    assert status == 0
    assert "ui.perfetto.dev" in out
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {row["pid"] for row in rows if row["ph"] == "X"} == {0, 1}


def test_doctor_tells_where_each_rank_stands(trained, capsys):
    status, out, _ = said(capsys, "doctor", trained["run_dir"], "--json")
    ranks = json.loads(out)["ranks"]
    assert status == 0
    assert [row["rank"] for row in ranks] == [0, 1]
    assert all(row["step"] == 12 and not row["lives"] and row["bucket"] is None for row in ranks)
    assert "rank 1 (ended): last seen after step 12, returned" in said(capsys, "doctor", trained["run_dir"])[1]


def failing() -> None:
    """What a launched rank runs: it fails before it has trained."""
    raise ValueError("no data")


def test_doctor_says_of_no_rank_that_ended_that_it_runs(capsys):
    run = dplab.launch(failing, detach=False)
    with pytest.raises(RankFailed):
        run.wait(60)
    status, out, _ = said(capsys, "doctor", str(run.path))
    assert status == 0
    assert "failed: rank 0 of 1 failed before its first step was done: ValueError: no data" in out
    assert "rank 0 (ended): last seen before its first step, in its program" in out
    assert "running" not in out
    assert "nothing to complain" not in out


def test_doctor_tells_what_the_machine_can_do(capsys):
    status, out, _ = said(capsys, "doctor", "--json")
    data = json.loads(out)
    assert status == 0
    assert "gloo" in data["backends"]
    assert data["packages"]["dplab"] == dplab.__version__
    assert data["cores"] >= 1
    assert "backends    gloo" in said(capsys, "doctor")[1]


@pytest.mark.parametrize("verb", [("attach",), ("doctor",), ("trace",)])
def test_what_is_no_run(verb, capsys, tmp_path):
    status, out, err = said(capsys, *verb, str(tmp_path))
    assert (status, out) == (2, "")
    assert "is not a run directory: it holds no run.json; give a directory that dplab.launch made" in err
    for name, sentence in (("20010101", "have an id that starts with '20010101'; `dplab runs` lists them"),
                           ("/", "/ is not a run directory"), ("", "attach was given an empty name"),
                           ("x" * 300, "no run's directory or id (")):
        status, out, err = said(capsys, *verb, name)
        assert (status, out) == (2, "")
        assert sentence in err
        assert err.count("\n") == 1


def test_no_runs_yet(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("DPLAB_RUNS", str(tmp_path))
    assert said(capsys, "runs")[1] == f"no runs in {tmp_path} yet; dplab train or dplab.launch makes one\n"


def test_a_damaged_run_is_marked_and_hides_no_other(trained, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("DPLAB_RUNS", str(tmp_path))
    good, bad = (shutil.copytree(trained["run_dir"], tmp_path / name) for name in ("20260101-good", "20260102-bad"))
    (bad / "run.json").write_text("{")
    (good / "exit.json").write_text('{"state": "stopped", "reason": "stop was asked for"}')
    status, out, err = said(capsys, "runs")
    lines = out.splitlines()
    assert (status, err) == (0, "")
    assert lines[0].split() == ["id", "started", "state", "step", "strategy", "ranks", "function", "label"]
    assert lines[1].split() == ["20260102-bad", "-", "damaged", *["-"] * 5]
    assert lines[2].split()[0] == "20260101-good"
    assert lines[2].split()[3:7] == ["stopped", "12", "zero2", "2"]
    assert lines[3].startswith(f"20260102-bad is damaged: {bad}/run.json is not JSON (")
    rows = json.loads(said(capsys, "runs", "--json")[1])["runs"]
    assert [row["state"] for row in rows] == ["damaged", "stopped"]
    assert rows[0]["step"] is None
    assert rows[1]["step"] == 12
    assert datetime.fromisoformat(rows[1]["started"]).tzinfo is not None
    for verb in ("attach", "doctor", "trace"):
        status, out, err = said(capsys, verb, "20260102")
        assert (status, out) == (2, "")
        assert "run.json is not JSON" in err
    (good / "exit.json").write_text("{}")
    status, out, err = said(capsys, "attach", str(good))
    assert (status, out) == (2, "")
    assert err.splitlines()[-1].startswith(f"dplab: {good}/exit.json is damaged: it does not say how the run ended")


def test_a_stop_that_was_asked_for_is_no_failure(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("DPLAB_RUNS", str(tmp_path))
    run = dplab.launch("dplab.workloads.train:train", world_size=2, detach=False,
                       kwargs={"steps": 100_000, "batch_size": 1})
    wait_until(lambda: (run.steps or 0) > 1)
    status, out, _ = said(capsys, "attach", run.id, "--stop", "--json")
    data = json.loads(out)
    assert (status, data["state"], data["failure"], data["stopped_by"]) == (0, "stopped", None, "stop was asked for")
    assert said(capsys, "attach", run.id)[1] == f"run {run.id} stopped: stop was asked for\n"


def test_a_run_that_failed_by_itself_says_so_once(capsys, monkeypatch, tmp_path, trained):
    monkeypatch.setenv("DPLAB_RUNS", str(tmp_path))
    path = Path(shutil.copytree(trained["run_dir"], tmp_path / "20260101-x"))
    (path / "exit.json").write_text('{"state": "failed", "reason": "no process could be started for it"}')
    status, out, _ = said(capsys, "attach", "20260101-x")
    assert (status, out) == (1, "run 20260101-x failed: no process could be started for it\n")
    data = json.loads(said(capsys, "attach", "20260101-x", "--json")[1])
    assert data["failure"] == "no process could be started for it"


def test_a_run_that_is_removed_under_way_ends_train_too(tmp_path):
    process = subprocess.Popen([sys.executable, "-m", "dplab", "train", "--steps", "100000", *QUICK],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env={**os.environ, "DPLAB_RUNS": str(tmp_path)})
    try:
        wait_until(lambda: any((run.steps or 0) > 0 for run in dplab.runs(tmp_path)))
        shutil.rmtree(dplab.runs(tmp_path)[0].path)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out) == (1, "")
    assert "cannot be followed any more: " in err.splitlines()[-1]
    assert "Traceback" not in err


def test_one_loss_everywhere(capsys):
    """A window of two micro-batches on two ranks: what train says, the handle, attach and the progress line."""
    status, out, err = said(capsys, "train", "--strategy", "zero2+accum2", "--steps", "3", "--json", *QUICK)
    data = json.loads(out)
    assert status == 0
    loss = data["loss_last"]
    run = dplab.attach(data["run_dir"])
    assert json.loads(said(capsys, "attach", data["run_dir"], "--json")[1])["loss_last"] == pytest.approx(loss)
    assert f"step 3/3 · loss {loss:.3f}" in err
    assert f"step 3, loss {loss:.3f}" in repr(run)
    assert {what: left for what, left, _ in run.compare(run).rows}["loss"] == pytest.approx(loss)
    assert Fold(2).loss.last is None
    fold = Fold(2)
    fold.feed(run.events())
    assert fold.loss.last == pytest.approx(loss)


def test_a_loss_that_diverged_is_null(capsys):
    status, out, _ = said(capsys, "train", "--model", "mlp", "--optimizer", "sgd", "--lr", "1e6", "--steps", "30",
                          "--json", *QUICK)
    data = json.loads(out, parse_constant=pytest.fail)
    assert (status, data["loss_last"]) == (0, None)
    assert "samples/s" in said(capsys, "attach", data["run_dir"])[2]


def test_a_trace_that_cannot_be_written(trained, capsys, tmp_path):
    for target in (tmp_path, tmp_path / "no" / "trace.json"):
        status, out, err = said(capsys, "trace", trained["run_dir"], "-o", str(target))
        assert (status, out) == (2, "")
        assert f"the trace cannot be written to {target}: " in err
        assert err.count("\n") == 1


@pytest.mark.parametrize("verb", ["train", "compare"])
def test_input_that_a_rank_refuses_is_bad_usage_too(verb, capsys, tmp_path):
    """It speaks of options there too; what can be known is refused before any rank is started."""
    status, out, err = said(capsys, verb, "--model", "mlp", "--batch-size", "1000", "--world-size", "2")
    assert (status, out) == (2, "")
    last = err.strip().splitlines()[-1]
    assert last.startswith("dplab: the data set has 1707 samples, and --world-size 2 x --batch-size 1000 need 2000")
    (tmp_path / "short.txt").write_text("x" * 1000)
    status, out, err = said(capsys, verb, "--data", str(tmp_path / "short.txt"), "--world-size", "2")
    assert (status, out) == (2, "")
    assert "short.txt' has 7 samples of 128 bytes, and --world-size 2 x --batch-size 8 need 16; use a smaller" in err
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_compare_measures_the_same_work(capsys):
    systems = ["ddp", "zero3@gloo", "torch:ddp", "single"]
    status, out, err = said(capsys, "compare", *systems, "--steps", "5", "--block", "2", "--json", *QUICK)
    data = json.loads(out)
    assert status == 0
    assert (data["baseline"], data["skipped"]) == ("ddp", [])
    rows = {row["strategy"]: row for row in data["rows"]}
    assert list(rows) == systems
    for row in rows.values():
        assert set(row) >= TRAIN_KEYS | {"ratio"}
        assert row["ratio"]["low"] is row["ratio"]["high"] is None      # three blocks are too few for an interval
        assert (row["steps"], row["warm_up_steps"]) == (5, 6)
        run = dplab.attach(row["run_dir"])
        if row["wire"]:
            assert f"loss {row['loss_last']:.3f}" in repr(run)
        assert row["peak_total_bytes"] >= sum(row["peak_bytes"]) > 0
    assert rows["ddp"]["loss_last"] == pytest.approx(rows["zero3@gloo"]["loss_last"], abs=1e-5)
    assert rows["ddp"]["loss_last"] == pytest.approx(rows["torch:ddp"]["loss_last"], abs=1e-4)
    assert rows["single"]["loss_last"] != pytest.approx(rows["ddp"]["loss_last"], abs=1e-4)
    assert rows["ddp"]["ratio"] == {"median": 1, "low": None, "high": None}
    assert rows["torch:ddp"]["wire"] == {}
    assert {rows[name]["backend"] for name in ("torch:ddp", "zero3@gloo")} == {"gloo"}
    assert [line for line in err.splitlines() if line.startswith("starting ")] == [
        f"starting {name} ({number} of 4)" for number, name in enumerate(systems, 1)]
    assert all(re.search(rf"^block {number}/3, about [\d,]+ s to go$", err, re.MULTILINE) for number in (1, 2, 3))


def test_compare_skips_what_is_not_installed_and_says_so(capsys, monkeypatch):
    monkeypatch.setattr("dplab.peers.catalog.importlib.util.find_spec", lambda name: None)
    status, out, err = said(capsys, "compare", "deepspeed:2", "--json", *QUICK)
    assert (status, out) == (2, "")
    assert "deepspeed:2 is skipped: deepspeed is not installed; pip install 'dplab[peers]'" in err
    assert "dplab: no system is left to compare" in err


def test_ctrl_c_stops_the_run(tmp_path):
    process = subprocess.Popen([sys.executable, "-m", "dplab", "train", "--steps", "100000", *QUICK],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env={**os.environ, "DPLAB_RUNS": str(tmp_path)})
    try:
        wait_until(lambda: any((tmp_path / name / "rank-0" / "events.jsonl").exists()
                               and '"step"' in (tmp_path / name / "rank-0" / "events.jsonl").read_text()
                               for name in os.listdir(tmp_path)))
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert out == ""
    assert "stopping the run" in err
    assert re.search(rf"^run {os.listdir(tmp_path)[0]} was stopped: step \d+/100000 · loss .*; what it recorded stays "
                     rf"in {tmp_path}", err, re.MULTILINE)
    assert err.strip().endswith("dplab: interrupted")
    (path,) = tmp_path.iterdir()
    directory = RunDirectory(path)
    assert directory.state() == "stopped"
    assert not any(identity.lives() for identity in directory.processes()["ranks"])


def test_a_rank_that_dies_in_its_turn_ends_the_comparison():
    run = dplab.launch("dplab.peers.serve:serve", world_size=2, args=("single",), detach=False,
                       kwargs={"model": "mlp", "data": None, "batch_size": 4, "lr": 1e-3, "seed": 0,
                               "optimizer": "sgd"})
    world = KeptWorld(run, 2)
    try:
        world.connect()
        assert [len(answer["losses"]) for answer in world.turn(3, watched=True)] == [3, 3]
        victim = RunDirectory(run.path).processes()["ranks"][1]
        os.kill(victim.pid, signal.SIGKILL)
        with pytest.raises(RankFailed, match="rank 1 of 2 was killed by SIGKILL"):
            world.turn(3, watched=True)
    finally:
        world.close()
    assert run.state == "failed"


def wait_until(holds, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
