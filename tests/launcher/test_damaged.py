"""Run directories whose files were cut, overwritten or written by another version: one sentence, others stand."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import rank_programs

import dplab
from dplab.errors import DplabError, RankFailed, RunError
from dplab.telemetry.rundir import ENDED, RunDirectory


class Explodes:
    """Unpickling it raises."""

    def __reduce__(self) -> Any:
        return os.stat, ("/nowhere at all",)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Directories of a run that finished and of one that failed."""
    root = tmp_path_factory.mktemp("whole")
    runs = [dplab.launch(rank_programs.record_a_little, world_size=2, root=root, detach=False, label="good"),
            dplab.launch(rank_programs.fail, world_size=2, kwargs={"how": "ValueError", "on": 1}, root=root,
                         detach=False)]
    runs[0].wait(60)
    with pytest.raises(RankFailed):
        runs[1].wait(60)
    return runs[0].path, runs[1].path


def copies(whole: tuple[Path, Path], root: Path) -> tuple[Path, Path]:
    for path in whole:
        shutil.copytree(path, root / path.name)
    return root / whole[0].name, root / whole[1].name


def edit_json(**values: Any) -> Callable[[Path], None]:
    return lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), **values})) and None


def text(content: str | bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content.encode() if isinstance(content, str) else content) and None


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


SPEC = {"function": "m:f", "world_size": 2}
DAMAGE: list[tuple[str, Callable[[Path], None], str]] = [
    ("exit.json", text("{}"), "exit.json is damaged: it does not say how the run ended"),
    ("exit.json", text("[1]"), "exit.json is damaged: it does not say how the run ended"),
    ("exit.json", text('{"state": "fini'), "exit.json is not JSON (Unterminated string"),
    ("exit.json", text(""), "exit.json is not JSON (Expecting value"),
    ("exit.json", text(b"\xff\xfe\x00"), "exit.json is not JSON ('utf-8' codec can't decode"),
    ("exit.json", text("[" * 100_000), "exit.json is not JSON ("),
    ("exit.json", edit_json(state="well"), "exit.json is damaged: it does not say how the run ended"),
    ("exit.json", edit_json(state=["finished"]), "exit.json is damaged"),
    ("exit.json", edit_json(first=7), "exit.json is damaged"),
    ("exit.json", edit_json(ranks=[{}]), "exit.json is damaged"),
    ("exit.json", edit_json(ranks=3), "exit.json is damaged"),
    ("exit.json", edit_json(collateral=[9]), "exit.json is damaged"),
    ("exit.json", folder, "exit.json cannot be read: Is a directory; only the run's owner may"),
    ("run.json", text(""), "run.json is not JSON (Expecting value"),
    ("run.json", text("3"), "is not a run directory: its run.json is not one of dplab's"),
    ("run.json", edit_json(spec=None), "run.json is damaged: its spec is not one ("),
    ("run.json", edit_json(spec={"function": "m:f"}), "run.json is damaged: its spec is not one ("),
    ("run.json", edit_json(spec={**SPEC, "world_size": "two"}), "its spec is not one (launch(world_size='two') is not"),
    ("run.json", edit_json(spec={**SPEC, "strategy": 3}), "its spec is not one (launch(strategy=3) is not allowed"),
    ("run.json", edit_json(created="now"), "run.json is damaged: schema, versions or created is missing"),
    ("run.json", edit_json(schema=None), "run.json is damaged: schema, versions or created is missing"),
    ("run.json", edit_json(schema=99, versions={"dplab": "9.9"}),
     "was written with schema 99, this dplab reads schema 1; read it with the dplab that wrote it (9.9)"),
    ("run.json", edit_json(schema=0, versions={"dplab": "0.0.1"}),
     "was written with schema 0, this dplab reads schema 1; read it with the dplab that wrote it (0.0.1)"),
]


@pytest.mark.parametrize(("name", "damage", "sentence"), DAMAGE, ids=[f"{name}-{i}" for i, (name, *_) in
                                                                      enumerate(DAMAGE)])
def test_a_damaged_run_is_told_and_the_others_stand(
        name: str, damage: Callable[[Path], None], sentence: str, whole: tuple[Path, Path], runs_folder: Path) -> None:
    path, other = copies(whole, runs_folder)
    damage(path / name)
    assert {run.id: run.state for run in dplab.runs()} == {path.name: "damaged", other.name: "failed"}
    run = next(run for run in dplab.runs() if run.id == path.name)
    assert run.failure is not None
    assert sentence in run.failure
    assert "\n" not in run.failure
    assert run.stopped_by is None
    assert run.failure in repr(run)
    assert "damaged" in run._repr_html_()
    with pytest.raises(RunError) as caught:
        run.wait()
    assert str(caught.value) == run.failure
    assert run.stop() == "damaged"
    assert "damaged" in ENDED  # whoever waits for an end stops waiting
    assert RunDirectory(path).state() == "damaged"


@pytest.mark.parametrize(("content", "sentence"), [
    (b"", "EOFError: Ran out of input"),
    (b"not a pickle", "UnpicklingError: "),
    (cloudpickle.dumps([1, 2])[:-3], "pickle data was truncated"),
    (cloudpickle.dumps(Explodes()), "FileNotFoundError: [Errno 2] No such file or directory: '/nowhere at all'"),
    (b"cno_such_module_at_all\nthing\n.", "ModuleNotFoundError: No module named 'no_such_module_at_all'"),
])
def test_a_result_that_cannot_be_read(content: bytes, sentence: str, whole: tuple[Path, Path],
                                      runs_folder: Path) -> None:
    path, _ = copies(whole, runs_folder)
    os.chmod(path, 0o700)
    (path / "rank-1" / "result.pkl").write_bytes(content)
    run = dplab.attach(path)
    assert run.state == "finished"  # it did; only what rank 1 returned is lost
    with pytest.raises(RunError) as caught:
        run.wait()
    told = str(caught.value)
    assert f"what rank 1 returned cannot be read from {path}/rank-1/result.pkl (" in told
    assert sentence in told
    assert told.endswith("make its classes importable here, or the file is damaged")
    assert "\n" not in told
    (path / "rank-1" / "result.pkl").unlink()
    with pytest.raises(RunError, match=r"rank-1/result\.pkl is gone: what rank 1 returned cannot be had any more"):
        run.wait()


