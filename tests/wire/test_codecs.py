"""Codecs against numpy: what they send, what they lose, what they remember; and the training that they serve."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dplab
from dplab.errors import UsageError
from dplab.layout import FlatLayout, Slot
from dplab.specs import Strategy
from dplab.telemetry.recorder import NULL, Recorder, install
from dplab.wire import Codec, Quantised
from dplab.wire.chain import Chain
from dplab.wire.codecs import named
from dplab.wire.collectives import Collectives, Counters, Part, Pending
from dplab.wire.powersgd import PowerSgd
from dplab.wire.quantised import BLOCK, Bf16, Fp16, Int8
from tests.worlds import build, in_processes, in_shm, in_threads, reference, train, uneven_batches

RANKS = 3
SLOTS = FlatLayout.of([("matrix", (24, 40)), ("bias", (40,)), ("cube", (6, 4, 10)), ("thin", (2, 3))], 1, RANKS)


def gradients(rank: int, turn: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * turn + rank)
    flat = torch.zeros(SLOTS.numel, dtype=torch.float64)
    for slot in SLOTS.slots:
        flat[slot.start:slot.stop] = torch.randn(slot.numel, generator=generator, dtype=torch.float64) * 10.0 ** (
            len(slot.shape) - 2)
    return flat.to(dtype)


# ---- rounding, against numpy

def numpy_int8(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    blocks = rows.astype(np.float32).reshape(-1, BLOCK)
    scales = (np.abs(blocks).max(1, keepdims=True) / np.float32(127)).astype(np.float32)
    return (np.rint(blocks / np.maximum(scales, np.finfo(np.float32).tiny)).astype(np.float32) * scales).reshape(
        rows.shape)


def numpy_fp16(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    blocks = rows.astype(np.float32).reshape(-1, BLOCK)
    power = np.float32(2) ** (np.frexp(np.abs(blocks).max(1, keepdims=True))[1] - 1).astype(np.float32)
    return ((blocks / power).astype(np.float16).astype(np.float32) * power).reshape(rows.shape)


def numpy_bf16(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """To the nearest, ties to even, in the upper half of the word."""
    bits = rows.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)


ROUNDING = [(Bf16, numpy_bf16, 2 * BLOCK, 2.0**-8), (Fp16, numpy_fp16, 2 * BLOCK + 2, 2.0**-11),
            (Int8, numpy_int8, BLOCK + 4, 1 / 254)]
"""Codec, reference, bytes of a block, largest error as a share of the block's largest value."""


FLOATS = st.floats(-2.0**100, 2.0**100, width=32).map(lambda value: value if abs(value) > 2.0**-100 else 0.0)


