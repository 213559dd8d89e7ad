"""The weights as one .safetensors file: Hugging Face reads ours, we read theirs, and neither side holds it whole."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dplab
from dplab.errors import CheckpointError, UsageError
from tests.checkpoint.programs import listing, odd, same, train, two_groups, wrap
from tests.worlds import Even, build, in_threads

safetensors = pytest.importorskip("safetensors.torch")


def exported(place: Path, strategy: str, model: nn.Module, size: int = 3) -> dict[str, torch.Tensor]:
    def ranks() -> dict[str, torch.Tensor]:
        engine = wrap(model, strategy)
        engine.save(place)
        return engine.full_state_dict()

    return in_threads(size, ranks)[0]


def imported(place: Path, strategy: str, model: nn.Module, size: int = 3, **options: Any) -> dict[str, torch.Tensor]:
    def ranks() -> dict[str, torch.Tensor]:
        engine = wrap(model, strategy)
        engine.load(place, **options)
        engine.check_agreement()
        return engine.full_state_dict()

    return in_threads(size, ranks)[0]


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3", "zero2+bf16"])
def test_the_library_reads_the_plain_models_values(strategy: str, tmp_path: Path) -> None:
    values = exported(tmp_path / "new" / "model.safetensors", strategy, odd(torch.float32))
    found = safetensors.load_file(tmp_path / "new" / "model.safetensors")
    assert set(found) == set(values) - {"head.weight"}  # tied: under its first name
    assert all(torch.equal(found[name], values[name]) for name in found)
    assert listing(tmp_path / "new") == {"model.safetensors"}


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "zero2+bf16"])
def test_ours_reads_what_the_library_wrote(strategy: str, tmp_path: Path) -> None:
    theirs = odd(torch.float32)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(1)
        theirs.table.add_(3)
    safetensors.save_model(theirs, str(tmp_path / "theirs.safetensors"))
    assert same(imported(tmp_path / "theirs.safetensors", strategy, odd(torch.float32)), dict(theirs.state_dict()))


def gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(2)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=64,
                                                               n_positions=16, bos_token_id=0, eos_token_id=0))


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_a_hugging_face_model_goes_there_and_back(strategy: str, tmp_path: Path) -> None:
    model, ids = gpt2(), torch.arange(8)[None]
    values = exported(tmp_path / "model.safetensors", strategy, copy.deepcopy(model), size=2)
    model.config.save_pretrained(tmp_path)
    found, told = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert same(dict(found.state_dict()), values)
    assert torch.equal(found.eval()(ids).logits, model.eval()(ids).logits)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.mul_(2)
    found.save_pretrained(tmp_path / "theirs", max_shard_size="20kB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").is_file()
    assert same(imported(tmp_path / "theirs" / "model.safetensors.index.json", strategy, gpt2(), size=2),
                dict(found.state_dict()))


def said(kind: type[Exception], call: Any) -> str:
    def ranks() -> str:
        engine = wrap(build(Even), "zero3", two_groups)
        with pytest.raises(kind) as caught:
            call(engine)
        return str(caught.value)

    return in_threads(2, ranks)[1]


def test_refusals_are_one_sentence_on_every_rank(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    assert "there is no file" in said(CheckpointError, lambda e: e.load(file))
    file.write_bytes(b"\xff" * 64)
    assert "is no .safetensors file, or is torn" in said(CheckpointError, lambda e: e.load(file))
    safetensors.save_file({"norm.weight": torch.zeros(8), "odd": torch.zeros(1)}, file)
    told = said(UsageError, lambda e: e.load(file))
    assert "'norm.weight' has shape (8,) in the checkpoint and (7,) in the model" in told
    assert "not in the model: 'odd' (1,)" in told
    state = dict(build(Even).state_dict()) | {"norm.weight": torch.zeros(7, dtype=torch.int32)}
    safetensors.save_file(state, file)
    assert "'norm.weight' is I32" in said(UsageError, lambda e: e.load(file))
    assert "leave wait=False and loader out" in said(UsageError, lambda e: e.save(file, loader=e))
    assert "has the weights alone; leave loader out" in said(UsageError, lambda e: e.load(file, loader=e))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"norm.weight": "../model.safetensors"}}))
    assert "names '../model.safetensors', which is not a file beside" in said(CheckpointError, lambda e: e.load(index))
    index.write_text("[]")
    assert "is no index of .safetensors files" in said(CheckpointError, lambda e: e.load(index))
    assert "give a file name that ends in .safetensors" in said(UsageError, lambda e: e.save(index))


def test_without_the_library_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert "install it with pip install safetensors" in said(UsageError, lambda e: e.save(tmp_path / "a.safetensors"))


def test_a_write_that_fails_leaves_the_old_file_and_is_told_on_every_rank(tmp_path: Path,
                                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    from dplab.checkpoint.tensorfile import Export

    file = tmp_path / "model.safetensors"
    exported(file, "zero3", build(Even))
    before = file.read_bytes()

    def full(_self: Any, opened: Any, _tensors: Any) -> None:
        if opened is not None:  # rank 0 writes, the others only take part in the gathers
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Export, "_put_all", full)
    assert "No space left on device (on rank 0)" in said(CheckpointError, lambda e: e.save(file))
    assert file.read_bytes() == before
    assert listing(tmp_path) == {"model.safetensors"}


def test_training_goes_on_from_imported_weights(tmp_path: Path) -> None:
    exported(tmp_path / "a.safetensors", "ddp", build(Even, seed=8), size=1)

    def ranks(load: bool) -> dict[str, torch.Tensor]:
        engine = wrap(build(Even, seed=8) if not load else model, "zero3")
        if load:
            assert engine.load(tmp_path / "a.safetensors") == 0
        train(engine, 0, 2, 2)
        return engine.full_state_dict()

    model = build(Even, seed=4)
    assert same(in_threads(1, ranks, True)[0], in_threads(1, ranks, False)[0])


def test_public_names() -> None:
    assert dplab.CheckpointManager.__module__ == "dplab.checkpoint.manager"
