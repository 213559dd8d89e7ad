"""Offloading to the host: the same bits as without, on a link whose copies happen as late as they may."""

from __future__ import annotations

import copy
import itertools
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import dplab
from dplab.core import home, host
from dplab.core.host import Copy
from dplab.errors import UsageError
from tests import worlds
from tests.worlds import Even, Uneven, in_processes, in_threads, uneven_batches

_DRAWING = threading.Lock()
OFFLOADED = ["zero1+offload=optimizer", "zero2+offload=optimizer", "zero3+offload=optimizer", "zero3+offload=all"]


class LateCopy(Copy):
    """Happens when somebody waits for it, on either side; what is to be overwritten reads NaN until then."""

    def __init__(self, source: torch.Tensor, into: torch.Tensor) -> None:
        assert (source.shape, source.dtype) == (into.shape, into.dtype)
        assert source.untyped_storage().data_ptr() != into.untyped_storage().data_ptr()
        self._ends: tuple[torch.Tensor, torch.Tensor] | None = (source, into)
        into.fill_(float("nan") if into.is_floating_point() else 0)

    def wait(self) -> None:
        if self._ends is not None:
            (source, into), self._ends = self._ends, None
            into.copy_(source)

    order = wait


class LateLink:
    """A link that tells a missing wait by wrong numbers, and counts what goes over it."""

    def __init__(self) -> None:
        self.sent = {"down": 0, "up": 0}
        self.pinned = 0

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self.pinned += numel * dtype.itemsize
        return torch.full((numel,), 77, dtype=dtype)

    def down(self, source: torch.Tensor, into: torch.Tensor) -> Copy:
        return self._issue("down", source, into)

    def up(self, source: torch.Tensor, into: torch.Tensor) -> Copy:
        return self._issue("up", source, into)

    def ahead(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _issue(self, way: str, source: torch.Tensor, into: torch.Tensor) -> Copy:
        self.sent[way] += source.numel() * source.element_size()
        return LateCopy(source, into)


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> list[LateLink]:
    """The CPU counts as a device with a host of its own; the links that were made."""
    made: list[LateLink] = []

    def link_to(device: torch.device) -> LateLink:
        made.append(LateLink())
        return made[-1]

    monkeypatch.setattr(home, "link_to", link_to)
    return made


def fresh(kind: type[nn.Module] = Even, seed: int = 3) -> nn.Module:
    """Threads share torch's generator: whoever makes a model has it for the while."""
    with _DRAWING:
        return worlds.build(kind, torch.float32, seed)


def without(strategy: str) -> str:
    return "+".join(token for token in strategy.split("+") if not token.startswith("offload="))


def same_bits(ours: list[dict[str, torch.Tensor]], theirs: list[dict[str, torch.Tensor]]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for name, value in mine.items():
            assert value.dtype == other[name].dtype, name
            assert torch.equal(value, other[name]), name


def run(strategy: str, size: int) -> list[dict[str, torch.Tensor]]:
    window = dplab.Strategy.parse(strategy).accumulate
    return in_threads(size, worlds.train, fresh(Uneven), uneven_batches(3 * size * window), strategy)


@pytest.mark.parametrize(("size", "more"), [
    # autocast keeps its casts for all threads, so that only one rank of them computes the same twice
    (1, ""), (1, "+amp-bf16"), (1, "+bf16+accum2+clip_grad_norm=0.1"), (3, "+clip_grad_norm=0.1"),
    (3, "+bf16+accum2+bucket_mb=1e-05"),
    *((2, more) for more in ("", "+bf16", "+bf16+accum3", "+accum2+clip_grad_norm=0.1",
                             "+accum3+accumulate_mode=window",
                             "+accum2+accumulate_mode=micro_batch", "+bucket_mb=1e-05", "+prefetch=false+reshard=false",
                             "+recompute", "+bf16+wire=int8"))])
@pytest.mark.parametrize("strategy", OFFLOADED)
def test_the_same_bits_as_without(strategy: str, size: int, more: str, links: list[LateLink]) -> None:
    same_bits(run(strategy + more, size), run(without(strategy + more), size))
    assert len(links) == size
    assert all(link.pinned and link.sent["down"] and link.sent["up"] for link in links)


@pytest.mark.parametrize("backwards", [3, 2])
@pytest.mark.parametrize("strategy", OFFLOADED)
def test_micro_batches_of_a_hybrid_meet_on_the_host(strategy: str, backwards: int, links: list[LateLink]) -> None:
    """Also those of a window that ends early."""
    model, batches = fresh(Uneven), uneven_batches(4 * backwards)

    def body(strategy: str) -> dict[str, torch.Tensor]:
        engine = dplab.parallelize(copy.deepcopy(model), worlds.adamw,
                                   f"{strategy}+hybrid+topology=2x2@100GB/s+accum3+accumulate_mode=micro_batch")
        for index in range(backwards):
            engine.backward(engine(*batches[4 * index + dplab.init().rank]))
        assert engine.step(last=True)
        return engine.full_state_dict()

    same_bits(in_threads(4, body, strategy), in_threads(4, body, without(strategy)))
    assert len(links) == 4


@pytest.mark.parametrize("strategy", OFFLOADED)
def test_on_a_mesh_of_two_axes(strategy: str, links: list[LateLink]) -> None:
    def told(name: str) -> list[dict[str, torch.Tensor]]:
        return in_threads(4, worlds.train, fresh(Uneven), uneven_batches(8), f"{name}+bf16", mesh=(2, 2))

    same_bits(told(strategy), told(without(strategy)))


@pytest.mark.parametrize("more", ["+bf16", "+bf16+accum2+bucket_mb=1e-05"])
def test_parameters_alone_leave_a_master_on_the_device(more: str, links: list[LateLink]) -> None:
    same_bits(run(f"zero3{more}+offload=parameters", 2), run(f"zero3{more}", 2))
    assert all(link.sent["up"] > link.sent["down"] for link in links)


@pytest.mark.parametrize("strategy", OFFLOADED)
def test_fp16_scales_votes_and_skips_alike(strategy: str, links: list[LateLink]) -> None:
    def body(name: str) -> tuple[list[bool], dict[str, torch.Tensor]]:
        engine = dplab.parallelize(fresh(), worlds.adamw, name)
        moved = []
        for step, batch in enumerate(uneven_batches(4)):
            loss = engine(*batch)
            engine.backward(loss * (float("inf") if step == 1 else 1.0))
            moved.append(engine.step())
        return moved, engine.full_state_dict()

    ours, theirs = in_threads(2, body, f"{strategy}+fp16"), in_threads(2, body, without(f"{strategy}+fp16"))
    assert [moved for moved, _ in ours] == [moved for moved, _ in theirs]
    assert ours[0][0].count(False) >= 1
    same_bits([state for _, state in ours], [state for _, state in theirs])


@pytest.mark.parametrize("strategy", OFFLOADED)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_habits_around_a_window(strategy: str, precision: str, links: list[LateLink]) -> None:
    """More backwards after a closed window, dropped windows, short ones, weights written by hand, gradients read."""
    def body(name: str) -> tuple[dict[str, torch.Tensor], list[Any]]:
        engine = dplab.parallelize(fresh(), worlds.adamw, f"{name}+{precision}")
        batches, seen = iter(uneven_batches(12)), []
        for _ in range(2):
            engine.backward(engine(*next(batches)))          # adds up, as in plain torch
        seen += [engine.full_grad("head.weight"), engine.clip_grad_norm_(0.5)]
        engine.step()
        engine.backward(engine(*next(batches)))
        engine.zero_grad()
        with engine.no_sync():
            engine.backward(engine(*next(batches)))
        engine.backward(engine(*next(batches)))
        engine.step(last=True)
        with engine.gathered() as model:
            model.head.weight.data.clamp_(-0.1, 0.1)         # type: ignore[union-attr, operator]
        if not name.startswith("zero3"):
            for parameter in engine.module.parameters():
                parameter.data.mul_(0.5)                     # past every version counter
        engine.backward(engine(*next(batches)))
        engine.step()
        return engine.full_state_dict(), seen

    ours, theirs = in_threads(2, body, strategy), in_threads(2, body, without(strategy))
    same_bits([state for state, _ in ours], [state for state, _ in theirs])
    for (_, mine), (_, other) in zip(ours, theirs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


@pytest.mark.parametrize(("one", "other"), [*itertools.pairwise([
    "zero2", "zero1+offload=optimizer", "zero2", "zero3+offload=all", "zero3+offload=optimizer",
    "zero2+offload=optimizer", "zero3"])])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_checkpoints_go_in_and_out(one: str, other: str, precision: str, links: list[LateLink], tmp_path: Any) -> None:
    def steps(engine: dplab.Engine, batches: list[Any]) -> None:
        for batch in batches:
            engine.backward(engine(*batch))
            engine.step()

    def body(path: str) -> list[dict[str, torch.Tensor]]:
        batches = uneven_batches(6)
        first = dplab.parallelize(fresh(), worlds.adamw, f"{one}+{precision}")
        steps(first, batches[:3])
        saved = first.save(path, wait=False)
        second = dplab.parallelize(fresh(seed=8), worlds.adamw, f"{other}+{precision}")
        steps(second, batches[:1])
        steps(first, batches[3:4])
        saved.wait()
        assert second.load(path) == 3
        steps(second, batches[3:])
        steps(first, batches[4:])
        return [first.full_state_dict(), second.full_state_dict()]

    for states in in_threads(2, body, str(tmp_path / "kept")):
        same_bits(states[:1], states[1:])


@pytest.mark.parametrize("strategy", OFFLOADED)
@pytest.mark.parametrize("optimizer", [
    lambda ps: torch.optim.Adagrad(ps, lr=1e-2), lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True), lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=True),
    lambda ps: torch.optim.NAdam(ps, lr=1e-2)], ids=["adagrad", "momentum", "fused", "foreach", "nadam"])
def test_other_optimizers(strategy: str, optimizer: Any, links: list[LateLink]) -> None:
    def body(name: str) -> dict[str, torch.Tensor]:
        engine = dplab.parallelize(fresh(), optimizer, f"{name}+bf16")
        schedule = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, 0.5)
        for batch in uneven_batches(3):
            engine.backward(engine(*batch))
            engine.step()
            schedule.step()
        return engine.full_state_dict()

    same_bits(in_threads(2, body, strategy), in_threads(2, body, without(strategy)))