@pytest.mark.parametrize(("kind", "theirs", "size", "bound"), ROUNDING)
@given(values=st.lists(FLOATS, min_size=1, max_size=64), pieces=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_rounding_equals_numpy_and_keeps_its_bound(kind: Any, theirs: Any, size: int, bound: float, values: list[float],
                                                   pieces: int) -> None:
    rows = torch.zeros(pieces, 2 * BLOCK)
    rows.view(-1)[BLOCK - 32:BLOCK - 32 + len(values)] = torch.tensor(values)      # in two blocks
    codec = kind(())
    payload = codec.encode(rows)
    assert payload.dtype == torch.uint8
    assert payload.shape == (pieces, 2 * size)
    back = codec.decode(payload, 2 * BLOCK)
    assert np.array_equal(back.numpy(), theirs(rows.numpy()))
    # each piece decodes by itself, from anywhere
    assert torch.equal(codec.decode(payload[pieces - 1:], 2 * BLOCK), back[pieces - 1:])
    largest = rows.view(-1, BLOCK).abs().amax(1, keepdim=True)
    assert ((back - rows).view(-1, BLOCK).abs() <= largest.double() * bound * 1.0001 + 1e-38).all()


@pytest.mark.parametrize("kind", [Bf16, Fp16, Int8])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_does_not_come_back_finite(kind: Any, value: float) -> None:
    rows = torch.ones(1, 2 * BLOCK)
    rows[0, 3] = value
    back = kind(()).decode(kind(()).encode(rows), 2 * BLOCK)
    assert not torch.isfinite(back[0, 3])
    assert torch.isfinite(back[0, BLOCK:]).all()


# ---- sums over ranks

class Kept(Recorder):
    """Keeps gauges."""

    def __init__(self) -> None:
        self.gauges: list[tuple[str, dict[str, Any]]] = []

    def gauge(self, name: str, **values: Any) -> None:
        self.gauges.append((name, values))


def axis() -> Collectives:
    world = dplab.init()
    return Collectives(world.transport([list(range(world.size))]), Counters(), NULL)


def summed(make: Any, *, turns: int = 1, scatter: bool = False,
           dtype: torch.dtype = torch.float64) -> tuple[list[torch.Tensor], dict[str, Any], Codec]:
    """What a codec makes of `turns` gradients, one after the other; the counters' row; the codec."""
    group = axis()
    codec, results = make(SLOTS.slots), []
    for turn in range(turns):
        flat = gradients(group.rank, turn, dtype)
        part = Part(row="reduce_scatter" if scatter else "all_reduce", bucket=0)
        if scatter:
            out = torch.empty(flat.numel() // group.size, dtype=torch.float64)
            Chain(codec.reduce_scatter(flat, out, group.of(part))).wait()
            results.append(out)
        else:
            Chain(group.coded(codec, flat, part)).wait()
            results.append(flat)
    return results, group.counters.rows["reduce_scatter" if scatter else "all_reduce"], codec


WORLDS = [pytest.param(in_threads, id="threads"), pytest.param(in_shm, id="shm"), pytest.param(in_processes, id="gloo")]


def numpy_sum(theirs: Any, *, feedback: bool, turns: int) -> list[np.ndarray[Any, Any]]:
    """All-reduces one after the other, rank by rank: pieces rounded by their senders, sums by their owners."""
    width = SLOTS.numel // RANKS
    owed = np.zeros((RANKS, RANKS, width), np.float32)
    owed_sums = np.zeros((RANKS, width), np.float32)
    results = []
    for turn in range(turns):
        flats = [gradients(rank, turn).numpy().reshape(RANKS, width) for rank in range(RANKS)]
        sums = np.zeros((RANKS, width))
        for owner in range(RANKS):
            for rank in range(RANKS):
                if rank == owner:
                    sums[owner] += flats[rank][owner]
                    continue
                meant = flats[rank][owner].astype(np.float32) + owed[rank][owner]
                sent = theirs(meant[None])[0]
                sums[owner] += sent
                if feedback:
                    owed[rank][owner] = meant - sent
        meant = sums.astype(np.float32) + owed_sums
        sent = theirs(meant)
        if feedback:
            owed_sums = meant - sent
        results.append(sent.reshape(-1))
    return results


@pytest.mark.parametrize("where", WORLDS)
@pytest.mark.parametrize(("name", "theirs"), [("bf16", numpy_bf16), ("fp16", numpy_fp16), ("int8", numpy_int8),
                                              ("int8-ef", numpy_int8)])
def test_sums_equal_numpys_on_every_rank(where: Any, name: str, theirs: Any) -> None:
    expected = numpy_sum(theirs, feedback=name == "int8-ef", turns=3)
    for results, _, _ in where(RANKS, summed, named(name), turns=3):
        for got, want in zip(results, expected, strict=True):
            assert np.array_equal(got.float().numpy(), want)


@pytest.mark.parametrize("name", ["bf16", "fp16", "int8", "int8-ef", "powersgd2"])
def test_a_reduce_scatter_is_what_the_all_reduce_begins_with(name: str) -> None:
    """Sums are not rounded again by their owner; PowerSGD's are the same."""
    whole = in_threads(RANKS, summed, named(name))
    for rank, (results, _, _) in enumerate(in_threads(RANKS, summed, named(name), scatter=True)):
        own = whole[0][0][0].view(RANKS, -1)[rank]
        exact = sum(gradients(r) for r in range(RANKS)).view(RANKS, -1)[rank]
        bound = {"bf16": 2**-8, "fp16": 2**-11, "int8": 1 / 254, "int8-ef": 1 / 254, "powersgd2": 0}[name]
        assert (results[0] - own).abs().max() <= bound * exact.abs().max() * 1.01
        if name != "powersgd2":
            assert (results[0] - exact).abs().max() <= (results[0] - own).abs().max() + (own - exact).abs().max()


def numpy_powersgd(rank: int, turns: int) -> list[np.ndarray[Any, Any]]:
    """Algorithms 1 and 2 of Vogels et al. 2019, with sums where they have means, in one process."""
    matrices = {0: (24, 40), 2: (6, 40)} | ({3: (2, 3)} if rank == 1 else {})
    right = {}
    for index, (n, m) in matrices.items():
        generator = torch.Generator().manual_seed(SLOTS.slots[index].start + m)
        right[index] = torch.randn(m, rank, generator=generator, dtype=torch.float64).numpy()
        assert n * m == SLOTS.slots[index].numel
    owed = {(index, r): np.zeros(matrices[index]) for index in matrices for r in range(RANKS)}
    results = []
    for turn in range(turns):
        flats = [gradients(r, turn).numpy() for r in range(RANKS)]
        result = sum(flats)
        for index, shape in matrices.items():
            slot = SLOTS.slots[index]
            meant = [flat[slot.start:slot.stop].reshape(shape) + owed[index, r] for r, flat in enumerate(flats)]
            left = np.linalg.qr(sum(each @ right[index] for each in meant))[0]
            for r, each in enumerate(meant):
                owed[index, r] = each - left @ (each.T @ left).T
            right[index] = sum(each.T @ left for each in meant)
            result[slot.start:slot.stop] = (left @ right[index].T).reshape(-1)
        results.append(result)
    return results


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("where", WORLDS)
def test_powersgd_equals_the_papers_algorithm(where: Any, rank: int) -> None:
    expected = numpy_powersgd(rank, turns=4)
    every = where(RANKS, summed, named(f"powersgd{rank}"), turns=4)
    for results, _, _ in every:
        for got, want, first in zip(results, expected, every[0][0], strict=True):
            assert torch.equal(got, first)
            assert np.allclose(got.numpy(), want, rtol=1e-9, atol=1e-12)


def test_powersgd_survives_zeros_and_overflows() -> None:
    def body() -> list[bool]:
        group, codec, told = axis(), PowerSgd(SLOTS.slots, rank=2), []
        for scale in (0.0, 1.0, float("inf"), 1.0, 1.0):
            flat = gradients(group.rank) * scale
            flat[SLOTS.slots[0].start] = scale
            Chain(codec.all_reduce(flat, group)).wait()
            matrix = flat[:SLOTS.slots[0].stop]
            told += [bool(torch.isfinite(matrix).all()), bool(matrix.any())]
        return told

    assert in_threads(RANKS, body) == RANKS * [[True, False, True, True, False, True, True, True, True, True]]


def test_what_is_owed_is_paid_in_the_end() -> None:
    """With feedback the mean of many sums of one gradient comes to it; without, it stays where rounding leaves it."""
    def body(name: str) -> float:
        group, codec = axis(), named(name)(SLOTS.slots)
        total = torch.zeros(SLOTS.numel, dtype=torch.float64)
        for _ in range(50):
            flat = gradients(group.rank)
            Chain(codec.all_reduce(flat, group)).wait()
            total += flat / 50
        exact = sum(gradients(rank) for rank in range(RANKS))
        return float((total - exact).norm() / exact.norm())

    (plain, fed, power), *_ = zip(*(in_threads(RANKS, body, name) for name in ("int8", "int8-ef", "powersgd4")),
                                  strict=True)
    assert fed < plain / 5
    assert power < 0.2


# ---- what it costs, and what is told of it

@pytest.mark.parametrize(("name", "sent"), [
    ("bf16", 2 * 2 * SLOTS.numel), ("fp16", 2 * SLOTS.numel * 258 // 128), ("int8", 2 * SLOTS.numel * 132 // 128),
    ("powersgd2", 2 * 8 * (2 * (24 + 40 + 6 + 40) + 40 + 6))])
def test_bytes_are_those_that_left_and_a_collective_counts_once(name: str, sent: int) -> None:
    """Of float64 values: PowerSGD's factors are float64 too. (N-1)/N of everything, twice."""
    for _, row, codec in in_threads(RANKS, summed, named(name), turns=2):
        assert row == {"count": 2, "bytes": pytest.approx(2 * sent * (RANKS - 1) / RANKS, abs=8)}
        if name in ("bf16", "fp16", "int8"):
            assert codec.held_bytes == 0


def test_the_error_is_measured_and_told() -> None:
    def body() -> tuple[float, dict[str, Any], list[Any], int]:
        kept = Kept()
        install(kept)
        engine = dplab.parallelize(build(Wide, torch.float32), lambda ps: torch.optim.SGD(ps, lr=0.1),
                                    "ddp+wire=int8-ef")
        for _ in range(3):
            engine.backward(engine(torch.ones(2, 64) + dplab.init().rank).square().sum())
            engine.step()
        install(NULL)
        row = engine.wire()["all_reduce"]
        return row["error"], row, [values for name, values in kept.gauges if name == "compression_error"], (
            engine.memory()["grads"])

    for error, row, told, grads in in_threads(2, body):
        assert 0 < error < 0.02
        assert told[0]["value"] == error
        assert len(told) == 1      # the first of 16
        flat = FlatLayout.of([("weight", (64, 64)), ("bias", (64,))], 1, 2)
        assert row["bytes"] == 3 * 2 * flat.numel // 2 * 132 // 128
        assert grads == (4 + 4 + 2) * flat.numel      # gradients, what is owed of them, and of half of the sums


class Wide(torch.nn.Module):
    """One matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


# ---- training

class Signs(Quantised):
    """One of a user's own: signs, and one scale a piece."""

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        scales = rows.abs().mean(1, keepdim=True).view(torch.uint8)
        return torch.cat([scales, (rows >= 0).to(torch.uint8)], dim=1)

    def decode(self, payload: torch.Tensor, n: int) -> torch.Tensor:
        scales = payload[:, :4].clone().view(torch.float32)
        return (payload[:, 4:].float() * 2 - 1) * scales


class Plain:
    """A codec from nothing: two methods, no rounding."""

    error = None
    held_bytes = 0

    def all_reduce(self, flat: torch.Tensor, axis: Collectives) -> Iterator[Pending]:
        yield axis.all_reduce(flat)

    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor, axis: Collectives) -> Iterator[Pending]:
        yield axis.reduce_scatter(flat, out)


torch.manual_seed(0)
CLASSIFIER = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))


