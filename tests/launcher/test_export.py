"""What is taken out of a run: against sums from its events, and read back by other readers."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import dplab
from dplab.commands.base import without_nan
from dplab.errors import RunError, UsageError
from dplab.launcher import export as module
from dplab.launcher.run import Run
from dplab.specs import RunSpec
from dplab.telemetry.rundir import RunDirectory
from dplab.views.table import COLUMNS, table, to_csv
from tests.views import synthetic
from tests.views.synthetic import MEMORY, TOKENS, run_events, step_events


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    made = dplab.launch("dplab.workloads.train:train", world_size=2, strategy="zero2", detach=False, label="small",
                        root=tmp_path_factory.mktemp("runs"), kwargs={"steps": 4, "batch_size": 1})
    made.wait()
    return made


def test_the_table_of_the_synthetic_run_is_its_docstring() -> None:
    rows = table(run_events(2, 3))
    assert [(row["step"], row["rank"]) for row in rows] == [(step, rank) for step in (1, 2, 3) for rank in range(2)]
    row = rows[3]
    assert {name: row[name] for name in COLUMNS[2:]} == {
        "loss": synthetic.loss(1, 1), "step_ms": 100, "forward_ms": 30, "backward_ms": 33, "optimizer_ms": 15,
        "exposed_ms": 16, "data_ms": 0, "other_ms": 6, "bytes_sent": 4 * 4096, "tokens": TOKENS,
        "memory_bytes": sum(size for name, size in MEMORY.items() if name != "process"), "moved": True}


def test_csv_reads_back_and_leaves_empty_what_was_not_recorded() -> None:
    events = [event for event in step_events(0, 0) if event.name not in ("loss", "memory")]
    (row,) = csv.DictReader(io.StringIO(to_csv(table(events))))
    assert tuple(row) == COLUMNS
    assert (row["loss"], row["memory_bytes"], float(row["step_ms"])) == ("", "", 100)
    assert table([]) == []


def test_the_summary_is_the_run_in_plain_values(run: Run) -> None:
    told = run.summary()
    assert json.loads(json.dumps(told)) == told
    assert (told["strategy"], told["world_size"], told["label"], told["state"], told["steps"]) == (
        "zero2", 2, "small", "finished", 4)
    rows = run.table()
    assert len(rows) == 8
    assert told["loss_first"] == pytest.approx((rows[0]["loss"] + rows[1]["loss"]) / 2)
    assert told["loss_last"] == pytest.approx((rows[-1]["loss"] + rows[-2]["loss"]) / 2)
    assert sum(row["bytes_sent"] for row in rows if row["rank"] == 0) == sum(
        row["bytes"] for row in told["wire"].values())
    assert all(math.isclose(row["step_ms"], sum(row[name] for name in COLUMNS if name.endswith("_ms")
                                                and name != "step_ms"), rel_tol=1e-6) for row in rows)


def test_a_frame_where_pandas_is_and_a_sentence_where_it_is_not(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Frames:
        DataFrame = staticmethod(lambda rows: ("frame", rows))

    monkeypatch.setitem(sys.modules, "pandas", Frames)
    assert run.frame() == ("frame", run.table())
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match=r"run.frame\(\) needs pandas, which is not installed; pip install pandas, or "
                                         r"take run.table\(\)"):
        run.frame()


def test_a_real_frame_has_the_table_s_columns(run: Run) -> None:
    pandas = pytest.importorskip("pandas")
    frame = run.frame()
    assert isinstance(frame, pandas.DataFrame)
    assert tuple(frame.columns) == COLUMNS
    assert len(frame) == 8


def test_everything_is_exported_and_opens_without_a_network(run: Run, tmp_path: Path) -> None:
    written = run.export(tmp_path / "out")
    assert {path.name for path in written} >= {"summary.json", "steps.csv", "trace.json", "board.svg", "loss.svg",
                                               "ownership.html", "sync.html"}
    assert all(path.stat().st_size for path in written)
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == without_nan(run.summary())
    for path in written:
        if path.suffix == ".svg":
            ElementTree.fromstring(path.read_text())
        if path.suffix == ".html":
            text = path.read_text()
            assert 'src="plotly.min.js"' in text
            assert "cdn." not in text
            assert len(text) < 200_000
    assert (tmp_path / "out" / "plotly.min.js").exists()


def test_what_cannot_be_exported(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for formats in ("json", ["pdf"]):
        with pytest.raises(UsageError, match=r"export\(formats=.*\) is not allowed; give some of json, csv, trace, "
                                             r"svg, html, png"):
            run.export(tmp_path, formats)
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=rf"run {run.id} cannot be exported to {tmp_path}/file: File exists; give "
                                       rf"another folder"):
        run.export(tmp_path / "file", ["json"])
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"PNG pictures need kaleido, which is not installed; pip install kaleido \(it "
                                         r"draws with a Chromium that is installed\), or take 'svg' or 'html'"):
        run.export(tmp_path, ["png"])


def test_a_run_that_recorded_nothing_is_exported_as_far_as_it_goes(tmp_path: Path) -> None:
    RunDirectory(tmp_path / "empty").create({"spec": RunSpec(function="m:f", world_size=1).to_dict(), "created": 0,
                                             "versions": {}}, 1)
    with pytest.raises(RunError, match="has recorded no events, so there is nothing to trace"):
        dplab.attach(tmp_path / "empty").export(tmp_path / "out")
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"summary.json", "steps.csv", "board.svg", "loss.html"} <= written


def test_a_browser_that_does_not_start_is_told_in_one_sentence(run: Run, tmp_path: Path,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    class Figure:
        def update_layout(self, **_: Any) -> None:
            pass

        def write_image(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("\nKaleido requires Google Chrome to be installed.\nmore lines")

    monkeypatch.setattr(module, "_require_kaleido", lambda: None)
    monkeypatch.setattr(module, "_figures", lambda _: {"loss": Figure()})
    with pytest.raises(RunError, match=r"PNG pictures need a browser, and kaleido says: Kaleido requires Google Chrome "
                                       r"to be installed.; install chromium, or take 'svg' or 'html'"):
        run.export(tmp_path, ["png"])


def test_the_command_line_tells_and_exports_one_run(run: Run, tmp_path: Path,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    from dplab.cli import main

    assert main(["runs", str(run.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == without_nan(run.summary())
    assert main(["runs", str(run.path), "--csv"]) == 0
    assert capsys.readouterr().out == to_csv(run.table())
    assert main(["export", str(run.path), "-o", str(tmp_path), "--formats", "csv, json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == [f"{tmp_path}/steps.csv", f"{tmp_path}/summary.json"]
    for arguments, said in (
            (["runs", "--csv"], "runs --csv is a line for each step of one run; name it: dplab runs RUN --csv"),
            (["runs", str(run.path), "--csv", "--json"], "standard output holds one of them; leave one out"),
            (["export", str(run.path), "--formats", "pdf"], "is not allowed; give some of json, csv, trace")):
        assert main(arguments) == 2
        assert said in capsys.readouterr().err