def test_one_that_wants_whole_parameters(links: list[LateLink]) -> None:
    def body(name: str) -> dict[str, torch.Tensor]:
        return worlds.train(fresh(), uneven_batches(3), name, optimizer=torch.optim.Adafactor)

    for strategy in OFFLOADED:
        same_bits(in_threads(1, body, strategy), in_threads(1, body, without(strategy)))


def test_weights_as_one_file(links: list[LateLink], tmp_path: Any) -> None:
    def body(strategy: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        engine = dplab.parallelize(fresh(), worlds.adamw, strategy)
        engine.backward(engine(*uneven_batches(1)[0]))
        engine.step()
        before = engine.full_state_dict()
        engine.save(tmp_path / "weights.safetensors")
        other = dplab.parallelize(fresh(seed=9), worlds.adamw, strategy)
        other.load(tmp_path / "weights.safetensors")
        return before, other.full_state_dict()

    for strategy in OFFLOADED:
        for before, after in in_threads(2, body, f"{strategy}+bf16"):
            same_bits([before], [after])


@pytest.mark.parametrize("strategy", OFFLOADED)
def test_a_model_on_the_meta_device(strategy: str, links: list[LateLink]) -> None:
    def body(name: str) -> dict[str, torch.Tensor]:
        torch.manual_seed(4)
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Sequential(nn.Linear(9, 9), nn.Tanh()) for _ in range(3)))
        engine = dplab.parallelize(model, worlds.adamw, f"{name}+bf16")
        engine.backward(engine(torch.ones(2, 9, dtype=torch.bfloat16)).float().square().mean())
        engine.step()
        return engine.full_state_dict()

    same_bits(in_threads(1, body, strategy), in_threads(1, body, without(strategy)))