def losses(strategy: str, codec: Any = None, steps: int = 60) -> list[float]:
    """Of a small classifier whose classes can be told apart, every rank with batches of its own."""
    world = dplab.init()
    model = copy.deepcopy(CLASSIFIER)
    centers = torch.randn(4, 32, generator=torch.Generator().manual_seed(5))
    engine = dplab.parallelize(model, lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9), strategy, codec=codec)
    generator = torch.Generator().manual_seed(world.rank)
    told = []
    for _ in range(steps):
        y = torch.randint(0, 4, (16,), generator=generator)
        x = centers[y] + torch.randn(16, 32, generator=generator)
        loss = torch.nn.functional.cross_entropy(engine(x), y)
        engine.backward(loss)
        engine.step()
        told.append(loss.item())
    engine.check_agreement()
    return told


@pytest.mark.parametrize("strategy", [f"{sharding}+wire={wire}" for sharding in ("ddp", "zero1", "zero2", "zero3")
                                      for wire in ("bf16", "fp16", "int8")] + [
    "ddp+wire=int8-ef", "zero1+wire=int8-ef", "ddp+wire=powersgd2", "zero1+wire=powersgd2", "ddp+wire=int8+accum2",
    "ddp+hybrid+topology=2x2@10gbe+wire=int8", "zero3+hybrid+topology=2x2@10gbe+wire=int8",
    "ddp+bf16+wire=int8", "zero2+bf16+wire=bf16"])
