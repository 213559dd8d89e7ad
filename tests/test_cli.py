"""The command line as a shell sees it: output, exit status, one sentence an error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import dplab
from dplab import __version__
from dplab.cli import main, parser
from dplab.commands.base import without_nan
from dplab.commands.lab import QUIET

ROOT = Path(__file__).parent.parent
VERBS = ("lab", "train", "compare", "estimate", "explain", "runs", "attach", "trace", "doctor", "plan", "calibrate")


def said(capsys, *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    out, err = capsys.readouterr()
    return status, out, err


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"dplab {__version__}\n"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example_and_json(verb, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([verb, "--help"])
    out = capsys.readouterr().out
    assert "example:\n  dplab " in out
    assert "--json" in out


@pytest.mark.parametrize("verb", ["train", "compare"])
def test_help_says_what_image_models_need(verb, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([verb, "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("on digits") == said.count("pip install 'dplab[images]'") == 2


def test_no_gpu_for_nccl(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    status, out, err = said(capsys, "train", "--backend", "nccl")
    assert (status, out) == (2, "")
    assert err == ("dplab: --backend nccl needs one GPU a rank, and torch finds 1 GPU for 2 ranks; "
                   "use --backend gloo, or fewer ranks\n")


def test_the_package_says_how_it_is_used_and_names_its_errors():
    assert all(word in dplab.__doc__ for word in ("dplab.parallelize(", "dplab.launch(", "dplab.explain("))
    for name in ("UsageError", "RunError", "RunFailed", "StateError", "WireError", "RankFailed", "DplabError"):
        assert name in dir(dplab)
        assert issubclass(getattr(dplab, name), dplab.DplabError)


def test_help_names_every_verb():
    text = parser().format_help()
    assert all(verb in text for verb in VERBS)


def test_without_a_verb_the_help_is_printed(capsys):
    status, out, err = said(capsys)
    assert (status, err) == (0, "")
    assert out == parser().format_help().rstrip() + "\n"


def test_estimate_prints_the_contracts_keys(capsys):
    status, out, err = said(capsys, "estimate", "--params", "7.5e9", "--world-size", "64", "--strategy", "zero2",
                            "--json")
    data = json.loads(out)
    assert (status, err) == (0, "")
    assert {"model_states_bytes", "activations_bytes", "total_bytes", "formula"} <= set(data)
    assert data["total_bytes"] == 7_500_000_000 * 2 + 7_500_000_000 * 14 // 64
    assert data["activations_bytes"] is None


@pytest.mark.parametrize(("text", "number"), [("7.5B", 7.5e9), ("350m", 350e6), ("10K", 1e4), ("7.5e9", 7.5e9)])
def test_parameters_may_have_a_suffix(text, number, capsys):
    assert json.loads(said(capsys, "explain", "ddp", "--params", text, "--json")[1])["params"] == number


def test_estimate_in_words(capsys):
    status, out, _ = said(capsys, "estimate", "--params", "1e9", "--world-size", "8", "--layers", "24", "--hidden",
                          "2048", "--sequence", "1024", "--vocabulary", "50304", "--heads", "16", "--no-flash")
    assert status == 0
    assert "GB (1e9)" in out
    assert "activations" in out
    assert "5 x 16 x 1024 / 2048" in out


def test_explain(capsys):
    status, out, _ = said(capsys, "explain", "zero3", "--params", "1e6", "--world-size", "4")
    assert status == 0
    assert "all-gather, free" in out
    data = json.loads(said(capsys, "explain", "zero3", "--json")[1])
    assert data["roles"]["params"] == "sharded"


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["estimate", "--params", "x", "--world-size", "2"], "argument --params: 'x' is not a number; see dplab estimate"),
    (["estimate", "--params", "-1", "--world-size", "2"], "'-1' is not a number above 0"),
    (["estimate", "--params", "nan", "--world-size", "2"], "'nan' is not a finite number"),
    (["estimate", "--params", "1e9", "--world-size", "0"], "'0' is not a whole number >= 1"),
    (["estimate", "--params", "1e9"], "the following arguments are required: --world-size; see dplab estimate --help"),
    (["estimate", "--params", "1e9", "--world-size", "2", "--strategy", "zero4"], "strategy 'zero4' is not known"),
    (["estimate", "--params", "1e9", "--world-size", "2", "--layers", "2"], "--hidden, --sequence are missing"),
    (["estimate", "--params", "7.5", "--world-size", "2"],
     "argument --params: '7.5' is below 1000 parameters; write 7.5e9 or 7.5B for 7.5 billion"),
    (["estimate", "--params", "B", "--world-size", "2"], "argument --params: 'B' is not a number"),
    (["explain", "torch:ddp"], "'torch:ddp' is another system and no strategy of dplab; dplab compare ddp torch:ddp"),
    (["estimate", "--params", "1e9", "--world-size", "2", "--strategy", "deepspeed:2"], "'deepspeed:2' is another sys"),
    (["train", "--strategy", "torch:fsdp2+bf16"], "dplab compare ddp torch:fsdp2 measures it beside them, by itself"),
    (["train", "--strategy", "torch:fsdp2"], "'torch:fsdp2' is another system and no strategy of dplab"),
    (["estimate", "--params", "1e9", "--world-size", "2", "--layers", "2", "--hidden", "8", "--sequence", "8",
      "--no-flash"], "--no-flash needs --heads"),
    (["estimate", "--params", "1e9", "--world-size", "2", "--layers", "2", "--hidden", "8"], "--sequence is missing"),
    (["estimate", "--params", "1e9", "--world-size", "2", "--heads", "4"], "about activations, which need --layers"),
    (["estimate", "--params", "1e300", "--world-size", "2"], "'1e300' is too large; give a number up to 1e+24"),
    (["estimate", "--params", "1e9", "--world-size", "2", "--fast"],
     "unrecognized arguments: --fast; see dplab estimate --help"),
    (["--json", "runs"], "unrecognized arguments: --json; see dplab runs --help (--json stands after the verb)"),
    (["runs", "one", "extra"], "unrecognized arguments: extra; see dplab runs --help"),
    (["doctor", "--seeds", "2"], "--seeds is the number of delayed runs of a race hunt, or of faults of a drill; give "
                               "--races or --drill too"),
    (["lab", "--copy-only", "here"], "lab --copy-only copies the notebooks into the current folder; leave here out"),
    (["calibrate", "--show", "--quick"], "--show measures nothing; leave --quick and --backend out"),
    (["calibrate", "--backend", "nccl"], "argument --backend: invalid choice: 'nccl'"),
    (["trian"], "invalid choice: 'trian'"),
    (["--fast"], "unrecognized arguments: --fast; see dplab --help"),
    (["train", "--strategy", "zero9"], "strategy 'zero9' is not known (did you mean"),
    (["train", "--strategy", "zero2+shares=1:2:3"], "has shares for 3 ranks, and the world has 2; give one for each"),
    (["train", "--world-size", "0"], "argument --world-size: '0' is not a whole number >= 1"),
    (["train", "--steps", "0"], "argument --steps: '0' is not a whole number >= 1"),
    (["train", "--steps", "1e30"], "argument --steps: '1e30' is too large; give a whole number up to 1e+12"),
    (["train", "--lr", "1e300"], "argument --lr: '1e300' is too large for a learning rate; give one up to 1e6"),
    (["train", "--lr", "-1"], "argument --lr: '-1' is not a number above 0"),
    (["train", "--seed", "9" * 30], "is not a whole number from 0 to 2^63 - 1"),
    (["train", "--seed", "9" * 5000], "is not a whole number from 0 to 2^63 - 1"),
    (["train", "--seed", "-5"], "argument --seed: '-5' is not a whole number from 0 to 2^63 - 1"),
    (["train", "--seed", "x"], "argument --seed: 'x' is not a whole number"),
    (["train", "--hidden", "0"], "unrecognized arguments: --hidden 0; see dplab train --help"),
    (["train", "--backend", "mpi"], "argument --backend: invalid choice: 'mpi' (choose from"),
    (["train", "--label", "a\nb"], "a label is a string of 1 to 80 printable characters without / and"),
    (["train", "--strategy", "zero2+accum2+accum3"], "gives accumulate twice, by 'accum2' and by 'accum3'"),
    (["train", "--data", ""], "data path '' is empty; give a file or a folder of text"),
    (["train", "--data", "~nobody-of-that-name"], "cannot be looked at"),
    (["train", "--data", "elsewhere", "--model", "mlp"], "data 'elsewhere' is not possible for an image model"),
    (["train", "--world-size", "1e9"], "--world-size 1000000000 is not allowed; this machine has"),
    (["train", "--backend", "nccl", "--world-size", "500"], "--world-size 500 is not allowed"),
    (["compare", "ddp", "--lr", "inf"], "argument --lr: 'inf' is not a finite number"),
    (["train", "--model", "gtp"], "model 'gtp' is not known; use one of tiny-gpt, bench-gpt, paced, mlp, cnn"),
    (["train", "--optimizer", "muon"], "optimizer 'muon' is not known; use one of adamw, adam, sgd"),
    (["train", "--data", "/nowhere"], "data path '/nowhere' does not exist; give a file or a folder of text"),
    (["train", "--data", os.devnull], "'/dev/null' is neither a file nor a folder"),
    (["compare", "ddp", "horovod"], "system 'horovod' is not known; use single, ddp, zero1, zero2, zero3"),
    (["compare", "torch:ddp@mpi"], "system 'torch:ddp@mpi': backend 'mpi' is not known; use one of nccl, gloo, shm"),
    (["compare", "ddp", "ddp"], "system 'ddp' is given twice; name each system once"),
    (["compare", "zero2+accum4"], "leave accum4 out"),
    (["compare", "zero2", "--data", "/nowhere"], "data path '/nowhere' does not exist"),
])
def test_bad_usage_is_one_sentence_and_status_2(arguments, sentence, capsys):
    status, out, err = said(capsys, *arguments)
    assert status == 2
    assert out == ""
    assert err.startswith("dplab: ")
    assert sentence in err
    assert err.count("\n") == 1
    assert "Traceback" not in err


@pytest.mark.parametrize(("runs", "sentence"), [
    ("{file}", "{file} is a file, runs need a folder; set DPLAB_RUNS or root to one"),
    ("{file}/deeper", "{file} is a file, runs need a folder"),
    ("~nobody-of-that-name", "~nobody-of-that-name names no home directory; set DPLAB_RUNS to a folder"),
])
@pytest.mark.parametrize("verb", [["train", "--steps", "1"], ["compare", "ddp", "--steps", "1"], ["runs"],
                                  ["attach", "2026"], ["doctor"]])
def test_a_folder_of_runs_that_is_none(verb, runs, sentence, capsys, monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("DPLAB_RUNS", runs.format(file=file))
    status, out, err = said(capsys, *verb)
    assert (status, out) == (2, "")
    assert sentence.format(file=file) in err
    assert err.startswith("dplab: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("verb", ["train", "compare"])
def test_a_folder_in_which_nothing_can_be_written(verb, capsys, monkeypatch):
    monkeypatch.setenv("DPLAB_RUNS", "/proc/runs")
    status, out, err = said(capsys, verb, "--steps", "1")
    assert (status, out) == (2, "")
    assert "run directory /proc/runs/" in err
    assert "free space or allow writing there, or set DPLAB_RUNS to another folder" in err


def test_an_answer_that_cannot_be_written():
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    command = f"{sys.executable} -m dplab explain zero3 > /dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "dplab: the answer cannot be written to standard output: No space left on device\n"


def test_an_output_that_holds_ascii_only(tmp_path):
    folder = tmp_path / "läufe"
    done = subprocess.run([sys.executable, "-m", "dplab", "runs"], capture_output=True, check=False,
                          env={**os.environ, "PYTHONIOENCODING": "ascii", "DPLAB_RUNS": str(folder)})
    assert done.returncode == 0
    assert b"no runs in " in done.stdout
    assert b"/l\\xe4ufe yet" in done.stdout


def test_a_current_folder_that_is_gone(tmp_path):
    command = f"mkdir {tmp_path}/gone; cd {tmp_path}/gone; rmdir ../gone; {sys.executable} -m dplab runs"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 2
    assert done.stderr.endswith("dplab: the current folder no longer exists; change to one that does\n")
    assert "Traceback" not in done.stderr


def test_json_has_no_nan():
    assert without_nan({"a": [float("nan"), 1.5, (float("inf"),)], "b": None, "c": "nan"}) == {
        "a": [None, 1.5, [None]], "b": None, "c": "nan"}


def test_an_empty_corpus(tmp_path, capsys):
    (tmp_path / "empty.txt").touch()
    status, _, err = said(capsys, "train", "--data", str(tmp_path / "empty.txt"))
    assert status == 2
    assert "holds no text" in err


def test_a_reader_that_leaves_early_is_no_error():
    command = f"{sys.executable} -m dplab explain zero3 | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert "Error" not in done.stderr


def test_lab_without_jupyterlab_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    status, _, err = said(capsys, "lab", "--no-browser")
    assert status == 2
    assert err == "dplab: JupyterLab is not installed; pip install 'dplab[lab]', then dplab lab again\n"


def test_lab_becomes_jupyterlab_on_the_notebooks_and_passes_the_rest_on(capsys, monkeypatch):
    from dplab import resources

    started = []

    def become(program, command):
        started.append(command)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execv", become)
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", "/mine")
    with pytest.raises(SystemExit):
        main(["lab", "--no-browser", "--port", "8890", "--json"])
    assert os.environ["JUPYTER_CONFIG_PATH"] == f"{resources.folder('data') / 'jupyter'}{os.pathsep}/mine"
    assert json.loads(capsys.readouterr().out)["folder"] == str(resources.folder("notebooks"))
    (command,) = started
    assert command[1:3] == ["-m", "jupyterlab"]
    assert command[-1] == str(resources.folder("notebooks"))
    assert [word for word in command[3:-1] if word != "--allow-root"] == [
        *QUIET, "--no-browser", "--port", "8890"]


def test_jupyterlab_does_not_ask_about_news():
    """The option is one that this JupyterLab knows: its trait takes None."""
    from jupyterlab.labapp import LabApp

    (option,) = QUIET
    name, _, value = option.removeprefix("--LabApp.").partition("=")
    assert name in LabApp.class_trait_names(config=True)
    trait = LabApp.class_traits()[name]
    assert trait.from_string(value) is None
    assert trait.allow_none


def test_lab_cannot_copy_into_a_folder_that_is_closed(capsys, monkeypatch, tmp_path):
    from dplab import resources

    source = tmp_path / "source"
    source.mkdir()
    (source / "01.ipynb").write_text("{}")
    monkeypatch.setattr(resources, "folder", lambda name: source)
    monkeypatch.setattr(resources.Path, "mkdir", lambda *_a, **_k: (_ for _ in ()).throw(PermissionError(13, "closed")))
    monkeypatch.chdir(tmp_path)
    status, _, err = said(capsys, "lab", "--copy-only")
    assert status == 2
    assert "notebooks cannot be copied into" in err
    assert "(01.ipynb: closed); run dplab lab from a folder that you may write" in err


def test_lab_meets_a_folder_where_a_notebook_should_lie(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "01-quickstart.ipynb").mkdir()
    status, out, err = said(capsys, "lab", "--lay-only")
    assert (status, out) == (2, "")
    assert "notebooks cannot be copied into" in err
    assert "(01-quickstart.ipynb: Is a directory); run dplab lab from a folder that you may write" in err