@pytest.mark.parametrize("line", ["{", "[1,2,3,4,5,6]", '["step","train","0",1,2,{}]', '["step","train",0,1,2.5,{}]',
                                  '["step","train",0,1,2,[]]', '["step",null,0,1,2,{}]', "[" * 100_000])
def test_events_that_are_damaged_do_not_hide_the_run(line: str, whole: tuple[Path, Path], runs_folder: Path) -> None:
    path, _ = copies(whole, runs_folder)
    file = path / "rank-0" / "events.jsonl"
    good = file.stat().st_size
    file.write_text(file.read_text() + line + "\n")
    run = dplab.attach(path)
    assert f"events.jsonl is damaged behind byte {good}: b'" in repr(run)
    assert "finished" in repr(run)
    with pytest.raises(RunError, match="is not an event; the lines before it are good, cut the file there to read"):
        run.events()
    with pytest.raises(RunError, match="is not an event"):
        run.memory()
    assert run.wait() == [None, None]


@pytest.mark.parametrize(("name", "content"), [
    ("rank-1/error.json", "{}"), ("rank-1/error.json", "["), ("rank-1/error.json", "[1]")])
def test_a_failure_whose_reason_is_damaged(name: str, content: str, whole: tuple[Path, Path],
                                           runs_folder: Path) -> None:
    _, path = copies(whole, runs_folder)
    (path / name).write_text(content)
    run = dplab.attach(path)
    assert run.state == "failed"
    assert "error.json is" in repr(run)
    with pytest.raises(RunError, match=r"error\.json is (damaged: it tells no error|not JSON)"):
        run.wait()


def test_what_is_damaged_of_a_peer_does_not_hide_the_first_cause(whole: tuple[Path, Path], runs_folder: Path) -> None:
    _, path = copies(whole, runs_folder)
    (path / "rank-0" / "error.json").write_text("{}")
    with pytest.raises(RankFailed, match=r"boom in the third step[\s\S]*rank 0: its error.json is damaged"):
        dplab.attach(path).wait()
    for error in (path / "rank-0" / "error.json", path / "rank-1" / "error.json"):
        error.unlink()
    (path / "rank-1" / "state").write_bytes(b"x" * 4096)
    with pytest.raises(RankFailed, match="last seen at a place that its damaged state page does not tell"):
        dplab.attach(path).wait()


@pytest.mark.parametrize("name", ["pids.json", "starter.json"])
@pytest.mark.parametrize("content", ["{}", "[]", "7", '{"supervisor": [1], "ranks": []}', '["a", "b", "c"]'])
def test_processes_that_are_damaged(name: str, content: str, whole: tuple[Path, Path], runs_folder: Path) -> None:
    path, _ = copies(whole, runs_folder)
    (path / "exit.json").unlink()
    (path / "pids.json").unlink()
    (path / name).write_text(content)
    run = dplab.attach(path)
    assert run.state == "damaged"
    with pytest.raises(DplabError, match=rf"{name} is damaged: it names no process(es)?; look at what else is in"):
        run.wait()
    (path / name).unlink()  # the check for processes left behind reads it too


def test_any_file_in_control_asks_to_stop(whole: tuple[Path, Path], runs_folder: Path) -> None:
    path, _ = copies(whole, runs_folder)
    directory = RunDirectory(path)
    assert directory.stop_request() is None
    for content, grace in (("", 10.0), ("[]", 10.0), ('{"grace": "x"}', 10.0), ('{"grace": 2.5}', 2.5)):
        (path / "control" / "stop").write_text(content)
        assert directory.stop_request() == grace


def test_folders_that_hold_no_runs(runs_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (runs_folder / "notes").mkdir(parents=True)
    (runs_folder / "a file").touch()
    assert dplab.runs() == []
    for value, sentence in ((tmp_path / "f", f"{tmp_path}/f is a file, runs need a folder; set DPLAB_RUNS"),
                            (tmp_path / "f" / "g", f"{tmp_path}/f is a file, runs need a folder"),
                            ("~nobody-of-that-name/x", "-name/x names no home directory; set DPLAB_RUNS to a folder"),
                            ("x" * 300, "cannot be looked at (File name too long), runs need a folder")):
        (tmp_path / "f").touch()
        monkeypatch.setenv("DPLAB_RUNS", str(value))
        for call in (dplab.runs, lambda: dplab.attach("20"), lambda: dplab.launch(rank_programs.place)):
            with pytest.raises(dplab.DplabError) as caught:
                call()
            assert sentence in str(caught.value)
    monkeypatch.setenv("DPLAB_RUNS", str(runs_folder))

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(RunError, match="cannot be listed: Permission denied; set DPLAB_RUNS to a folder of yours"):
        dplab.runs()
    for name in ("x" * 300, "~nobody-of-that-name", "a\0b"):
        with pytest.raises(DplabError, match=r"no run's directory or id \(|cannot be listed"):
            dplab.attach(name)