def test_training_comes_to_where_it_does_without(strategy: str) -> None:
    plain = in_threads(4, losses, strategy.split("+")[0])
    coded = in_threads(4, losses, strategy)
    assert plain[0][0] == pytest.approx(coded[0][0], rel=0.02)
    last, theirs = (sum(rank[-1] + rank[-2] + rank[-3] for rank in each) / 12 for each in (plain, coded))
    assert theirs < 0.1 * plain[0][0]
    assert theirs == pytest.approx(last, abs=0.1)


@pytest.mark.parametrize("where", [in_shm, in_processes], ids=["shm", "gloo"])
@pytest.mark.parametrize("strategy", ["ddp+wire=int8-ef+bucket_mb=1e-05", "zero1+wire=powersgd2+bucket_mb=1e-05",
                                      "zero3+wire=int8", "ddp+hybrid+topology=2x2@100GB/s+wire=bf16+bucket_mb=1e-05"])
def test_processes_train_with_codecs_as_threads_do(strategy: str, where: Any) -> None:
    expected = in_threads(4, losses, strategy, steps=8)
    assert where(4, losses, strategy, steps=8) == [pytest.approx(each, rel=1e-4) for each in expected]


@pytest.mark.parametrize("sharding", ["ddp", "zero1", "zero2", "zero3"])
def test_a_codec_of_the_users_own(sharding: str) -> None:
    assert sum(in_threads(3, losses, sharding, Signs)[0][-3:]) / 3 < 0.4
    batches = uneven_batches(6)
    model = build(Three)
    expected = reference(model, batches, per_step=3)
    for got in in_threads(3, train, model, batches, sharding, codec=lambda slots: Plain()):
        assert all(torch.allclose(got[name], expected[name], atol=1e-12) for name in expected)