@pytest.mark.parametrize("strategy", OFFLOADED)
def test_a_model_on_the_meta_device_from_a_checkpoint(strategy: str, links: list[LateLink], tmp_path: Any) -> None:
    original = nn.Sequential(*(nn.Sequential(nn.Linear(9, 9), nn.Tanh()) for _ in range(3)))

    def body() -> list[dict[str, torch.Tensor]]:
        first = dplab.parallelize(copy.deepcopy(original), worlds.adamw, f"{without(strategy)}+bf16")
        first.save(tmp_path / "saved")
        engine = dplab.parallelize(copy.deepcopy(original).to("meta"), worlds.adamw, f"{strategy}+bf16",
                                   materialize=tmp_path / "saved")
        before = engine.full_state_dict()
        for each in (first, engine):
            each.backward(each(torch.ones(2, 9, dtype=torch.bfloat16)).float().square().mean())
            each.step()
        return [before, first.full_state_dict(), engine.full_state_dict()]

    for before, wanted, found in in_threads(2, body):
        same_bits([before, wanted], [original.state_dict(), found])


def test_a_model_with_frozen_parts_and_normalisation(links: list[LateLink]) -> None:
    original = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)))
    original[2][0].requires_grad_(False)

    def body(name: str) -> dict[str, torch.Tensor]:
        model = copy.deepcopy(original)
        engine = dplab.parallelize(model, worlds.adamw, name)
        for step in range(3):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step + dplab.init().rank))
            engine.backward(engine(x.bfloat16()).float().square().mean())
            engine.step()
        return engine.full_state_dict()

    for strategy in [*OFFLOADED, "zero3+offload=parameters"]:
        same_bits(in_threads(2, body, f"{strategy}+bf16"), in_threads(2, body, without(f"{strategy}+bf16")))


