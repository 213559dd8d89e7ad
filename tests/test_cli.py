"""The command line as a shell sees it: output, exit status, one sentence an error."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from dplab import __version__
from dplab.cli import main, parser

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


def test_help_names_every_verb():
    text = parser().format_help()
    assert all(verb in text for verb in VERBS)


def test_estimate_prints_the_contracts_keys(capsys):
    status, out, err = said(capsys, "estimate", "--params", "7.5e9", "--world-size", "64", "--strategy", "zero2",
                            "--json")
    data = json.loads(out)
    assert (status, err) == (0, "")
    assert {"model_states_bytes", "activations_bytes", "total_bytes", "formula"} <= set(data)
    assert data["total_bytes"] == 7_500_000_000 * 2 + 7_500_000_000 * 14 // 64
    assert data["activations_bytes"] is None


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
    (["estimate", "--params", "1e9", "--world-size", "2", "--layers", "2"], "--hidden, --sequence is missing"),
    (["estimate", "--params", "1", "--world-size", "2", "--layers", "2", "--hidden", "8", "--sequence", "8",
      "--no-flash"], "--no-flash needs --heads"),
    (["estimate", "--params", "1e9", "--world-size", "2", "--fast"], "unrecognized arguments: --fast"),
    (["plan", "--model", "llama-7b"], "dplab plan is not implemented yet; dplab estimate predicts memory"),
    (["calibrate"], "dplab calibrate is not implemented yet"),
    (["trian"], "invalid choice: 'trian'"),
    ([], "the following arguments are required: VERB; see dplab --help"),
    (["train", "--strategy", "zero9"], "strategy 'zero9' is not known (did you mean"),
    (["train", "--strategy", "zero2+recompute"], "recompute=full is not implemented yet; leave it out"),
    (["train", "--world-size", "0"], "argument --world-size: '0' is not a whole number >= 1"),
    (["train", "--steps", "0"], "argument --steps: '0' is not a whole number >= 1"),
    (["train", "--model", "gtp"], "model 'gtp' is not known; use one of tiny-gpt, bench-gpt, mlp, cnn"),
    (["train", "--optimizer", "muon"], "optimizer 'muon' is not known; use one of adamw, adam, sgd"),
    (["train", "--data", "/nowhere"], "data path '/nowhere' does not exist; give a file or a folder of text"),
    (["train", "--data", os.devnull], "'/dev/null' is neither a file nor a folder"),
    (["compare", "ddp", "horovod"], "system 'horovod' is not known; use single, ddp, zero1, zero2, zero3"),
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
    with pytest.raises(SystemExit):
        main(["lab", "--no-browser", "--port", "8890", "--json"])
    assert json.loads(capsys.readouterr().out)["folder"] == str(resources.folder("notebooks"))
    (command,) = started
    assert command[1:3] == ["-m", "jupyterlab"]
    assert command[-1] == str(resources.folder("notebooks"))
    assert [word for word in command[3:-1] if word != "--allow-root"] == ["--no-browser", "--port", "8890"]


def test_lab_cannot_lay_into_a_folder_that_is_closed(capsys, monkeypatch, tmp_path):
    from dplab import resources

    source = tmp_path / "source"
    source.mkdir()
    (source / "01.ipynb").write_text("{}")
    monkeypatch.setattr(resources, "folder", lambda name: source)
    monkeypatch.setattr(resources.Path, "mkdir", lambda *_a, **_k: (_ for _ in ()).throw(PermissionError(13, "closed")))
    monkeypatch.chdir(tmp_path)
    status, _, err = said(capsys, "lab", "--lay-only")
    assert status == 2
    assert "notebooks cannot be laid into" in err
    assert "(closed); run dplab lab from a folder that you may write" in err
