"""What people do to a wrapped model that no hook sees: taken up as plain torch would, or refused by name."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import dplab
from dplab.errors import StateError, UsageError
from dplab.specs import SHARDINGS
from tests import worlds
from tests.worlds import in_processes, in_threads

LOW = [f"{name}{precision}" for name in SHARDINGS for precision in ("", "+bf16")]
CUTTING = ["zero1", "zero2", "zero3"]


class Blocks(nn.Module):
    """Two blocks that are units under zero3, and a root with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = torch.tanh(block(h))
        return h


ONE_AT_A_TIME = threading.Lock()
"""Threads share torch's default generator, from which a model draws its weights."""


def build(kind: type[nn.Module]) -> Any:
    with ONE_AT_A_TIME:
        return kind()


def engine_of(strategy: str, model: nn.Module | None = None, **more: Any) -> dplab.Engine:
    return dplab.parallelize(build(Blocks) if model is None else model, worlds.adamw, strategy, **more)


def train(engine: dplab.Engine, steps: int = 1) -> None:
    rank = dplab.init().rank
    for step in range(steps):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(2 * step + rank))
        engine.backward(engine(x).square().mean())
        assert engine.step()


def refused(size: int, body: Callable[[], Any], error: type[Exception] = StateError) -> list[str]:
    """What every rank was told."""
    def guarded() -> str:
        try:
            body()
        except error as refusal:
            return str(refusal)
        return "nothing was refused"

    return in_threads(size, guarded)


def assign(parameter: torch.Tensor) -> None:
    parameter.data = parameter.detach().clone()


# ---- memory and values that change behind the engine's back


@pytest.mark.parametrize("change", ["assigned", "other dtype", "other format"])
@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2"])
def test_a_parameter_that_was_given_other_memory_is_refused(name: str, change: str) -> None:
    def body() -> None:
        model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(4, 2))
        engine = dplab.parallelize(model, worlds.adamw, name)
        if change == "assigned":
            assign(model[0].weight)
        elif change == "other dtype":
            model.double()
        else:
            model.to(memory_format=torch.channels_last)
        x = torch.ones(1, 3, 2, 2, dtype=model[0].weight.dtype)
        engine.backward(engine(x).sum())
        engine.step()

    for told in refused(2, body):
        # the first by name of those that changed
        changed = "0.bias" if change == "other dtype" else "0.weight"
        assert told.startswith(f"parameter '{changed}' was given other memory after the model was wrapped")
        assert "make the model what it shall be before dplab.parallelize, on every rank" in told


def test_zero3_refuses_other_memory_before_it_computes_with_the_old() -> None:
    def body() -> None:
        engine = engine_of("zero3")
        engine.module.first.weight.data = torch.zeros(6, 4)
        engine(torch.ones(1, 4))

    for rank, told in enumerate(refused(2, body)):
        assert told.startswith("parameter 'first.weight' was given other memory after the model was wrapped")
        assert f"on rank {rank}" in told or "on every rank" in told


@pytest.mark.parametrize("strategy", [s for s in LOW if "zero3" not in s])
@pytest.mark.parametrize("how", ["load_state_dict", "clamp_", "data"])
def test_what_every_rank_writes_alike_counts(strategy: str, how: str) -> None:
    def write(model: nn.Module) -> None:
        if how == "load_state_dict":
            model.load_state_dict({name: torch.full_like(p, 0.25) for name, p in model.state_dict().items()})
        for parameter in model.parameters():
            if how == "clamp_":
                with torch.no_grad():
                    parameter.clamp_(-0.125, 0.125)
            elif how == "data":
                parameter.data.clamp_(-0.125, 0.125)

    def body() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        engine = engine_of(strategy)
        train(engine)
        write(engine.module)
        written = engine.full_state_dict()
        train(engine)
        engine.check_agreement()
        return written, engine.full_state_dict()

    for written, after in in_threads(2, body):
        for name, value in written.items():
            assert value.abs().max() <= 0.25
            # one AdamW step at lr 0.01 moves a weight by little more than 0.01 from what was written
            assert 0 < (after[name] - value).abs().max() < 0.03


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2"])
@pytest.mark.parametrize("where", ["one rank", "other values"])
def test_writes_that_differ_between_ranks_are_refused(name: str, where: str) -> None:
    def body() -> None:
        engine = engine_of(name)
        train(engine)
        rank = dplab.init().rank
        if where == "other values" or rank == 1:
            with torch.no_grad():
                engine.module.blocks[0].weight.fill_(float(rank))
        train(engine)

    for told in refused(2, body):
        assert told.startswith("parameter 'blocks.0.weight' was written to outside the optimizer")
        assert ("on ranks [1] and not on the others" if where == "one rank" else "on every rank") in told
        assert "inside engine.gathered(), where rank 0's values win" in told