class Three(torch.nn.Module):
    """Embedding and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 7)
        self.layer = torch.nn.Linear(7, 11)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.layer(self.embed(x)).flatten(0, 1), y.flatten())


def test_a_codec_sees_the_buckets_slots() -> None:
    def body() -> list[str]:
        seen: list[Sequence[Slot]] = []

        def make(slots: Sequence[Slot]) -> Codec:
            seen.append(slots)
            return Plain()

        dplab.parallelize(copy.deepcopy(build(Three)), lambda ps: torch.optim.SGD(ps, lr=0.1), codec=make)
        return [slot.name for slots in seen for slot in slots]

    assert in_threads(2, body) == 2 * [["layer.bias", "layer.weight", "embed.weight"]]
    assert in_threads(1, body) == [[]]      # alone, nothing travels


@pytest.mark.parametrize(("name", "mesh"), [("zero1", (2, 2)), ("zero2", (2, 2)),
                                           ("ddp+hybrid+topology=2x2@100GB/s", None),
                                           ("zero2+hybrid+topology=2x2@100GB/s", None)])
def test_where_two_axes_sum_a_codec_sees_the_slots_of_its_own(name: str, mesh: Any) -> None:
    def body() -> list[tuple[str, tuple[int, ...], int]]:
        seen: list[Slot] = []

        def make(slots: Sequence[Slot]) -> Codec:
            seen.extend(slots)
            return Plain()

        model = torch.nn.Sequential(torch.nn.Linear(16, 40), torch.nn.Linear(40, 8))
        dplab.parallelize(model, lambda ps: torch.optim.SGD(ps, lr=0.1), name, mesh=mesh, codec=make)
        return [(slot.name, slot.shape, slot.start) for slot in seen]

    first = [("1.bias", (8,), 0), ("1.weight", (8, 40), 128), ("0.bias", (40,), 512), ("0.weight", (128,), 640)]
    assert in_threads(4, body) == 2 * [first, [("0.weight", (512,), 0)]]


def test_powersgd_is_refused_on_a_mesh_that_cuts_its_matrices() -> None:
    with pytest.raises(UsageError, match=r"'zero1\+wire=powersgd2' needs whole matrices, and mesh \(2, 2\) cuts"):
        in_threads(4, train, build(Three), [], "zero1+wire=powersgd2", mesh=(2, 2))


# ---- refusals

@pytest.mark.parametrize(("text", "message"), [
    ("ddp+wire=int9", r"Strategy\(wire='int9'\) is not known \(did you mean 'int8'\?\); gradients travel as bf16, "
                      r"fp16, int8, int8-ef, powersgd<rank>, or as they are \(None\)"),
    ("ddp+wire=powersgd0", r"Strategy\(wire='powersgd0'\) is not known"),
    ("zero2+wire=int8-ef", r"wire=int8-ef keeps what it left out of a whole model's gradients on every rank, which "
                           r"zero2 is there to avoid; use wire=int8, wire=bf16, ddp or zero1"),
    ("zero3+wire=powersgd4", r"wire=powersgd4 keeps .* which zero3 is there to avoid"),
    ("ddp+fp16+wire=int8-ef", r"wire=int8-ef adds what it left out to the next gradients, and fp16's loss scale "
                              r"changes between them; use precision bf16 or amp-bf16, or wire=int8"),
    ("ddp+amp-fp16+wire=powersgd4", r"wire=powersgd4 adds what it left out to the next gradients"),
    ("ddp+hybrid+wire=powersgd4", r"wire=powersgd4 needs whole matrices, and hybrid cuts them before they cross hosts"),
])
def test_what_cannot_be_coded_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Strategy.parse(text)


def test_two_codecs_are_one_too_many() -> None:
    with pytest.raises(UsageError, match=r"parallelize was given a codec and strategy 'ddp\+wire=bf16', which names "
                                         r"one; leave one out"):
        dplab.parallelize(build(Three), lambda ps: torch.optim.SGD(ps, lr=0.1), "ddp+wire=bf16", codec=Signs)
