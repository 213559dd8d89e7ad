"""Launching: what ranks find around them, what travels, what is refused before anything starts."""

from __future__ import annotations

import functools
import json
import os
import socket
import stat
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import rank_programs

import dplab
from dplab.errors import RunError, UsageError
from dplab.launcher import reference
from dplab.launcher.starter import WARM
from dplab.telemetry.rundir import RunDirectory


@pytest.mark.parametrize("warm", [True, False])
def test_results_come_in_rank_order(warm: bool) -> None:
    run = dplab.launch(rank_programs.place, world_size=3, detach=False, warm=warm)
    assert run.wait(60) == [(0, 3), (1, 3), (2, 3)]
    assert run.state == "finished"
    assert run.failure is None


def test_returns_at_once_and_waits_no_longer_than_asked(tmp_path: Path) -> None:
    go_on = tmp_path / "go on"
    run = dplab.launch(rank_programs.wait_for, args=(str(go_on),), detach=False)
    assert run.state in ("starting", "running")
    with pytest.raises(TimeoutError, match=rf"run {run.id} is (starting|running) after 0 s; it goes on: wait again"):
        run.wait(timeout=0)
    go_on.touch()
    assert run.wait(60) == [0]


@pytest.mark.parametrize("warm", [True, False])
def test_surroundings_of_a_rank(warm: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("KEPT", "as it was")
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    run = dplab.launch(rank_programs.facts, world_size=2, strategy="zero2", backend="gloo", threads=2, detach=False,
                       env={"KEPT": "changed", "ADDED": "1"}, warm=warm)
    ranks = run.wait(60)
    assert dict(os.environ) == before
    for rank, facts in enumerate(ranks):
        environ = facts["environ"]
        wanted = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                  "DPLAB_RUN_DIR": str(run.path), "DPLAB_STRATEGY": "zero2", "DPLAB_BACKEND": "gloo",
                  "DPLAB_RENDEZVOUS": f"file://{run.path}/rendezvous", "KEPT": "changed", "ADDED": "1"}
        assert {name: environ.get(name) for name in wanted} == wanted
        assert "MASTER_PORT" not in environ
        assert (facts["cwd"], facts["argv"], facts["threads"]) == (str(tmp_path), ["rank_programs:facts"], 2)
        assert facts["path"] == [os.path.abspath(entry) for entry in sys.path]
        assert facts["stdin"] == ""
        assert not any("dplab" in name or name == "main" for name in facts["main"])
    for name in ("torch", "random"):
        assert ranks[0][name] != ranks[1][name]


