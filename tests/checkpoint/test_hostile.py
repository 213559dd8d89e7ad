"""Checkpoints that were damaged or made to do harm: refused in words, never run, never believed."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dplab
from dplab.checkpoint.reading import Stored
from dplab.errors import CheckpointError, UsageError
from tests.checkpoint.programs import odd, train, two_groups, wrap


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one process with some steps in it."""
    place = tmp_path_factory.mktemp("good") / "saved"
    from dplab.wire import threads

    def ranks() -> None:
        engine = wrap(odd(), "zero2", two_groups)
        train(engine, 0, 1, 2)
        engine.save(place)

    threads.run(ranks, 2)
    return place


def changed(good: Path, place: Path, change: Any) -> Path:
    """A copy whose metadata `change` has had in its hands."""
    shutil.copytree(good, place)
    with (good / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    change(metadata)
    (place / ".metadata").write_bytes(pickle.dumps(metadata))
    return place


def first(metadata: Any) -> Any:
    return next(index for index in metadata.storage_data if index.fqn == "model.up.weight")


def place_of(metadata: Any, **values: Any) -> None:
    index = first(metadata)
    metadata.storage_data[index] = dataclasses.replace(metadata.storage_data[index], **values)


def entry(metadata: Any, **values: Any) -> None:
    for name, value in values.items():
        setattr(metadata.state_dict_metadata["model.up.weight"], name, value)


def chunk(metadata: Any, **values: Any) -> None:
    for name, value in values.items():
        setattr(metadata.state_dict_metadata["model.up.weight"].chunks[0], name, value)


def test_the_good_one_is_good(good: Path) -> None:
    stored = Stored(good)
    assert stored.shape(("model", "up.weight")) == (7, 3)
    assert stored.tensor(("optim", "state", "scale", "step")) == 1


@pytest.mark.parametrize(("change", "said"), [
    (lambda m: place_of(m, relative_path="../../etc/passwd"), "in '../../etc/passwd', which is not a file of its own"),
    (lambda m: place_of(m, relative_path="/etc/passwd"), "which is not a file of its own folder"),
    (lambda m: place_of(m, relative_path="a\\b"), "which is not a file of its own folder"),
    (lambda m: place_of(m, relative_path=3), "in 3, which is not a file"),
    (lambda m: place_of(m, relative_path="__9_0.distcp"), "file __9_0.distcp is missing"),
    (lambda m: place_of(m, offset=-1), "is said to be"),
    (lambda m: place_of(m, offset=10**15), "the file is torn"),
    (lambda m: place_of(m, length=2**80), "the file is torn"),
    (lambda m: place_of(m, length=True), "is said to be"),
    (lambda m: place_of(m, transform_descriptors=["zstd"]), r"was written through \['zstd'\]"),
    (lambda m: m.storage_data.pop(first(m)), "says of no file that it holds 'model.up.weight'"),
    (lambda m: entry(m, size=torch.Size((2**50, 2**50))), "which no tensor has"),
    (lambda m: entry(m, size=torch.Size((70, 30))), "has 2100 elements, and its parts hold 21"),
    (lambda m: entry(m, size=(7, "3")), "a size that is no list of integers"),
    (lambda m: entry(m, chunks=None), "describes no value"),
    (lambda m: entry(m, properties=None), "describes no value"),
    (lambda m: chunk(m, offsets=torch.Size((-1, 0))), "lies outside|says of no file"),
    (lambda m: chunk(m, sizes=torch.Size((1, 2))), "parts hold"),
    (lambda m: setattr(m, "state_dict_metadata", [1]), "holds no tables"),
    (lambda m: setattr(m, "storage_data", None), "holds no tables"),
    (lambda m: m.planner_data.update({"model.up.weight": ("model", "..", "x")}), "has a path for 'model.up.weight'"),
    (lambda m: m.planner_data.update({"model.up.weight": ("model", "down.weight")}), "has a path for"),
    (lambda m: m.state_dict_metadata.update({"odd": 3}), "an entry 'odd' that describes no value"),
    (lambda m: m.storage_data.update({"odd": 3}), "has a place that is none"),
])
def test_metadata_that_lies_is_refused_in_words(change: Any, said: str, good: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=said) as caught:
        Stored(changed(good, tmp_path / "bad", change))
    assert str(caught.value).startswith(f"checkpoint {tmp_path / 'bad'} cannot be used: ")


class Harm:
    """Unpickling it leaves a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_a_metadata_file_that_would_run_code_runs_none(good: Path, tmp_path: Path) -> None:
    place = changed(good, tmp_path / "bad", lambda m: setattr(m, "version", Harm(tmp_path / "mark")))
    with pytest.raises(CheckpointError, match=r"its .metadata names posix.mkdir, which no checkpoint holds"):
        Stored(place)
    assert not (tmp_path / "mark").exists()


def rewritten(good: Path, place: Path, key: str, data: bytes) -> Path:
    """A copy in which `key` lies in a file of its own, with these bytes."""
    def change(metadata: Any) -> None:
        for index, info in list(metadata.storage_data.items()):
            if index.fqn == key:
                metadata.storage_data[index] = dataclasses.replace(info, relative_path="x.distcp", offset=0,
                                                                   length=len(data))

    changed(good, place, change)
    (place / "x.distcp").write_bytes(data)
    return place


def pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("path", [("model", "up.weight"), ("dplab", "general")])
def test_a_value_that_would_run_code_runs_none(path: tuple[str, ...], good: Path, tmp_path: Path) -> None:
    place = rewritten(good, tmp_path / "bad", ".".join(path), pickled(Harm(tmp_path / "mark")))
    with pytest.raises(CheckpointError, match=r"x.distcp does not hold '.*' in a form that is safe to load"):
        Stored(place).value(path)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("value", [torch.zeros(3, 7), torch.zeros(7, 3), torch.zeros((), dtype=torch.float64), [1],
                                   torch.zeros(1, dtype=torch.float64).expand(7000, 3000)])
def test_a_file_that_holds_another_tensor_than_said_is_refused(value: Any, good: Path, tmp_path: Path) -> None:
    place = rewritten(good, tmp_path / "bad", "model.up.weight", pickled(value))
    with pytest.raises(CheckpointError, match=r"x.distcp holds something else than the part of 'model.up.weight'"):
        Stored(place).tensor(("model", "up.weight"))


def load_alone(place: Path) -> None:
    from dplab.wire import threads

    threads.run(lambda: wrap(odd(), "zero2", two_groups).load(place), 1)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), count=st.integers(1, 8))
def test_bytes_that_changed_anywhere_are_refused_or_harmless(seed: int, count: int, good: Path,
                                                             tmp_path: Path) -> None:
    """Whatever bytes change in the metadata: an error of ours, or a checkpoint that is as good."""
    place, luck = tmp_path / str(seed), random.Random(seed)
    if not place.exists():
        shutil.copytree(good, place)
    data = bytearray((good / ".metadata").read_bytes())
    for _ in range(count):
        data[luck.randrange(len(data))] = luck.randrange(256)
    (place / ".metadata").write_bytes(bytes(data) if luck.random() < 0.7 else bytes(data[:luck.randrange(len(data))]))
    try:
        stored = Stored(place)
        for path in stored.paths:
            stored.value(path)
    except (CheckpointError, UsageError):
        pass
    shutil.rmtree(place)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_files_that_changed_anywhere_load_or_are_refused(seed: int, good: Path, tmp_path: Path) -> None:
    place, luck = tmp_path / str(seed), random.Random(seed)
    if not place.exists():
        shutil.copytree(good, place)
    file = luck.choice(sorted(place.glob("*.distcp")))
    data = bytearray(file.read_bytes())
    for _ in range(40):
        data[luck.randrange(len(data))] = luck.randrange(256)
    file.write_bytes(bytes(data))
    with contextlib.suppress(dplab.DplabError):
        load_alone(place)
    shutil.rmtree(place)
