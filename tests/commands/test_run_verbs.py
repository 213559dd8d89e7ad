"""`train`, `compare` and what looks at runs, as a shell uses them: real ranks on real text."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest

import dplab
from dplab.cli import main
from dplab.commands.kept import KeptWorld
from dplab.errors import RankFailed
from dplab.planner.footprint import volume
from dplab.specs import SHARDINGS
from dplab.telemetry.rundir import RunDirectory

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
    assert set(trained) == TRAIN_KEYS
    assert (trained["strategy"], trained["world_size"], trained["steps"]) == ("zero2", 2, 12)
    assert trained["backend"] == "gloo"
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
    assert all(row["step"] == 12 and not row["lives"] for row in ranks)
    assert "rank 1 (ended): step 12" in said(capsys, "doctor", trained["run_dir"])[1]


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
    assert (status, out) == (1, "")
    assert "is not a run directory: it holds no run.json; give a directory that dplab.launch made" in err
    status, _, err = said(capsys, *verb, "20010101")
    assert status == 1
    assert "have an id that starts with '20010101'; dplab.runs() lists them" in err


def test_no_runs_yet(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("DPLAB_RUNS", str(tmp_path))
    assert said(capsys, "runs")[1] == "no runs yet; dplab train or dplab.launch makes one\n"


@pytest.mark.parametrize("verb", ["train", "compare"])
def test_input_that_a_rank_refuses_is_bad_usage_too(verb, capsys, tmp_path):
    (tmp_path / "short.txt").write_text("x" * 1000)
    status, out, err = said(capsys, verb, "--data", str(tmp_path / "short.txt"), "--world-size", "2")
    assert (status, out) == (2, "")
    last = err.strip().splitlines()[-1]
    assert last.startswith("dplab: the data set has 7 samples, and 2 ranks x batch_size 8 need 16")
    assert "Traceback" not in err


def test_compare_measures_the_same_work(capsys):
    systems = ["ddp", "zero3", "torch:ddp", "single"]
    status, out, err = said(capsys, "compare", *systems, "--steps", "4", "--block", "2", "--json", *QUICK)
    data = json.loads(out)
    assert status == 0
    assert (data["baseline"], data["skipped"]) == ("ddp", [])
    rows = {row["strategy"]: row for row in data["rows"]}
    assert list(rows) == systems
    for row in rows.values():
        assert set(row) >= TRAIN_KEYS | {"ratio"}
        assert row["ratio"]["low"] <= row["ratio"]["median"] <= row["ratio"]["high"]
        assert row["steps"] == 7, "three to warm up, four that count"
        assert row["peak_total_bytes"] >= sum(row["peak_bytes"]) > 0
    assert rows["ddp"]["loss_last"] == pytest.approx(rows["zero3"]["loss_last"], abs=1e-5)
    assert rows["ddp"]["loss_last"] == pytest.approx(rows["torch:ddp"]["loss_last"], abs=1e-4)
    assert rows["single"]["loss_last"] != pytest.approx(rows["ddp"]["loss_last"], abs=1e-4)
    assert rows["ddp"]["ratio"] == {"median": 1, "low": 1, "high": 1}
    assert rows["torch:ddp"]["wire"] == {}
    assert "block 2/2" in err


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
        assert [len(answer["losses"]) for answer in world.turn(3)] == [3, 3]
        victim = RunDirectory(run.path).processes()["ranks"][1]
        os.kill(victim.pid, signal.SIGKILL)
        with pytest.raises(RankFailed, match="rank 1 of 2 was killed by SIGKILL"):
            world.turn(3)
    finally:
        world.close()
    assert run.state == "failed"


def wait_until(holds, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