EXPECTED = {
    "zero1+offload=optimizer": ("params", "grads"), "zero2+offload=optimizer": ("params", "buckets"),
    "zero3+offload=optimizer": ("params", "buckets"), "zero3+offload=all": ("buckets",)}


@pytest.mark.parametrize("strategy", OFFLOADED)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16+accum2"])
def test_the_ledger_tells_device_and_host_apart_and_as_predicted(strategy: str, precision: str,
                                                                 links: list[LateLink]) -> None:
    layers, width = 4, 256

    def body(name: str) -> tuple[dict[str, int], dict[str, int]]:
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        engine = dplab.parallelize(model, worlds.adamw, name)
        dtype = next(model.parameters()).dtype
        for _ in range(engine.strategy.accumulate):
            engine.backward(engine(torch.ones(2, width, dtype=dtype)).float().square().mean())
        within = engine.memory()
        engine.step()
        return within, engine.memory()

    name = f"{strategy}+{precision}"
    for _, held in in_threads(2, body, name):
        told = dplab.estimate(layers * width**2, 2, name)
        states = {part: size for part, size in told.model_states_bytes.items() if part != "total"}
        assert {part: held[part] for part in states} == states
        assert held["host"] == told.host_bytes
        assert {part for part, size in held.items() if size and part != "host"} <= {*EXPECTED[strategy], "activations"}
    for _, held in in_threads(2, body, without(name)):
        assert "host" not in held


def test_on_a_cpu_nothing_moves_and_one_line_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    same_bits(run("zero2+bf16+offload=optimizer", 2), run("zero2+bf16", 2))
    said = [line for line in capfd.readouterr().out.splitlines() if "offload" in line]
    assert said == ["dplab: zero2+bf16+offload=optimizer: nothing to offload, the ranks compute in the host's memory "
                    "already"]
    engine = dplab.parallelize(nn.Linear(2, 2), worlds.adamw, "zero3+offload=all")
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    assert "host" not in engine.memory()


