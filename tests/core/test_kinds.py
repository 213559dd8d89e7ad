"""Parameters of every kind that people bring: strides, sizes, dtypes, sparse gradients, and what is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dplab
from dplab.errors import UsageError
from dplab.specs import SHARDINGS
from tests import worlds
from tests.worlds import STRATEGIES, in_processes, in_threads

STEPS = 3


def batches_of(shape: tuple[int, ...], count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(count)]


def trained(model: nn.Module, batches: list[Any], strategy: str, optimizer: Any, prepare: Callable[..., None]) -> Any:
    model = copy.deepcopy(model)
    world = dplab.init()
    prepare(model, world.rank)
    engine = dplab.parallelize(model, optimizer, strategy)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    for start in range(0, len(batches), world.size):
        engine.backward(engine(batches[start + world.rank]))
        norm = engine.clip_grad_norm_(1e9)
        assert norm is not None
        assert torch.isfinite(norm)
        assert engine.step()
        assert {name: p.shape for name, p in model.named_parameters()} == shapes
    engine.check_agreement()
    return engine.full_state_dict()


def equals_reference(model: nn.Module, shape: tuple[int, ...], strategy: str, size: int, *, where: Any = in_threads,
                     optimizer: Any = worlds.adamw, steps: int = STEPS,
                     prepare: Callable[..., None] = lambda model, rank: None) -> None:
    batches = batches_of(shape, steps * size)
    expected = worlds.reference(model, [(batch,) for batch in batches], per_step=size, optimizer=optimizer)
    for state in where(size, trained, model, batches, strategy, optimizer, prepare):
        assert {key: value.shape for key, value in state.items()} == {k: v.shape for k, v in expected.items()}
        for key, value in state.items():
            assert value.dtype == expected[key].dtype
            torch.testing.assert_close(value, expected[key], rtol=1e-10, atol=1e-10)


class Strided(nn.Module):
    """A transposed weight, a channels-last convolution, and a gradient that comes with stride 0."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.turned = nn.Parameter(torch.randn(5, 3).T)
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.summed = nn.Parameter(torch.randn(2, 3))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).square().mean() + (x.mean((0, 2, 3)) @ self.turned).square().sum() + self.summed.sum()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_h16_parameters_that_are_not_contiguous(strategy: str, size: int) -> None:
    assert not Strided().turned.is_contiguous()
    equals_reference(Strided(), (2, 3, 4, 4), strategy, size)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_h16_strides_that_differ_between_ranks(strategy: str) -> None:
    def prepare(model: Strided, rank: int) -> None:
        if rank == 1:
            model.conv.weight.data = model.conv.weight.data.contiguous()
            model.turned.data = model.turned.data.contiguous()

    equals_reference(Strided(), (2, 3, 4, 4), strategy, 2, prepare=prepare)


