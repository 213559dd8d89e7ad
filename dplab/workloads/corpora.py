"""Real data without a download: the standard library's own source text, any text of yours, bundled digits.

Bytes are the tokens, so every file is text and the vocabulary is 256. Nothing is cached: reading the default
corpus (about 10 MB in 500 files) takes a fraction of a second. Text is read without torch, so that a command
line can refuse a path at once.
"""

from __future__ import annotations

import importlib.util
import sysconfig
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
import numpy.typing as npt

from dplab.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

_NOT_EVERYWHERE = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "idle_test", "tkinter",
                   "turtledemo", "lib2to3", "ensurepip", "distutils"}
"""Parts of the standard library that some systems leave out or change; without them the text is the same everywhere."""

Bytes = npt.NDArray[np.uint8]
SEQUENCE = 128
"""Tokens of a window, where nobody says otherwise."""
SPLITS = ("train", "held-out")
_HELD_OUT_OF = 20


@dataclass(frozen=True)
class Corpus:
    """Text as a flat array of bytes."""

    name: str
    data: Bytes = field(repr=False)

    def __len__(self) -> int:
        return len(self.data)


class Data(Protocol):
    """A map-style dataset of (x, y) tensors, as torch.utils.data takes it."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]: ...


class TextDataset:
    """A corpus as windows of `sequence` tokens and the same windows one token later, both int64 (sequence,).

    Windows do not overlap; what is left at the end is dropped. The bytes stay one shared uint8 array.
    """

    def __init__(self, corpus: Corpus, sequence: int) -> None:
        if sequence < 1:
            raise UsageError(f"TextDataset(sequence={sequence}) is not allowed; sequence is a number of tokens >= 1")
        if len(corpus) <= sequence:
            raise UsageError(f"{corpus.name} has {len(corpus)} bytes, too few for one sequence of {sequence} tokens "
                             f"and its target; give more text or a shorter sequence")
        self.corpus, self.sequence = corpus, sequence

    def __len__(self) -> int:
        return (len(self.corpus) - 1) // self.sequence

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        import torch

        start = index * self.sequence
        window = torch.from_numpy(self.corpus.data[start:start + self.sequence + 1].astype(np.int64))
        return window[:-1], window[1:]


def load(path: str | Path | None = None, *, split: str = "train") -> Corpus:
    """The text of a file or of every text file below a folder; the standard library's source without a path.

    The default corpus and large folders are split by file, one file and small folders by length; a twentieth is
    held out.
    Raises UsageError for a path that does not exist, cannot be read or holds no text.
    """
    if split not in SPLITS:
        raise UsageError(f"split {split!r} is not known; use one of {', '.join(SPLITS)}")
    if path is None:
        return _read(_standard_library(), Path(sysconfig.get_path("stdlib")), "the standard library's source", split)
    root = _existing(path)
    if root.is_dir():
        files = sorted(found for found in root.rglob("*") if found.is_file() and not _is_hidden(found, root))
        return _read(files, root, f"folder {str(path)!r}", split)
    if not root.is_file():
        raise UsageError(f"data path {str(path)!r} is neither a file nor a folder; give a file or a folder of text")
    return _read([root], root.parent, f"file {str(path)!r}", split)


def dataset(path: str | Path | None, *, images: bool, sequence: int = SEQUENCE, split: str = "train") -> Data:
    """What a workload trains on: text windows of `sequence` tokens, or for an image model the digits."""
    if not images:
        return TextDataset(load(path, split=split), sequence)
    require_digits(path)
    return digits(split=split)


def require_digits(path: str | Path | None) -> None:
    """UsageError where an image model cannot train on `path`, which may be left out or 'digits'; without torch."""
    if path not in (None, "digits"):
        raise UsageError(f"data {str(path)!r} is not possible for an image model; it trains on 'digits'")
    if importlib.util.find_spec("sklearn") is None:
        raise UsageError("the digits are bundled with scikit-learn, which is not installed; "
                         "pip install 'dplab[images]'")


def digits(*, split: str = "train") -> Data:
    """scikit-learn's bundled handwritten digits: images (1, 8, 8) in [0, 1] and their class, one in twenty held out.

    Raises UsageError where scikit-learn is not installed.
    """
    if split not in SPLITS:
        raise UsageError(f"split {split!r} is not known; use one of {', '.join(SPLITS)}")
    require_digits(None)
    import torch
    from sklearn.datasets import load_digits
    from torch.utils.data import TensorDataset

    images, classes = load_digits(return_X_y=True)
    held_out = np.arange(len(classes)) % _HELD_OUT_OF == 0
    chosen = held_out if split == "held-out" else ~held_out
    x = torch.from_numpy(images[chosen].astype(np.float32) / 16).view(-1, 1, 8, 8)
    return cast(Data, TensorDataset(x, torch.from_numpy(classes[chosen].astype(np.int64))))


def _existing(path: str | Path) -> Path:
    advice = "give a file or a folder of text"
    if not str(path):
        raise UsageError(f"data path '' is empty; {advice}, or leave it out for the standard library's source")
    try:
        root = Path(path).expanduser()
        if not root.exists():
            raise UsageError(f"data path {str(path)!r} does not exist; {advice}")
    except (OSError, RuntimeError) as error:      # a name too long, a folder that is closed, an unknown user's home
        raise UsageError(f"data path {str(path)[:80]!r} cannot be looked at "
                         f"({getattr(error, 'strerror', None) or error}); {advice}") from error
    return root


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    return sorted(path for path in root.rglob("*.py")
                  if not any(part in _NOT_EVERYWHERE or part.startswith(("config-", "_sysconfigdata", "sitecustomize"))
                             for part in path.relative_to(root).parts))


def _read(files: list[Path], root: Path, name: str, split: str) -> Corpus:
    """One in twenty files, chosen by name, is held out; where that leaves a side empty, the end of the text is."""
    held_out = {path for path in files if zlib.crc32(path.relative_to(root).as_posix().encode()) % _HELD_OUT_OF == 0}
    by_file = 0 < len(held_out) < len(files)
    chosen = [path for path in files if not by_file or (path in held_out) == (split == "held-out")]
    parts = [data for data in map(_bytes_of, chosen) if data is not None]
    data = np.concatenate(parts) if parts else np.empty(0, np.uint8)
    if not by_file:
        cut = len(data) - len(data) // _HELD_OUT_OF
        data = data[:cut] if split == "train" else data[cut:]
    if not len(data):
        raise UsageError(f"{name} holds no text for the {split} split (files with NUL bytes are not text); "
                         f"give a file or a folder of text")
    return Corpus(name, data)


def _bytes_of(path: Path) -> Bytes | None:
    """A file's bytes, None for a binary file."""
    try:
        data = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise UsageError(f"data file {str(path)!r} cannot be read ({error.strerror}); "
                         f"give a file or a folder of text that you may read") from error
    return None if (data[:8192] == 0).any() else data


def _is_hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)
