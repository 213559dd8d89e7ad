"""ZeRO-3's gathered weights and everybody's versions: never stale, never missing, never somebody else's memory."""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dplab
from dplab.errors import StateError
from dplab.specs import SHARDINGS
from tests import worlds
from tests.worlds import STRATEGIES, in_processes, in_threads

WORLDS = [(in_threads, 1), (in_threads, 2), (in_threads, 3), (in_processes, 2)]


def equals_reference(model: nn.Module, batches: list[tuple[torch.Tensor, ...]], name: str, size: int = 2) -> None:
    expected = worlds.reference(model, batches, per_step=size)

    def body() -> dict[str, torch.Tensor]:
        engine = dplab.parallelize(copy.deepcopy(model), worlds.adamw, name)
        for start in range(0, len(batches), size):
            engine.backward(engine(*batches[start + dplab.init().rank]))
            engine.step()
        return engine.full_state_dict()

    for state in in_threads(size, body):
        for key, value in state.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-10, atol=1e-10)


def inputs(count: int) -> list[tuple[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 6, generator=generator, dtype=torch.float64),) for _ in range(count)]


class Blocks(nn.Module):
    """Blocks as units, run by `how`: plainly, inside an activation checkpoint, with a loss left on the side, ..."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.how = how
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6)) for _ in range(3))
        self.frozen = nn.ModuleList([nn.Linear(6, 6).requires_grad_(False)])
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        aside = x.new_zeros(())
        h = x.requires_grad_() if self.how == "reentrant" else x
        for block in [*self.blocks, *self.frozen, self.blocks[0]]:
            if self.how in ("reentrant", "nonreentrant"):
                h = h + checkpoint(block, h, use_reentrant=self.how == "reentrant")
            else:
                h = h + block(h)
            if self.how == "aside":
                aside = aside + block(h * 2).abs().mean()
        if self.how == "double":
            penalty, = torch.autograd.grad(h.sum(), x_ := x, create_graph=True) if x.requires_grad else (h,)
            return h.square().mean() + (penalty * x_).square().mean()
        return h.square().mean() + aside


@pytest.mark.parametrize("how", ["plain", "nonreentrant", "aside"])
@pytest.mark.parametrize("name", SHARDINGS)
def test_units_inside_checkpoints_and_side_losses(name: str, how: str) -> None:
    equals_reference(Blocks(how), inputs(6), name)


def test_a_reentrant_checkpoint_is_right_where_no_weights_are_shared() -> None:
    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
            self.double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = x.requires_grad_()
            for block in self.blocks:
                h = torch.tanh(checkpoint(block, h, use_reentrant=True))
            return h.square().mean()

    for name in SHARDINGS:
        equals_reference(Once(), inputs(4), name)


@pytest.mark.parametrize("name", SHARDINGS)
def test_a_reentrant_checkpoint_around_shared_weights_is_right_or_refused_by_name(name: str) -> None:
    told = ""
    try:
        equals_reference(Blocks("reentrant"), inputs(4), name)
    except StateError as error:
        told = str(error)
    if told:
        assert re.search(r"parameter 'blocks\.0\..*' got a gradient again after its bucket was reduced", told)


@pytest.mark.parametrize(("where", "size"), WORLDS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_h23_gradient_penalty(name: str, size: int, where: Any) -> None:
    """y = w x^2 + b, loss = mean(g^2) with g = dy/dx: the weight must still be there for the second derivative."""

    points = [(1.0, 2.0, 3.0), (2.0, 3.0, 3.0), (0.5, 1.0, 4.0)]

    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList([nn.Linear(1, 1).double()])
            nn.init.constant_(self.inner[0].weight, 2.0)
            nn.init.zeros_(self.inner[0].bias)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner[0](x**2)

    def body() -> tuple[float, bool]:
        engine = dplab.parallelize(Square(), worlds.adamw, name)
        x = torch.tensor(points[dplab.init().rank], dtype=torch.float64)[:, None].requires_grad_()
        g, = torch.autograd.grad(engine(x).sum(), x, create_graph=True)
        before = sum(row["count"] for key, row in engine.wire().items() if key in ("all_reduce", "reduce_scatter"))
        assert before == 0
        engine.backward(g.square().mean())
        weight = engine.full_grad("inner.0.weight")
        assert weight is not None
        return weight.item(), engine.full_grad("inner.0.bias") is None

    # mean over ranks of d/dw mean((2 w x)^2) = 8 w mean(x^2)
    expected = 16.0 * sum(sum(x * x for x in row) / 3 for row in points[:size]) / size
    assert expected == 96.0 or size != 2
    assert where(size, body) == [(pytest.approx(expected, rel=1e-12), True)] * size


@dataclasses.dataclass
class Output:
    value: torch.Tensor
    note: str


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict", "dataclass", "nested", "hidden"])
@pytest.mark.parametrize(("where", "size"), WORLDS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_h05_outputs_of_any_form_are_handed_back_as_they_are(name: str, form: str, size: int, where: Any) -> None:
    class Trunk(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(1, 1, bias=False)])
            nn.init.ones_(self.layers[0].weight)
            self.kept: Any = None

        def forward(self, x: torch.Tensor) -> Any:
            y = self.layers[0](x)
            self.kept = y
            return {"tensor": y, "tuple": (y, self.layers[0](x * 7)), "dict": {"y": y}, "dataclass": Output(y, "n"),
                    "nested": [{"y": y}, None, "text", 3], "hidden": None}[form]

    def body() -> float:
        engine = dplab.parallelize(Trunk(), worlds.adamw, name)
        out = engine(torch.tensor([[1.0 + 2 * dplab.init().rank]]))
        loss = {"tensor": lambda: out, "tuple": lambda: out[0], "dict": lambda: out["y"],
                "dataclass": lambda: out.value, "nested": lambda: out[0]["y"],
                "hidden": lambda: engine.module.kept}[form]()
        if form == "nested":
            assert out[1:] == [None, "text", 3]
        engine.backward(loss.sum())
        value = engine.full_grad("layers.0.weight")
        assert value is not None
        with torch.no_grad():
            engine(torch.ones(1, 1))
        engine.step()
        return value.item()

    # the mean of 1, 3, 5, ... is how many there are
    assert where(size, body) == [float(size)] * size


@pytest.mark.parametrize("way", ["module", "submodule", "method", "patched"])
@pytest.mark.parametrize(("where", "size"), WORLDS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_h46_calling_around_the_engine_is_synchronised_too(name: str, way: str, size: int, where: Any) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(1, 1, bias=False)])
            nn.init.ones_(self.layers[0].weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[0](x)

        def other(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[0](x)

    def body() -> float:
        engine = dplab.parallelize(Outer(), worlds.adamw, name)
        if way == "patched":
            engine.module.forward = lambda x: engine.module.layers[0](x)
        call = {"module": engine.module, "submodule": engine.module.layers[0], "method": engine.module.other,
                "patched": engine.module}[way]
        call(torch.tensor([[1.0 + 2 * dplab.init().rank]])).sum().backward()
        value = engine.full_grad("layers.0.weight")
        assert value is not None
        assert engine.step()
        engine.check_agreement()
        return value.item()

    # the mean of 1, 3, 5, ... is how many there are
    assert where(size, body) == [float(size)] * size


@pytest.mark.parametrize("name", SHARDINGS)
def test_backward_through_weights_that_have_moved_since_is_an_error(name: str) -> None:
    def body() -> None:
        engine = dplab.parallelize(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), worlds.adamw, name)
        stale = engine(torch.ones(1, 2)).sum()
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        stale.backward()

    with pytest.raises((StateError, RuntimeError), match=r"weights of '1' have moved since|modified by an inplace"):
        in_threads(2, body)


@pytest.mark.parametrize(("where", "size"), WORLDS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_h02_several_forwards_before_one_backward(name: str, size: int, where: Any) -> None:
    def body() -> float:
        model = nn.Sequential(*[nn.Linear(1, 1, bias=False)] * 3)
        nn.init.constant_(model[0].weight, 2.0)
        engine = dplab.parallelize(model, worlds.adamw, name)
        x = torch.tensor([[1.0 + dplab.init().rank]])
        engine.backward(engine(x).sum() + engine(torch.ones(1, 1)).sum())
        value = engine.full_grad("0.weight")
        assert value is not None
        return value.item()

    # 3 w^2 (mean of 1, 2, ... + 1)
    assert where(size, body) == [12.0 * ((size + 1) / 2 + 1)] * size


@pytest.mark.parametrize("names", [("zero3", "ddp"), ("ddp", "zero3"), ("zero2", "zero1"), ("zero3", "zero3")])
def test_h24_two_models_and_two_optimizers_equal_one_process(names: tuple[str, str], where: Any) -> None:
    """The loop of a GAN: D's hooks fire in G's step, with D frozen or not, the fake used twice."""
    def single() -> nn.Module:
        layer = nn.Sequential(nn.Linear(1, 1, bias=False)).double()
        nn.init.ones_(layer[0].weight)
        return layer

    sgd = lambda ps: torch.optim.SGD(ps, lr=0.1)  # noqa: E731
    noise, real = torch.tensor([[1.0], [2.0]]).double(), torch.tensor([[3.0], [4.0]]).double()

    def body() -> list[dict[str, torch.Tensor]]:
        rank = dplab.init().rank
        g, d = (dplab.parallelize(single(), sgd, name) for name in names)
        for _ in range(3):
            fake = g(noise[rank:rank + 1])
            g.backward(d(fake).mean())
            d.zero_grad()
            d.backward(d(fake.detach()).mean() + d(real[rank:rank + 1]).mean())
            g.step()
            d.step()
        return [g.full_state_dict(), d.full_state_dict()]

    g, d = single(), single()
    og, od = sgd(g.parameters()), sgd(d.parameters())
    for _ in range(3):
        og.zero_grad()
        fake = g(noise)
        d(fake).mean().backward()
        od.zero_grad()
        (d(fake.detach()).mean() + d(real).mean()).backward()
        og.step()
        od.step()
    for states in where(2, body):
        for state, model in zip(states, (g, d), strict=True):
            for key, value in model.state_dict().items():
                torch.testing.assert_close(state[key], value, rtol=1e-10, atol=1e-10)


def test_sharded_parameters_show_shapes_but_no_values_outside_their_unit() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    engine = dplab.parallelize(model, worlds.adamw, "zero3")
    assert sum(p.numel() for p in model.parameters()) == 32
    assert "values not here" in repr(model[0].weight)
    with pytest.raises(StateError, match=r"parameter '0.weight' is used outside its unit, where rank 0 holds only its"):
        torch.isnan(model[0].weight)
    with pytest.raises(StateError, match=r"model.state_dict\(\) has no values while the parameters are sharded; call"):
        model.state_dict()
    with engine.gathered():
        assert not torch.isnan(model[0].weight).any()
        model[0].weight.detach().numpy()
        model[0].weight.data.fill_(2.0)
    assert (engine.full_state_dict()["0.weight"] == 2.0).all()
    engine.backward(engine(torch.ones(1, 3)).sum())
    assert engine.step()


@pytest.mark.parametrize("name", SHARDINGS)
def test_what_rank_0_writes_while_gathered_is_everybodys(name: str) -> None:
    def body() -> torch.Tensor:
        engine = dplab.parallelize(nn.Linear(3, 3), worlds.adamw, name)
        with engine.gathered() as module, torch.no_grad():
            module.weight.fill_(dplab.init().rank + 1.0)
        engine.check_agreement()
        return engine.full_state_dict()["weight"]

    for weight in in_threads(3, body):
        assert (weight == 1.0).all()


@pytest.mark.parametrize("name", SHARDINGS)
def test_h47_wrap_and_drop_leaves_nothing(name: str) -> None:
    import gc
    import weakref

    seen = []
    for _ in range(5):
        engine = dplab.parallelize(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), worlds.adamw, name)
        engine.backward(engine(torch.ones(1, 64)).sum())
        engine.step()
        seen.append(weakref.ref(engine._buckets[0].params.owned))
        del engine
        gc.collect()
    assert [ref() for ref in seen] == [None] * 5


@pytest.mark.parametrize("name", SHARDINGS)
def test_h47_the_models_own_parameters_go_with_it(name: str) -> None:
    """torch's collector does not see through hooks on accumulated gradients: one that held its parameter would leak."""
    import gc
    import weakref

    def body() -> bool:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        engine = dplab.parallelize(model, worlds.adamw, name)
        engine.backward(engine(torch.ones(1, 8)).sum())
        engine.step()
        kept = [weakref.ref(parameter) for parameter in model.parameters()]
        kept += [weakref.ref(run.parameter) for runs in engine._owned.runs for run in runs]
        del engine, model
        gc.collect()
        return all(ref() is None for ref in kept)

    assert all(in_processes(2, body))