@pytest.mark.parametrize("warm", [True, False])
def test_h40_a_kernel_that_has_used_cuda_and_runs_threads_launches(warm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    before, over = dict(os.environ), threading.Event()
    others = [threading.Thread(target=over.wait) for _ in range(3)]
    for thread in others:
        thread.start()
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda._initialized", True)
    try:
        run = dplab.launch(rank_programs.total, world_size=2, kwargs={"value": 3}, detach=False, warm=warm)
        assert run.wait(60) == [6, 6]
    finally:
        over.set()
        for thread in others:
            thread.join()
    assert dict(os.environ) == before


def test_forked_ranks_hold_no_descriptor_of_their_parents() -> None:
    [warm] = dplab.launch(rank_programs.facts, detach=False, warm=True).wait(60)
    [cold] = dplab.launch(rank_programs.facts, detach=False, warm=False).wait(60)
    assert len(warm["descriptors"]) <= len(cold["descriptors"])


def test_two_runs_of_one_warm_parent_draw_other_numbers() -> None:
    first, second = (dplab.launch(rank_programs.facts, detach=False, warm=True).wait(60)[0] for _ in range(2))
    assert first["torch"] != second["torch"]


def test_variables_that_libraries_read_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    dplab.launch(rank_programs.place, detach=False).wait(60)
    first, changed = WARM.pid, {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    run = dplab.launch(rank_programs.facts, detach=False, env=changed)
    [facts] = run.wait(60)
    assert facts["environ"].items() >= changed.items()
    starter = json.loads((run.path / "starter.json").read_text())
    assert starter[0] != first  # cold: no fork of a process that read the other value
    assert WARM.pid == first
    monkeypatch.setenv(*changed.popitem())
    run = dplab.launch(rank_programs.place, detach=False)
    assert run.wait(60) == [(0, 1)]
    assert WARM.pid not in (None, first)  # a new parent, for this launch and the next ones


def test_functions_by_name_closure_and_partial() -> None:
    factor = 3

    def scaled(value: int) -> int:
        return factor * value

    assert dplab.launch("rank_programs:total", world_size=2, kwargs={"value": 5}, detach=False).wait(60) == [10, 10]
    assert dplab.launch(scaled, args=(4,), detach=False).wait(60) == [12]
    assert dplab.launch(functools.partial(scaled, 5), detach=False).wait(60) == [15]
    assert dplab.launch(lambda: "short", detach=False).wait(60) == ["short"]


def test_an_edited_module_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for answer in ("first", "second and longer"):
        (tmp_path / "edited_module.py").write_text(f"def train():\n    return {answer!r}\n")
        assert dplab.launch("edited_module:train", detach=False, env={"PYTHONDONTWRITEBYTECODE": "1"},
                            warm=True).wait(60) == [answer]


def test_a_module_that_nobody_could_import_travels_by_value() -> None:
    module = type(sys)("made_by_hand")
    exec("def train():\n    return helper() + 1\ndef helper():\n    return 41\n", module.__dict__)
    sys.modules["made_by_hand"] = module
    try:
        assert dplab.launch(module.train, detach=False).wait(60) == [42]
    finally:
        del sys.modules["made_by_hand"]


def test_run_directory_is_private() -> None:
    run = dplab.launch(rank_programs.speak, world_size=2, detach=False, label="talk")
    run.wait(60)
    for path in [run.path, *run.path.rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        if path.name != "rendezvous":  # torch's own file, inside the private folder
            assert mode == (0o700 if path.is_dir() else 0o600), path


def test_logs() -> None:
    run = dplab.launch(rank_programs.speak, world_size=2, detach=False)
    run.wait(60)
    assert run.logs(1) == "to the output\nfrom below\nto the errors\n"
    assert run.logs() == "".join(f"--- rank {rank}\n{run.logs(rank)}{'' if rank else chr(10)}" for rank in (0, 1))
    with pytest.raises(UsageError, match=rf"logs\(rank=2\) is not allowed; run {run.id} has the ranks 0 to 1"):
        run.logs(2)


def test_h39_ten_parallel_launches_and_a_foreign_listener() -> None:
    with socket.socket() as foreign:
        foreign.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        foreign.bind(("127.0.0.1", 29500))
        foreign.listen()
        with ThreadPoolExecutor(10) as pool:
            runs = list(pool.map(lambda value: dplab.launch(
                rank_programs.total, world_size=2, kwargs={"value": value}, detach=False), range(10)))
        assert [run.wait(120) for run in runs] == [[2 * value] * 2 for value in range(10)]
    assert len({run.id for run in runs}) == 10


def refused(message: str, function: Any = rank_programs.place, **options: Any) -> None:
    with pytest.raises(UsageError) as caught:
        dplab.launch(function, **options)
    assert message in str(caught.value)


def test_bad_input_starts_nothing(runs_folder: Path) -> None:
    refused("launch(world_size=0) is not allowed; world_size is an integer >= 1", world_size=0)
    refused("launch(world_size=9000) is not allowed; this machine has", world_size=9000)
    refused("strategy 'zero9' is not known (did you mean", strategy="zero9")
    refused("has shares for 3 ranks, and the world has 1; give one for each", strategy="zero2+shares=1:2:3")
    refused("launch(backend='mpi') is not known; use one of gloo, nccl, shm", backend="mpi")
    refused("launch(detach=1) is not allowed; detach is True or False", detach=1)
    refused("launch(threads=0) is not allowed; threads is an integer >= 1", threads=0)
    refused("launch(env={'RANK': ...}) is not allowed; the launcher sets RANK", env={"RANK": "1"})
    refused("launch(env={'A': 1}) is not allowed; names and values are strings", env={"A": 1})
    refused("launch(args='abc') is not allowed; args is a tuple or list, write args=('abc',)", args="abc")
    refused("launch(kwargs=[1]) is not allowed; kwargs is a dict", kwargs=[1])
    refused("launch was given 3 (int), which cannot be called; give a function, or its name", 3)
    refused("launch was given 'train', which names no function; write it as 'package.module:function'", "train")
    refused("there is no module 'nowhere_at_all' on sys.path", "nowhere_at_all:train")
    refused("module 'nowhere_at_all.deep' cannot be found", "nowhere_at_all.deep:train")

    refused("launch was given 'rank_programs:totla', but module 'rank_programs' has no 'totla' (did you mean 'total'?)",
            "rank_programs:totla")
    refused("launch(warm='yes') is not allowed; warm is True, False or None", warm="yes")
    refused("launch(root=3) is not allowed; root is a folder's path, or None", root=3)
    refused("launch(root='') is not allowed", root="")
    refused("'#' and '?' would cut it short; set DPLAB_RUNS or root to another folder", root=runs_folder / "a#b" / "c?")
    refused("'\\n' would cut it short", root=str(runs_folder / "a\nb"))
    refused("'os:.path', which names no function", "os:.path")
    for label in ("", " ", "a\nb", "\x1b[31mred", "a/b", "..\\b", "x" * 81, 3):
        refused("is not allowed; a label is a string of 1 to 80 printable characters without / and \\, or None",
                label=label)

    async def later() -> None: ...

    refused("launch was given the async function later, which a rank cannot await; give a plain function", later)
    assert not runs_folder.exists()


def test_what_cannot_travel_is_named(runs_folder: Path) -> None:
    lock = threading.Lock()

    def helper() -> object:
        return lock

    def train() -> object:
        return helper()

    refused("'lock', which helper uses, (a _thread.lock) cannot be pickled", train)
    refused("make it inside the function, or pass what it is made from", train)
    refused("args[1]['deep'][0] (a _thread.lock) cannot be pickled", print, args=(1, {"deep": [lock]}))
    refused("kwargs['lock'] (a _thread.lock) cannot be pickled", dict, kwargs={"lock": lock})
    assert not runs_folder.exists()


def test_names_that_only_importing_could_tell_are_let_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    sources = {"star": "from os.path import *", "dynamic": "def __getattr__(name): ...",
               "computed": "globals()['train'] = print", "broken": "def train(:",
               "deep": "if True:\n    try:\n        import json as train\n    finally:\n        pass\n",
               "inner": "def make():\n    global train\n    train = 1\n", "annotated": "train: int = 3\n",
               "walrus": "[train := 3]\n", "klass": "class train: ..."}
    for name, source in sources.items():
        (tmp_path / f"names_{name}.py").write_text(source)
        assert reference.check(f"names_{name}:train") == f"names_{name}:train"
        assert f"names_{name}" not in sys.modules
    assert reference.check("math:sqrt") == "math:sqrt"


def test_a_current_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    refused("the current folder, in which the ranks would start, no longer exists; os.chdir to one that does")


def test_root_that_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    refused(f"{file} is a file, runs need a folder; set DPLAB_RUNS or root to one", root=file)


def test_root_where_nothing_may_be_written() -> None:
    with pytest.raises(RunError, match=r"run directory /proc/runs/\S+ cannot be made: .*; free space or allow writing"):
        dplab.launch(rank_programs.place, root="/proc/runs")


def test_kill_the_warm_parent_before_it_starts_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    WARM.close()
    run = dplab.launch(rank_programs.place, detach=False, warm=True)
    pid = WARM.pid
    assert pid is not None
    os.kill(pid, 9)  # it has only begun to import torch
    monkeypatch.setattr("dplab.telemetry.rundir._STARTING_SECONDS", 0.0)
    with pytest.raises(RunError, match=rf"the process that was to start it \(process {pid}\) ended before the run"):
        run.wait(20)
    assert RunDirectory(run.path).state() == "failed"