def test_on_real_ranks_nothing_moves_either() -> None:
    model, batches = worlds.build(Even), uneven_batches(4)
    for strategy in OFFLOADED:
        same_bits(in_processes(2, worlds.train, model, batches, strategy),
                  in_processes(2, worlds.train, model, batches, without(strategy)))


@pytest.mark.parametrize(("strategy", "said"), [
    ("ddp+offload=optimizer", r"offload='optimizer'\) is not allowed; offload is for what a rank alone owns, and ddp "
                              r"shards nothing; use zero1, zero2 or zero3, or leave it out"),
    ("zero2+offload=all", r"offload is for sharded parameters, and under zero2 every rank computes with all of them; "
                          r"use offload=optimizer, or zero3"),
    ("zero3+offload=parameters", r"offload is for precisions with a master copy, which stays on the device to be "
                                 r"stepped; use offload=all, or bf16 or fp16"),
    ("zero3+offload=disk", r"offload is one of none, optimizer, parameters, all")])
def test_what_cannot_be_is_refused(strategy: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        dplab.Strategy.parse(strategy)


def test_another_kind_of_device_is_refused() -> None:
    with pytest.raises(UsageError, match=r"offload moves between a CUDA GPU and the host, and this rank's device is "
                                         r"mps; leave offload out"):
        home.link_to(torch.device("mps"))


def test_an_optimizer_that_is_bound_to_the_gpu_is_refused(links: list[LateLink]) -> None:
    with pytest.raises(UsageError, match=r"optimizer AdamW has capturable=True, which steps on the GPU, and the "
                                         r"strategy's offload steps on the host; leave one of them out"):
        dplab.parallelize(nn.Linear(2, 2), lambda ps: torch.optim.AdamW(ps, capturable=True), "zero1+offload=optimizer")


def test_a_strategy_says_it_and_reads_it() -> None:
    strategy = dplab.Strategy(sharding="zero3", offload="all")
    assert str(strategy) == "zero3+offload=all"
    assert dplab.Strategy.parse(str(strategy)) == dplab.Strategy.from_dict(strategy.to_dict()) == strategy
    assert copy.copy(strategy).offload == "all"


class FakeStream:
    """Torch's stream, as far as a link asks it; everything lands in one list."""

    said: ClassVar[list[tuple[str, ...]]] = []

    def __init__(self, name: Any = "side") -> None:
        self.name = name if isinstance(name, str) else "side"

    def wait_stream(self, other: FakeStream) -> None:
        self.said.append((self.name, "waits for", other.name))

    def wait_event(self, event: FakeStream) -> None:
        self.said.append((self.name, "waits for event of", event.name))

    def record_event(self) -> FakeStream:
        return self

    def synchronize(self) -> None:
        self.said.append(("host", "waits for", self.name))


def test_copies_of_a_gpu_are_ordered_by_streams_and_events(monkeypatch: pytest.MonkeyPatch) -> None:
    current, names = [FakeStream("compute")], iter(["down", "up"])

    @contextmanager
    def inside(stream: FakeStream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(FakeStream, "said", [])
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(next(names)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", inside)
    link = host.CudaLink(torch.device("cuda", 0))
    kept, sent = torch.zeros(3), torch.ones(3)
    link.down(sent, kept).wait()
    assert kept.tolist() == [1, 1, 1]
    with link.ahead():
        link.up(sent, kept)
        assert current[-1].name == "up"
    copied = link.up(sent, kept)
    held = weakref.ref(copied._ends[0])  # type: ignore[attr-defined]
    del sent
    assert held() is not None           # a tensor that nobody else holds any more must stay until then
    copied.order()
    assert held() is None
    assert FakeStream.said == [
        ("down", "waits for", "compute"), ("host", "waits for", "down"), ("up", "waits for", "compute"),
        ("up", "waits for", "up"), ("up", "waits for", "compute"), ("compute", "waits for event of", "up")]