@pytest.mark.parametrize("name", SHARDINGS)
def test_an_embedding_that_renormalises_rows_of_its_own_batch_is_refused(name: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Embedding(8, 4, max_norm=0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.embed(x).square().sum()

    def body() -> None:
        engine = engine_of(name, Model())
        rank = dplab.init().rank
        engine.backward(engine(torch.tensor([2 * rank, 2 * rank + 1])))
        engine.step()

    for told in refused(2, body):
        assert told.startswith("parameter 'embed.weight' was written to outside the optimizer")
        assert "Embedding(max_norm=...)" in told


def test_zero3_keeps_what_every_rank_writes_in_the_forward() -> None:
    class Halved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.div_(2.0)
            return x @ self.weight

    def body(strategy: str) -> dict[str, torch.Tensor]:
        engine = engine_of(strategy, nn.Sequential(Halved(), Halved()))
        train(engine, 3)
        return engine.full_state_dict()

    expected = in_threads(2, body, "ddp")[0]
    for state in in_threads(2, body, "zero3"):
        assert all(torch.equal(state[name], value) for name, value in expected.items())


@pytest.mark.parametrize("write", [lambda p: nn.init.constant_(p, 1.0), lambda p: p.detach().zero_(),
                                   lambda p: p.data.clamp_(-1, 1), lambda p: p.data.fill_(0.0)])
def test_zero3_refuses_writes_while_only_a_share_is_there(write: Callable[[nn.Parameter], Any]) -> None:
    def body() -> None:
        write(engine_of("zero3", nn.Linear(4, 1)).module.bias)

    for rank, told in enumerate(refused(2, body)):
        assert told.startswith(f"parameter 'bias' is used outside its unit, where rank {rank} holds only its share")


def test_zero3_refuses_load_state_dict_by_name() -> None:
    def body() -> None:
        engine_of("zero3").module.load_state_dict(Blocks().state_dict())

    for told in refused(2, body):
        assert told.startswith("model.load_state_dict() has nowhere to put values while the parameters are sharded;")
        assert told.endswith("inside engine.gathered()")


# ---- weights used where they are not


class Penalised(Blocks):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).mean() + self.blocks[0].weight.square().sum()


class Borrowed(Blocks):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(super().forward(x), self.blocks[1].weight)


class Encoder(nn.Linear):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


class OtherMethod(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Encoder(6, 6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0].encode(self.first(x))


class Lazily(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:  # a generator runs after its module has returned
        yield nn.functional.linear(x, self.weight)


class Generating(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Lazily(6, 6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return next(self.blocks[0](self.first(x)))


class FrozenTable(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].table = nn.Parameter(torch.arange(6), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[:, self.blocks[0].table]


@pytest.mark.parametrize(("model", "name"), [
    (Penalised, "blocks.0.weight"), (Borrowed, "blocks.1.weight"), (OtherMethod, "blocks.0.weight"),
    (Generating, "blocks.0.weight"), (FrozenTable, "blocks.0.table")])
def test_zero3_refuses_weights_used_outside_their_unit(model: type[Blocks], name: str) -> None:
    def body() -> None:
        engine_of("zero3", build(model))(torch.ones(2, 4))

    for rank, told in enumerate(refused(2, body)):
        assert told.startswith(f"parameter '{name}' is used outside its unit, where rank {rank} holds only its share")
        assert "let parallelize(units=...) gather both together, or read it inside engine.gathered()" in told


def test_zero3_refuses_a_penalty_over_all_weights_outside_the_model() -> None:
    def body() -> None:
        engine = engine_of("zero3")
        loss = engine(torch.ones(2, 4)).sum()
        engine.backward(loss + sum(p.square().sum() for p in engine.module.parameters()))

    assert all("is used outside its unit" in told for told in refused(2, body))


class Keeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight  # what save_for_backward is for
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad @ ctx.weight.T, grad.T @ grad


def test_zero3_refuses_a_weight_kept_past_its_forward() -> None:
    class Keeps(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Keeping.apply(x, self.weight)

    def body() -> None:
        train(engine_of("zero3", nn.Sequential(nn.Linear(4, 4), Keeps(4, 4))))

    assert all("parameter '1.weight' is used outside its unit" in told for told in refused(2, body))


@pytest.mark.parametrize("view", [lambda w: w, lambda w: w.T, lambda w: {"rows": [w[:2]]}])
def test_zero3_refuses_a_unit_that_returns_its_weight(view: Callable[[torch.Tensor], Any]) -> None:
    class Returns(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return view(self.weight)

    def body() -> None:
        engine_of("zero3", nn.Sequential(nn.Linear(4, 4), Returns(4, 4)))(torch.ones(2, 4))

    for told in refused(2, body):
        assert told.startswith("unit '1' returned its own weight '1.weight', or a view of it")


class Tables(nn.Module):
    """Weights in containers that are never called: they belong to the module around them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(4, 4)), "b": nn.Parameter(torch.randn(4))})
        self.listed = nn.ParameterList([nn.Parameter(torch.randn(4, 4))])
        self.groups = nn.ModuleList([nn.ParameterList([nn.Parameter(torch.randn(4))])])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.named["a"] + self.named["b"]) @ self.listed[0] + self.groups[0][0]


@pytest.mark.parametrize("strategy", SHARDINGS)
def test_weights_in_containers_train_like_one_process(strategy: str) -> None:
    def body() -> dict[str, torch.Tensor]:
        engine = engine_of(strategy, Tables())
        train(engine, 3)
        return engine.full_state_dict()

    expected = in_threads(1, body)[0]
    assert any("groups" in name for name in expected)
    plain = Tables()
    optimizer = worlds.adamw(plain.parameters())
    for step in range(3):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(2 * step))
        plain(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(expected[name], value)


def test_zero3_answers_what_does_not_need_values() -> None:
    parameter = engine_of("zero3").module.first.weight
    assert parameter.shape == (6, 4)
    assert parameter.requires_grad
    assert parameter.to(torch.float32) is parameter
    assert torch.zeros_like(parameter).shape == (6, 4)
    assert isinstance(parameter, nn.Parameter)
    engine_of("zero3").module.to("cpu")


# ---- gradients after they were averaged


@pytest.mark.parametrize("name", CUTTING)
@pytest.mark.parametrize("use", [
    lambda ps: nn.utils.clip_grad_norm_(ps, 1.0), lambda ps: nn.utils.clip_grad_value_(ps, 1.0),
    lambda ps: [p.grad.mul_(2) for p in ps], lambda ps: [float(p.grad.norm()) for p in ps]])
def test_averaged_gradients_that_are_cut_refuse_to_be_used(name: str, use: Callable[[list[nn.Parameter]], Any]) -> None:
    def body() -> None:
        engine = engine_of(name)
        engine.backward(engine(torch.ones(2, 4)).sum())
        use(list(engine.module.parameters()))

    for told in refused(2, body):
        assert told.startswith("the averaged gradient of parameter 'first.weight' is not on its .grad under this")
        assert "clip with engine.clip_grad_norm_(...)" in told


@pytest.mark.parametrize("name", CUTTING)
def test_a_gradient_assigned_where_it_would_be_ignored_is_refused(name: str) -> None:
    def body() -> None:
        engine = engine_of(name)
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.module.first.weight.grad = torch.zeros(6, 4)
        engine.step()

    assert all(told.startswith("the .grad of parameter 'first.weight' was assigned after backward")
               for told in refused(2, body))


@pytest.mark.parametrize("name", SHARDINGS)
@pytest.mark.parametrize("edit", ["dropped", "replaced", "in place"])
def test_edits_of_averaged_gradients_count_where_plain_torch_lets_them(name: str, edit: str) -> None:
    if edit != "dropped" and name != "ddp":
        return  # refused: the tests above

    def change(model: nn.Module) -> None:
        weight = model.first.weight
        if edit == "dropped":
            weight.grad = None
        elif edit == "replaced":
            weight.grad = weight.grad * 3
        else:
            weight.grad.mul_(3)

    def body() -> dict[str, torch.Tensor]:
        engine = dplab.parallelize(build(Blocks), lambda ps: torch.optim.SGD(ps, lr=0.1, weight_decay=0.1), name)
        engine.backward(engine(torch.ones(2, 4)).sum())
        change(engine.module)
        assert engine.step()
        return engine.full_state_dict()

    plain = Blocks()
    plain(torch.ones(2, 4)).sum().backward()
    change(plain)
    torch.optim.SGD(plain.parameters(), lr=0.1, weight_decay=0.1).step()
    for state in in_threads(2, body):
        for key, value in plain.state_dict().items():
            torch.testing.assert_close(state[key], value)


# ---- optimizers


class GlobalNorm(torch.optim.SGD):
    """Scales by the norm over all gradients, as LARS-like and normalised optimizers do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))
        for grad in grads:
            grad.div_(norm)
        return super().step(closure)


class OwnList(torch.optim.SGD):
    """Steps a list of its own; the groups are for show."""

    def __init__(self, params: Any, lr: float) -> None:
        params = list(params)
        super().__init__(params, lr=lr)
        self.mine = params

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.mine:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad)


@pytest.mark.parametrize("name", CUTTING)
def test_an_optimizer_that_looks_at_all_gradients_together_is_refused(name: str) -> None:
    def body() -> None:
        dplab.parallelize(Blocks(), lambda ps: GlobalNorm(ps, lr=0.1), name)

    assert all("optimizer GlobalNorm is not element-wise" in told for told in refused(2, body, UsageError))


@pytest.mark.parametrize("name", SHARDINGS)
def test_an_optimizer_that_ignores_its_groups_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="optimizer OwnList does not move the parameters that stand in its param"):
        dplab.parallelize(Blocks(), lambda ps: OwnList(ps, lr=0.1), name)


@pytest.mark.parametrize("name", SHARDINGS)
def test_a_warm_up_that_starts_at_nothing_is_no_optimizer_that_moves_nothing(name: str) -> None:
    engine = dplab.parallelize(Blocks(), lambda ps: torch.optim.AdamW(ps, lr=0.0), name)
    before = engine.full_state_dict()
    train(engine)
    assert all(torch.equal(before[key], value) for key, value in engine.full_state_dict().items())


# ---- wrapping, copying, gathering


@pytest.mark.parametrize("name", SHARDINGS)
def test_a_model_is_wrapped_once(name: str) -> None:
    engine = engine_of(name)
    with pytest.raises(UsageError, match=r"parameter 'first.weight' is in a model that was wrapped already; wrap a"):
        engine_of("ddp", engine.module)
    with pytest.raises(UsageError, match=r"parameter '0.weight' is in a model that was wrapped already"):
        engine_of("ddp", nn.Sequential(engine.module.first))


@pytest.mark.parametrize("name", SHARDINGS)
@pytest.mark.parametrize("make", [copy.deepcopy, pickle.dumps, AveragedModel])
def test_a_wrapped_model_is_not_copied(name: str, make: Callable[[nn.Module], Any]) -> None:
    engine = engine_of(name)
    with pytest.raises(StateError, match=r"Blocks is wrapped by dplab.parallelize and cannot be copied or pickled;"):
        make(engine.module)


def test_weights_averaged_beside_a_sharded_model() -> None:
    def body() -> tuple[Any, ...]:
        model = Blocks()
        averaged = AveragedModel(model)
        engine = engine_of("zero3", model)
        for _ in range(2):
            train(engine)
            with engine.gathered():
                averaged.update_parameters(model)
        return averaged.module.state_dict(), engine.full_state_dict()

    for average, latest in in_threads(2, body):
        assert all(torch.isfinite(value).all() for value in average.values())
        assert any(not torch.equal(value, latest[name]) for name, value in average.items())


@pytest.mark.parametrize("name", SHARDINGS)
def test_the_weights_do_not_move_while_they_are_gathered(name: str) -> None:
    def body() -> None:
        engine = engine_of(name)
        engine.backward(engine(torch.ones(1, 4)).sum())
        with engine.gathered():
            engine.step()

    assert all(told.startswith("engine.step() was called inside engine.gathered()") for told in refused(2, body))
    engine = engine_of(name)
    with engine.gathered(), pytest.raises(StateError, match=r"was entered inside engine.gathered"), engine.gathered():
        pass


@pytest.mark.parametrize("name", SHARDINGS)
def test_forwards_and_exports_inside_gathered(name: str) -> None:
    def body() -> None:
        engine = engine_of(name)
        x = torch.ones(2, 4)
        with engine.gathered() as model:
            with torch.no_grad():
                inside = engine(x)
            assert all(torch.equal(value, engine.full_state_dict()[key]) for key, value in model.state_dict().items())
            assert torch.isfinite(model.blocks[0].weight).all()
            engine.backward(engine(x).sum())
            assert torch.isfinite(model.blocks[0].weight).all()
        assert engine.step()
        assert not torch.equal(engine(x), inside)
        train(engine, 2)

    in_threads(2, body)


@pytest.mark.parametrize("name", SHARDINGS)
def test_models_that_cannot_be_laid_out_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"parameter '0.weight' has no shape yet \(a lazy module\); run the model"):
        engine_of(name, nn.Sequential(nn.LazyLinear(3)))
    with torch.inference_mode():
        model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"parameter 'weight' was made under torch.inference_mode"):
        engine_of(name, model)


@pytest.mark.parametrize(("buffer", "said"), [
    (torch.ones(1).expand(3), r"buffer 'odd' is an expanded view, .*; register its contiguous\(\)$"),
    (torch.ones(3, dtype=torch.cfloat).conj(), r"is a conjugated view, .*its resolve_conj\(\).resolve_neg\(\)$"),
    (torch.ones(3, dtype=torch.cfloat).conj().imag, r"is a negated view, "),
    (torch.eye(3).to_sparse(), r"buffer 'odd' is torch.sparse_coo, .*; register its to_dense\(\)$"),
])
def test_buffers_that_cannot_be_made_equal_are_refused(buffer: torch.Tensor, said: str) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("odd", buffer)
    with pytest.raises(UsageError, match=said):
        engine_of("ddp", model)


# ---- torch.compile


@pytest.mark.parametrize("how", ["torch.compile", "module.compile"])
@pytest.mark.parametrize("strategy", [*SHARDINGS, "zero3+bf16", "zero2+amp-bf16+accum2"])
def test_compiled_units_equal_eager_ones(strategy: str, how: str) -> None:
    def body(compiled: bool) -> dict[str, torch.Tensor]:
        torch._dynamo.reset()
        model = Blocks()
        for place, block in enumerate(model.blocks):
            if compiled and how == "torch.compile":
                model.blocks[place] = torch.compile(block, backend="aot_eager")
            elif compiled:
                block.compile(backend="aot_eager")
        engine = engine_of(strategy, model)
        for step in range(4):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(2 * step + dplab.init().rank))
            engine.backward(engine(x).square().mean())
            engine.step()
        engine.check_agreement()
        assert engine.full_grad("blocks.0.weight") is None
        return engine.full_state_dict()

    eager, compiled = (in_processes(2, body, each) for each in (False, True))
    for state, other in zip(eager, compiled, strict=True):
        assert list(state) == list(Blocks().state_dict()) == list(other)
        for name, value in state.items():
            torch.testing.assert_close(other[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["ddp", "zero2"])
def test_a_model_compiled_whole_equals_an_eager_one(name: str) -> None:
    def body(compiled: bool) -> dict[str, torch.Tensor]:
        model = Blocks()
        if compiled:
            model.compile(backend="aot_eager")
        engine = engine_of(name, model)
        train(engine, 3)
        return engine.full_state_dict()

    eager, compiled = (in_processes(2, body, each) for each in (False, True))
    for state, other in zip(eager, compiled, strict=True):
        for key, value in state.items():
            torch.testing.assert_close(other[key], value, rtol=1e-5, atol=1e-6)


def test_zero3_points_from_a_model_compiled_whole_to_its_units() -> None:
    model = Blocks()
    model.compile(backend="aot_eager")
    with pytest.raises(UsageError, match=r"a model compiled as a whole runs as one; compile its units instead"):
        engine_of("zero3", model)
    with pytest.raises(UsageError, match=r"a model compiled as a whole runs as one"):
        engine_of("zero3", torch.compile(Blocks(), backend="aot_eager"))
    with pytest.raises(StateError, match=r"model.compile\(\) after dplab.parallelize would take the gathers into"):
        engine_of("zero3").module.compile()


def test_a_module_really_called_like_a_wrapper_keeps_its_name() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._orig_mod = nn.Linear(2, 2)
            self.module = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.module(self._orig_mod(x))

    assert list(engine_of("zero2", Odd()).full_state_dict()) == list(Odd().state_dict())


# ---- low precision and what stays in fp32


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.parametrize("name", SHARDINGS)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_batchnorm_keeps_its_dtype_in_low_precision(name: str, precision: str) -> None:
    def body(strategy: str) -> dict[str, torch.Tensor]:
        engine = dplab.parallelize(build(Normed), lambda ps: torch.optim.SGD(ps, lr=0.05), strategy)
        moved = 0
        while moved < 5:  # fp16 skips some while its scale comes down
            x = torch.randn(16, 4, generator=torch.Generator().manual_seed(2 * moved + dplab.init().rank))
            engine.backward((engine(x).float() - x.sum(1, keepdim=True)).square().mean())
            moved += engine.step()
        engine.check_agreement()
        return engine.full_state_dict()

    exact = in_threads(2, body, name)[0]
    for state in in_threads(2, body, f"{name}+{precision}"):
        assert state["layers.1.running_var"].dtype == state["layers.1.weight"].dtype == torch.float32
        for key, value in exact.items():
            # a step that is skipped has counted in the running statistics, as in plain torch
            if precision == "bf16" or key in dict(build(Normed).named_parameters()):
                torch.testing.assert_close(state[key].float(), value.float(), rtol=0.05, atol=0.03)


def test_a_float_buffer_beside_low_precision_weights_is_named() -> None:
    class Shifted(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("shift", torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + self.shift)

    engine = engine_of("zero2+bf16", Shifted())
    with pytest.raises(RuntimeError) as caught:
        engine(torch.ones(2, 4))
    assert "these buffers are not: 'shift' (float32)" in caught.value.__notes__[0]
    assert "choose 'amp-bf16'" in caught.value.__notes__[0]
