"""Corpora: real text, the same everywhere, split once, and a clear word for what is not text."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch

from dplab.errors import UsageError
from dplab.workloads import corpora
from dplab.workloads.corpora import Corpus, TextDataset


def corpus_of(text: bytes) -> Corpus:
    return Corpus("a test", np.frombuffer(text, dtype=np.uint8))


def test_the_default_corpus_is_the_standard_librarys_text():
    train, held_out = corpora.load(), corpora.load(split="held-out")
    source = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_bytes()
    assert source in train.data.tobytes() + held_out.data.tobytes()
    assert 6e6 < len(train) < 16e6
    assert 0.01 < len(held_out) / len(train) < 0.15
    assert not (train.data == 0).any()


def test_the_default_corpus_is_the_same_in_every_process():
    code = ("import zlib; from dplab.workloads import corpora; "
            "print(zlib.crc32(corpora.load().data), zlib.crc32(corpora.load(split='held-out').data))")
    seen = {subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=cwd,
                           env={**os.environ, "PYTHONHASHSEED": seed}).stdout
            for cwd, seed in ((Path.cwd(), "1"), (Path("/"), "2"))}
    assert len(seen) == 1


def test_windows_and_their_targets():
    dataset = TextDataset(corpus_of(b"abcdefghij"), 3)
    assert len(dataset) == 3
    x, y = dataset[1]
    assert bytes(x.tolist()) == b"def"
    assert bytes(y.tolist()) == b"efg"
    assert x.dtype == y.dtype == torch.int64
    assert [bytes(x.tolist()) for x, _ in (dataset[i] for i in range(3))] == [b"abc", b"def", b"ghi"]
    with pytest.raises(IndexError):
        dataset[3]


def test_a_folder_is_read_in_order_without_hidden_and_binary_files(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_bytes(b"bbbb")
    (tmp_path / "sub" / "a.txt").write_bytes(b"aaaa")
    (tmp_path / ".hidden").write_bytes(b"hhhh")
    (tmp_path / "picture").write_bytes(b"\x00\x01")
    assert corpora.load(tmp_path).data.tobytes() == b"bbbbaaaa"


def test_a_file_is_split_by_length(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(bytes(range(1, 101)))
    train, held_out = corpora.load(path), corpora.load(path, split="held-out")
    assert train.data.tobytes() + held_out.data.tobytes() == path.read_bytes()
    assert len(held_out) == 5


def test_a_large_folder_is_split_by_file(tmp_path):
    for index in range(200):
        (tmp_path / f"{index:03}.txt").write_text(f"<{index:03}>")
    train, held_out = corpora.load(tmp_path).data.tobytes(), corpora.load(tmp_path, split="held-out").data.tobytes()
    assert all((f"<{index:03}>".encode() in train) != (f"<{index:03}>".encode() in held_out) for index in range(200))
    assert 0 < len(held_out) < len(train)


def test_digits():
    pytest.importorskip("sklearn")
    train, held_out = corpora.digits(), corpora.digits(split="held-out")
    assert len(train) + len(held_out) == 1797
    x, y = train[0]
    assert x.shape == (1, 8, 8)
    assert 0 <= x.min() <= x.max() <= 1
    assert y.dtype == torch.int64
    assert len(corpora.dataset(None, images=True)) == len(corpora.dataset("digits", images=True)) == len(train)


def test_digits_without_scikit_learn(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"scikit-learn, which is not installed; pip install 'dplab\[images\]'"):
        corpora.digits()


def test_an_image_model_refuses_text():
    with pytest.raises(UsageError, match=r"data 'x\.txt' is not possible for an image model; it trains on 'digits'"):
        corpora.dataset("x.txt", images=True)


def test_a_path_that_does_not_exist(tmp_path):
    with pytest.raises(UsageError, match=r"data path '.*nowhere' does not exist; give a file or a folder of text"):
        corpora.load(tmp_path / "nowhere")


def test_an_empty_file_and_an_empty_folder(tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    for name in ("empty", "folder"):
        with pytest.raises(UsageError, match=f"{name}' holds no text for the train split"):
            corpora.load(tmp_path / name)


def test_a_binary_file(tmp_path):
    (tmp_path / "binary").write_bytes(b"\x7fELF\x00\x00")
    with pytest.raises(UsageError, match=r"holds no text for the train split \(files with NUL bytes are not text\)"):
        corpora.load(tmp_path / "binary")


def test_a_device_is_not_a_corpus():
    with pytest.raises(UsageError, match="'/dev/zero' is neither a file nor a folder"):
        corpora.load("/dev/zero")


def test_an_unreadable_file(tmp_path, monkeypatch):
    path = tmp_path / "secret"
    path.write_text("text")

    def refuse(*_args, **_options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(corpora.np, "fromfile", refuse)      # root may read everything
    with pytest.raises(UsageError, match=r"secret' cannot be read \(Permission denied\)"):
        corpora.load(path)


def test_too_short_for_one_sequence():
    with pytest.raises(UsageError, match="a test has 3 bytes, too few for one sequence of 3 tokens"):
        TextDataset(corpus_of(b"abc"), 3)
    with pytest.raises(UsageError, match=r"TextDataset\(sequence=0\) is not allowed"):
        TextDataset(corpus_of(b"abc"), 0)


def test_an_unknown_split():
    for source in (corpora.load, corpora.digits):
        with pytest.raises(UsageError, match="split 'test' is not known; use one of train, held-out"):
            source(split="test")


@pytest.mark.parametrize(("path", "sentence"), [
    ("", "data path '' is empty; give a file or a folder of text, or leave it out for the standard library's source"),
    ("~nobody-of-that-name/x", "data path '~nobody-of-that-name/x' cannot be looked at (Could not determine home"),
    ("x" * 5000, "cannot be looked at (File name too long); give a file or a folder of text"),
    (__file__ + "/inside", "does not exist; give a file or a folder of text"),
])
def test_paths_that_cannot_be(path, sentence):
    with pytest.raises(UsageError) as caught:
        corpora.load(path)
    assert sentence in str(caught.value)
    assert len(str(caught.value)) < 300