class WithEmpty(nn.Module):
    """A layer without elements, last, first, between others, or alone in its unit."""

    def __init__(self, place: str) -> None:
        super().__init__()
        torch.manual_seed(4)
        layers: dict[str, nn.Module] = {"full": nn.Linear(4, 4), "empty": nn.Linear(4, 0, bias=False)}
        if place == "first":
            layers = dict(reversed(layers.items()))
        if place == "unit":
            layers["empty"] = nn.ModuleList([layers["empty"]])
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        empty = self.empty[0] if isinstance(self.empty, nn.ModuleList) else self.empty
        return self.full(x).square().mean() + empty(x).sum()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("place", ["first", "last", "unit"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_h17_parameters_without_elements(strategy: str, place: str, size: int) -> None:
    equals_reference(WithEmpty(place), (2, 4), strategy, size)


class Scaled(nn.Module):
    """A learned scale and a buffer, both of shape ()."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.layer = nn.Linear(4, 4)
        self.register_buffer("offset", torch.tensor(0.1))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * self.scale + self.offset).square().mean()


@pytest.mark.parametrize(("where", "size"), [(in_threads, 1), (in_threads, 2), (in_threads, 3), (in_threads, 4),
                                             (in_processes, 2)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_h18_parameters_without_dimensions(strategy: str, size: int, where: Any) -> None:
    equals_reference(Scaled(), (2, 4), strategy, size, where=where, steps=5)


class Small(nn.Module):
    """Fewer rows than ranks, everywhere."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(((x.mean() + part) ** 2).sum() for part in self.parts)  # type: ignore[return-value]


@pytest.mark.parametrize("shapes", [[(2, 5), (1,), (3,)], [(), (), ()]], ids=["rows", "scalars"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_h19_fewer_rows_than_ranks(strategy: str, size: int, shapes: list[tuple[int, ...]]) -> None:
    equals_reference(Small(shapes), (3,), strategy, size, steps=5)


class Mixed(nn.Module):
    """float32, float64, an int64 buffer, and frozen weights of int8, bool and bfloat16 in one unit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.norm = nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
        self.quantised = nn.Parameter(torch.arange(-8, 8, dtype=torch.int8).view(4, 4), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False, True, True]), requires_grad=False)
        self.old = nn.Linear(4, 4, bias=False).bfloat16().requires_grad_(False)
        self.register_buffer("seen", torch.tensor([2**40]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x.float()) @ (self.quantised.float() / 8) * self.mask
        return (h + self.old(x.bfloat16()).float()).square().mean() * self.scale


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_h20_several_dtypes_in_one_unit(strategy: str, size: int) -> None:
    batches = batches_of((2, 4), STEPS * size)
    expected = worlds.reference(Mixed(), [(batch,) for batch in batches], per_step=size)
    for state in in_threads(size, trained, Mixed(), batches, strategy, worlds.adamw, lambda *_: None):
        for key, value in state.items():
            assert value.dtype == expected[key].dtype
            if key in ("norm.weight", "norm.bias", "scale"):
                torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-6)
            else:
                assert torch.equal(value, expected[key]), key


@pytest.mark.parametrize("name", SHARDINGS)
def test_h20_a_trained_two_byte_weight_is_refused_by_name(name: str) -> None:
    model = Mixed()
    model.old.requires_grad_(True)
    with pytest.raises(UsageError, match=r"parameter 'old\.weight' is bfloat16; without a master copy"):
        in_threads(2, lambda: dplab.parallelize(copy.deepcopy(model), worlds.adamw, name))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", SHARDINGS)
def test_h21_a_complex_parameter_is_refused_by_name(name: str, size: int) -> None:
    def body() -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.complex64))
        dplab.parallelize(model, worlds.adamw, name)

    with pytest.raises(UsageError, match=r"parameter '1\.weight' is complex64; hold its real and imaginary parts"):
        in_threads(size, body)


def lookups(rank: int, step: int) -> torch.Tensor | None:
    """Rank 1 looks up the padding only, then nothing at all."""
    rows = [[[1, 3], [0, 0]], [[2, 2], None], [[4, 1], [3, 3]]][step]
    return None if rows[rank % 2] is None else torch.tensor(rows[rank % 2])


class Table(nn.Module):
    """An embedding whose gradient autograd leaves sparse, and a weight that every rank uses."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.table = nn.Embedding(5, 2, padding_idx=0, sparse=sparse)
        self.bias = nn.Parameter(torch.zeros(2))
        self.double()

    def forward(self, rows: torch.Tensor | None) -> torch.Tensor:
        return self.bias.sum() + (0 if rows is None else self.table(rows).sum())


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_h22_a_sparse_gradient_is_taken_as_a_dense_one(strategy: str, size: int, window: int) -> None:
    # made here: the threads of a world share one random generator
    tables = {sparse: Table(sparse) for sparse in (True, False)}

    def body(sparse: bool) -> tuple[Any, dict[str, torch.Tensor]]:
        engine = dplab.parallelize(copy.deepcopy(tables[sparse]), worlds.adamw, f"{strategy}+accum{window}", units=[])
        grad = None
        for step in range(3):
            engine.backward(engine(lookups(dplab.init().rank, step)))
            grad = engine.full_grad("table.weight") if step == 0 else grad
            engine.step()
        return grad, engine.full_state_dict()

    for (grad, state), (_, expected) in zip(in_threads(size, body, True), in_threads(size, body, False), strict=True):
        for key, value in state.items():
            assert torch.equal(value, expected[key])
        if size == 2 and window == 1:
            assert grad.tolist() == [[0, 0], [0.5, 0.5], [0, 0], [0.5, 0.5], [0, 0]]


def test_h22_an_optimizer_for_sparse_gradients_only_is_refused() -> None:
    with pytest.raises(UsageError, match=r"SparseAdam cannot step a dense gradient \(.*\), and gradients are dense"):
        dplab.parallelize(Table(True), torch.optim.SparseAdam, "zero2")
