"""What codecs owe is in checkpoints: a resumed run is the uninterrupted one to the bit, on the same ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import dplab
from dplab.wire import Quantised
from dplab.wire.quantised import Int8
from tests import worlds
from tests.worlds import Even, adamw, in_processes, in_threads, uneven_batches

State = dict[str, torch.Tensor]


def steps(engine: dplab.Engine, low: int, high: int) -> None:
    for batch in uneven_batches(20)[2 * low + engine.world.rank % 2:2 * high:2]:
        engine.backward(engine(*batch))
        engine.step(last=True)


def resumed(model: torch.nn.Module, strategy: str, place: Path, *, wait: bool = True, **kwargs: Any) -> list[State]:
    """Weights of an uninterrupted run of six steps; of one that was saved after three and loaded into another."""
    import copy

    whole = dplab.parallelize(copy.deepcopy(model), adamw, strategy, **kwargs)
    steps(whole, 0, 3)
    saved = whole.save(place, wait=wait)
    steps(whole, 3, 6)
    saved.wait()
    other = dplab.parallelize(copy.deepcopy(model), adamw, strategy, **kwargs)
    steps(other, 0, 1)          # what it owes after this is nobody's any more
    other.load(place)
    steps(other, 3, 6)
    return [whole.full_state_dict(), other.full_state_dict()]


def equal(one: State, other: State) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("strategy", ["ddp+wire=int8-ef", "zero1+wire=int8-ef+bf16", "ddp+wire=powersgd2",
                                      "zero1+wire=powersgd2+bucket_mb=1e-05+accum2"])
@pytest.mark.parametrize("wait", [True, False])
def test_a_resumed_run_owes_what_it_owed(strategy: str, wait: bool, tmp_path: Path,
                                         capfd: pytest.CaptureFixture[str]) -> None:
    model = worlds.build(Even, torch.float32)
    for whole, other in in_threads(2, resumed, model, strategy, tmp_path / "saved", wait=wait):
        assert equal(whole, other)
    assert "error feedback" not in capfd.readouterr().out


def test_on_real_ranks_too(tmp_path: Path) -> None:
    for whole, other in in_processes(2, resumed, worlds.build(Even, torch.float32), "ddp+wire=int8-ef",
                                     tmp_path / "saved"):
        assert equal(whole, other)


def test_a_codec_of_ones_own_is_kept_as_well(tmp_path: Path) -> None:
    class Halves(Quantised):
        def encode(self, rows: torch.Tensor) -> torch.Tensor:
            return rows.half().view(torch.uint8)

        def decode(self, payload: torch.Tensor, n: int) -> torch.Tensor:
            return payload.view(torch.float16).float()

    model = worlds.build(Even, torch.float32)
    for whole, other in in_threads(2, resumed, model, "ddp", tmp_path / "saved", codec=partial(Halves, feedback=True)):
        assert equal(whole, other)


def test_without_its_memory_a_resumed_run_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""
    monkeypatch.setattr(Int8, "remembers", False)
    for whole, other in in_threads(2, resumed, worlds.build(Even, torch.float32), "ddp+wire=int8-ef",
                                   tmp_path / "saved"):
        assert not equal(whole, other)


def saved_then_loaded(place: Path, strategy: str, *, load: bool) -> int:
    engine = dplab.parallelize(torch.nn.Linear(300, 2), adamw, strategy)
    if load:
        engine.load(place)
        return sum(0 if bucket.grads is None or bucket.grads.codec is None else bucket.grads.codec.held_bytes
                   for bucket in engine._buckets)
    for _ in range(2):
        engine.backward(engine(torch.full((1, 300), 0.3 + engine.world.rank)).square().sum())
        engine.step()
    engine.save(place)
    return 0


@pytest.mark.parametrize(("before", "after", "size", "said"), [
    ("ddp+wire=int8-ef", "ddp+wire=int8-ef", 3, "holds that of Int8 on 2 ranks with 1 bucket, and this is Int8 on 3 "
                                                "ranks with 1 bucket"),
    ("ddp", "ddp+wire=int8-ef", 2, "holds none, and this is Int8 on 2 ranks with 1 bucket"),
    ("ddp+wire=int8-ef", "zero1+wire=powersgd1", 2, "holds that of Int8 on 2 ranks with 1 bucket, and this is "
                                                    "PowerSgd1 on 2 ranks with 1 bucket")])
def test_under_other_ranks_or_another_codec_it_starts_at_zero_and_says_so(
        before: str, after: str, size: int, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "saved"
    in_threads(2, saved_then_loaded, place, before, load=False)
    capfd.readouterr()
    assert in_threads(size, saved_then_loaded, place, after, load=True) == [0] * size
    assert capfd.readouterr().out.splitlines() == [
        f"dplab: the codec's error feedback starts at zero: checkpoint {place} {said}"]


@pytest.mark.parametrize("strategy", ["ddp", "zero2+wire=int8"])
def test_what_remembers_nothing_says_nothing(strategy: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    in_threads(2, saved_then_loaded, tmp_path / "saved", "ddp+wire=int8-ef", load=False)
    in_threads(2, saved_then_loaded, tmp_path / "saved", strategy, load=True)
    assert "feedback" not in capfd.readouterr().out
