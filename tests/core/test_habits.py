"""What people do around an engine in plain torch's habit: it counts as there, or is refused by name."""

from __future__ import annotations

import copy
import io
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import dplab
from dplab.errors import StateError, UsageError, WireError
from dplab.specs import SHARDINGS
from tests import worlds
from tests.core.test_refusals import Blocks, build, refused
from tests.worlds import in_processes, in_threads

CUTTING = ["zero1", "zero2", "zero3"]
BATCHES = torch.randn(2, 6, 3, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
"""rank, step, sample, feature"""


SEEDED = threading.RLock()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def blocks() -> nn.Module:
    return build(Blocks).double()


def loop(model: nn.Module, optimizer: Any, ranks: list[int], backward: Callable[[torch.Tensor], Any],
         step: Callable[[], Any], habit: Callable[..., None], steps: int = 4) -> dict[str, torch.Tensor]:
    """Four steps of the mean over `ranks`; `habit(moment, model, optimizer, step)` is what the user does besides."""
    habit("start", model, optimizer, 0)
    for at in range(steps):
        backward(sum(model(BATCHES[rank, at]).square().mean() for rank in ranks) / len(ranks))
        habit("backward", model, optimizer, at)
        step()
        habit("step", model, optimizer, at)
    return model.state_dict(keep_vars=True)


def wrapped(strategy: str, habit: Callable[..., None], make: Callable[[Any], torch.optim.Optimizer] = sgd,
            model: nn.Module | None = None) -> dict[str, torch.Tensor]:
    engine = dplab.parallelize(copy.deepcopy(model) if model is not None else blocks(), make, strategy)
    loop(engine.module, engine.optimizer, [engine.world.rank], engine.backward, engine.step, habit)
    engine.check_agreement()
    return engine.full_state_dict()


def plain(habit: Callable[..., None], make: Callable[[Any], torch.optim.Optimizer] = sgd,
          model: nn.Module | None = None) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(model) if model is not None else blocks()
    optimizer = make(model.parameters())

    def backward(loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()

    loop(model, optimizer, [0, 1], backward, optimizer.step, habit)
    return {name: value.detach() for name, value in model.state_dict().items()}


def equal(strategy: str, habit: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    expected = plain(habit, *args, **kwargs)
    for state in in_threads(2, wrapped, strategy, habit, *args, **kwargs):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-12)


def nothing(*_: Any) -> None:
    pass


# ---- gathered weights that outlive the gathering


def test_what_is_kept_of_gathered_weights_stays() -> None:
    def body() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        engine = dplab.parallelize(blocks(), sgd, "zero3")
        with engine.gathered() as model:
            state, bare = model.state_dict(), {name: p.data for name, p in model.named_parameters()}
        before = engine.full_state_dict()
        engine.backward(engine(BATCHES[engine.world.rank, 0]).square().mean())
        engine.step()
        stream = io.BytesIO()
        torch.save(state, stream)
        stream.seek(0)
        return before, bare, torch.load(stream)

    for before, bare, loaded in in_threads(2, body):
        assert all(torch.equal(loaded[name], value) for name, value in before.items())
        assert all(torch.equal(bare[name], value) for name, value in before.items())


@pytest.mark.parametrize("strategy", SHARDINGS)
def test_an_evaluation_between_a_loss_and_its_backward(strategy: str) -> None:
    def train(model: nn.Module, ranks: list[int], backward: Any, step: Any) -> None:
        for at in range(3):
            loss = sum(model(BATCHES[rank, at]).square().mean() for rank in ranks) / len(ranks)
            # a penalty on the root's weights, which autograd saves where no hook of a unit sees it
            loss = loss + 0.1 * model.first.weight.square().sum()
            with torch.no_grad():
                model(BATCHES[0, 5])
            backward(loss)
            step()

    def body() -> dict[str, torch.Tensor]:
        engine = dplab.parallelize(blocks(), sgd, strategy)
        train(engine.module, [engine.world.rank], engine.backward, engine.step)
        return engine.full_state_dict()

    reference = blocks()
    optimizer = sgd(reference.parameters())

    def backward(loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()

    train(reference, [0, 1], backward, optimizer.step)
    for state in in_threads(2, body):
        for name, value in reference.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("strategy", SHARDINGS)
def test_a_second_derivative_with_a_forward_in_between(strategy: str) -> None:
    def body() -> torch.Tensor:
        engine = dplab.parallelize(blocks(), sgd, strategy)
        x = BATCHES[engine.world.rank, 0].clone().requires_grad_()
        slope, = torch.autograd.grad(engine(x).sum(), x, create_graph=True)
        with torch.no_grad():
            engine(BATCHES[0, 1])
        engine.backward(slope.square().sum())
        value = engine.full_grad("first.weight")
        assert value is not None
        return value

    model = blocks()
    for rank in range(2):
        x = BATCHES[rank, 0].clone().requires_grad_()
        slope, = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (slope.square().sum() / 2).backward()
    for value in in_threads(2, body):
        torch.testing.assert_close(value, model.first.weight.grad, rtol=1e-10, atol=1e-12)


class Late(Blocks):
    """A penalty on a unit's weight that begins when that unit is prefetched already."""

    late = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        penalty = self.blocks[0].weight.square().sum() if self.late else 0
        for block in self.blocks:
            h = torch.tanh(block(h))
        return h + penalty


@pytest.mark.parametrize("prefetch", ["true", "false"])
def test_weights_on_their_way_cannot_be_read(prefetch: str) -> None:
    def body() -> None:
        engine = dplab.parallelize(build(Late).double(), sgd, f"zero3+prefetch={prefetch}")
        for at in range(4):
            engine.backward(engine(BATCHES[engine.world.rank, at]).square().mean())
            engine.step()
            engine.module.late = True

    assert all("parameter 'blocks.0.weight' is used outside its unit" in told for told in refused(2, body))


@pytest.mark.parametrize("strategy", SHARDINGS)
def test_reading_gathered_weights_between_forward_and_backward(strategy: str) -> None:
    norms: list[float] = []

    def body() -> dict[str, torch.Tensor]:
        engine = dplab.parallelize(blocks(), sgd, strategy)
        for at in range(4):
            loss = engine(BATCHES[engine.world.rank, at]).square().mean()
            with engine.gathered() as model:
                norms.append(float(sum(p.detach().norm() for p in model.parameters())))
            engine.backward(loss)
            engine.step()
        return engine.full_state_dict()

    expected = plain(nothing)
    for state in in_threads(2, body):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-12)


# ---- what stands in param_groups


@pytest.mark.parametrize("strategy", [*SHARDINGS, "ddp+bf16", "zero3+bf16"])
@pytest.mark.parametrize("use", [
    lambda ps: nn.utils.clip_grad_norm_(ps, 0.05), lambda ps: [p.grad.mul_(2) for p in ps],
    lambda ps: [p.detach().clamp_(-0.2, 0.2) for p in ps], lambda ps: float(ps[0].sum())])
def test_pieces_in_param_groups_refuse_to_be_used(strategy: str, use: Callable[[list[Any]], Any]) -> None:
    def body() -> None:
        engine = dplab.parallelize(build(Blocks), sgd, strategy)
        engine.backward(engine(BATCHES[engine.world.rank, 0].float()).float().sum())
        with torch.no_grad():
            use([p for group in engine.optimizer.param_groups for p in group["params"]])

    for rank, told in enumerate(refused(2, body)):
        assert "is not on its .grad under this strategy" in told or told.startswith(
            f"what stands in the optimizer's param_groups is what rank {rank} steps, laid flat (")
        assert "engine.clip_grad_norm_(...)" in told


@pytest.mark.parametrize("strategy", SHARDINGS)
def test_a_step_hook_that_clips_pieces_is_refused(strategy: str) -> None:
    def body() -> None:
        engine = dplab.parallelize(blocks(), sgd, strategy)
        clip = lambda o, *_: nn.utils.clip_grad_norm_(o.param_groups[0]["params"], 0.1)  # noqa: E731
        engine.optimizer.register_step_pre_hook(clip)
        engine.backward(engine(BATCHES[engine.world.rank, 0]).sum())
        engine.step()

    assert all("clip with engine.clip_grad_norm_(...)" in told for told in refused(2, body))


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "ddp+bf16", "zero2+bf16"])
def test_step_hooks_see_everybodys_weights_and_may_write_to_them(strategy: str) -> None:
    seen: dict[int, list[float]] = {0: [], 1: []}

    def body() -> dict[str, torch.Tensor]:
        engine = dplab.parallelize(build(Blocks), sgd, strategy)
        rank = engine.world.rank

        def after(*_: Any) -> None:
            with torch.no_grad():
                for parameter in engine.module.parameters():
                    parameter.clamp_(-0.25, 0.25)
            seen[rank].append(float(sum(p.detach().double().sum() for p in engine.module.parameters())))

        engine.optimizer.register_step_post_hook(after)
        for at in range(3):
            engine.backward(engine(BATCHES[rank, at].float()).float().square().mean())
            engine.step()
        engine.check_agreement()
        return engine.full_state_dict()

    for state in in_threads(2, body):
        # a master copy keeps the digits that rounded to the bound
        assert all(value.abs().max() <= 0.25 * (1 + 2**-8) for value in state.values())
    assert seen[0] == seen[1]
    assert len(set(seen[0])) == 3


@pytest.mark.parametrize("strategy", SHARDINGS)
def test_wrapping_runs_no_hook_and_draws_no_number(strategy: str) -> None:
    model, calls = blocks(), []
    optimizer = sgd(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    drawn = torch.get_rng_state()
    engine = dplab.parallelize(model, optimizer, strategy)
    assert calls == []
    assert torch.equal(drawn, torch.get_rng_state())
    engine.backward(engine(BATCHES[0, 0]).sum())
    engine.step()
    assert calls == ["before", "after"]


class BySize(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for place, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=self.rate(place, parameter))

    def rate(self, place: int, parameter: torch.Tensor) -> float:
        return 0.1 if parameter.numel() < 10 else 0.01


class ByPlace(BySize):
    def rate(self, place: int, parameter: torch.Tensor) -> float:
        return 0.1 / (place + 1)


@pytest.mark.parametrize("kind", [BySize, ByPlace])
def test_optimizers_that_look_at_sizes_and_places_keep_whole_parameters_in_the_users_order(kind: Any) -> None:
    make = lambda ps: kind(ps, lr=0.1)  # noqa: E731
    equal("ddp", nothing, make)
    for strategy in CUTTING:
        with pytest.raises(UsageError, match=f"optimizer {kind.__name__} is not element-wise"):
            in_threads(2, wrapped, strategy, nothing, make)


# ---- gradients


@pytest.mark.parametrize("edit", ["in place", "assigned", "dropped"])
@pytest.mark.parametrize("before", [True, False], ids=["before-wrap", "after-wrap"])
@pytest.mark.parametrize("strategy", worlds.STRATEGIES)
def test_hooks_on_accumulated_gradients_count_whenever_they_were_registered(strategy: str, before: bool,
                                                                            edit: str) -> None:
    def change(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        if edit == "in place":
            parameter.grad.mul_(2)
        else:
            parameter.grad = None if edit == "dropped" else parameter.grad * 2

    def hook(model: nn.Module) -> None:
        for parameter in list(model.parameters())[::2]:
            parameter.register_post_accumulate_grad_hook(change)

    def body() -> dict[str, torch.Tensor]:
        model = blocks()
        if before:
            hook(model)
        engine = dplab.parallelize(model, sgd, strategy)
        if not before:
            hook(model)
        loop(engine.module, engine.optimizer, [engine.world.rank], engine.backward, engine.step, nothing)
        return engine.full_state_dict()

    def by_hand(when: str, model: nn.Module, _optimizer: Any, _step: int) -> None:
        if when == "backward":
            for parameter in list(model.parameters())[::2]:
                change(parameter)

    expected = plain(by_hand)
    for state in in_threads(2, body):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("strategy", SHARDINGS)
def test_a_layers_gradients_dropped_between_two_backwards(strategy: str) -> None:
    def habit(when: str, model: nn.Module, _optimizer: Any, step: int) -> None:
        if when == "backward" and step == 1:
            model.blocks[0].zero_grad()
            ranks = [dplab.init().rank] if dplab.init().size > 1 else [0, 1]
            (sum(model(BATCHES[rank, 5]).square().mean() for rank in ranks) / len(ranks)).backward()

    equal(strategy, habit)


@pytest.mark.parametrize("strategy", SHARDINGS)
def test_gradients_assigned_without_a_backward_are_refused(strategy: str) -> None:
    def body() -> None:
        engine = dplab.parallelize(blocks(), sgd, strategy)
        with engine.gathered() as model:
            weight = model.first.weight
        weight.grad = torch.ones(6, 4, dtype=torch.float64)
        engine.step()

    for told in refused(2, body):
        assert told.startswith("the .grad of parameter 'first.weight' was assigned without a backward")


@pytest.mark.parametrize("strategy", SHARDINGS)
def test_gradients_asked_for_by_parameter(strategy: str) -> None:
    def habit(when: str, model: nn.Module, _optimizer: Any, step: int) -> None:
        if when == "step" and step == 1:
            loss = model(BATCHES[0, 5]).square().mean()
            slopes = torch.autograd.grad(loss, [model.first.weight, model.blocks[1].bias])
            assert all(torch.isfinite(slope).all() for slope in slopes)

    equal(strategy, habit)


@pytest.mark.parametrize("strategy", SHARDINGS)
def test_a_function_that_has_no_gradient_to_give(strategy: str) -> None:
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(weight)
            return x @ weight.T

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return grad @ ctx.saved_tensors[0], None

    class Fixed(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Half.apply(x, self.weight) + self.bias

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), Fixed(6, 6)).double()
    equal(strategy, nothing, model=model)


# ---- ranks that do different things


@pytest.mark.parametrize("strategy", SHARDINGS)
def test_a_scheduler_that_follows_its_own_ranks_loss_is_refused(strategy: str) -> None:
    def body() -> None:
        engine = dplab.parallelize(blocks(), sgd, strategy)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(engine.optimizer, patience=0)
        for at in range(4):
            engine.backward(engine(BATCHES[engine.world.rank, at]).square().mean())
            engine.step()
            scheduler.step(float(at if engine.world.rank else -at))

    for told in refused(2, body):
        assert told.startswith("option 'lr' of the optimizer's group 0 is 0.1, 0.01")


@pytest.mark.parametrize("call", ["gathered", "full_state_dict", "check_agreement"])
@pytest.mark.parametrize("strategy", ["ddp", "zero2+bf16", "zero3"])
def test_what_all_ranks_must_call_names_those_that_do_not(strategy: str, call: str) -> None:
    def body() -> str:
        from dplab.core import full

        engine = dplab.parallelize(build(Blocks), sgd, strategy)
        waits, full.LATE = full.LATE, 0.5
        told = ""
        try:
            if engine.world.rank == 0:
                if call == "gathered":
                    with engine.gathered():
                        pass
                else:
                    getattr(engine, call)()
        except WireError as error:
            told = str(error)
        full.LATE = waits
        # and nothing is out of step afterwards
        engine.backward(engine(BATCHES[engine.world.rank, 0].float()).float().sum())
        assert engine.step()
        engine.check_agreement()
        return told

    told, others = in_processes(2, body)
    assert told.startswith(f"engine.{call}() is collective, and rank 1 has not called it within 0.5 s; call it")
    assert others == ""


# ---- interrupts, transforms, arguments


@pytest.mark.parametrize("strategy", ["ddp+amp-bf16", "zero3+amp-bf16"])
def test_an_interrupted_forward_leaves_nothing_switched_on(strategy: str) -> None:
    class Slow(nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Slow.calls += 1
            if Slow.calls == 1:
                raise KeyboardInterrupt
            return super().forward(x)

    engine = dplab.parallelize(nn.Sequential(nn.Linear(4, 6), Slow(6, 2)), sgd, strategy)
    with pytest.raises(KeyboardInterrupt):
        engine(torch.randn(3, 4))
    assert not torch.is_autocast_enabled("cpu")
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    engine.backward(engine(torch.randn(3, 4)).float().sum())
    assert engine.step()
    if "zero3" in strategy:
        with pytest.raises(StateError, match="is used outside its unit"):
            engine.module[0].weight.sum()


@pytest.mark.parametrize("strategy", SHARDINGS)
def test_transforms_of_torch_func_work_or_are_refused(strategy: str) -> None:
    engine = dplab.parallelize(blocks(), sgd, strategy)
    if strategy == "zero3":
        with pytest.raises(StateError, match=r"inside a transform of torch.func \(vmap, grad\), which cannot follow"):
            torch.func.vmap(engine)(BATCHES[0])
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(torch.func.vmap(engine)(BATCHES[0]), engine.module(BATCHES[0]))
    engine.backward(engine(BATCHES[0, 0]).sum())
    assert engine.step()


def normed(kind: str) -> nn.Module:
    model = blocks()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == "weight_norm":
            nn.utils.weight_norm(model.blocks[0])
        elif kind == "spectral_norm":
            nn.utils.spectral_norm(model.blocks[0])
        else:
            prune.l1_unstructured(model.blocks[0], "weight", 0.5)
    return model


@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm", "prune"])
@pytest.mark.parametrize("strategy", CUTTING)
def test_weights_that_a_hook_of_torchs_computes(strategy: str, kind: str) -> None:
    def body(which: str) -> dict[str, torch.Tensor]:
        with SEEDED:      # a start vector is drawn as well
            torch.manual_seed(7)
            model = normed(kind)
        engine = dplab.parallelize(model, sgd, which)
        loop(engine.module, engine.optimizer, [engine.world.rank], engine.backward, engine.step, nothing)
        return engine.full_state_dict()

    states, expected = (in_threads(2, body, which) for which in (strategy, "ddp"))
    assert all(torch.equal(states[0][name], value) for name, value in expected[0].items())
    assert any(not torch.equal(value, normed(kind).state_dict()[name]) for name, value in expected[0].items())


@pytest.mark.parametrize(("call", "message"), [
    (lambda e: e.clip_grad_norm_("1"), r"clip_grad_norm_\(max_norm='1'\) is not allowed; it is a number >= 0"),
    (lambda e: e.clip_grad_norm_(-1.0), r"clip_grad_norm_\(max_norm=-1.0\) is not allowed"),
    (lambda e: e.clip_grad_norm_(1.0, 0), r"clip_grad_norm_\(norm_type=0\) is not allowed; it is a number > 0, or inf"),
    (lambda e: e.backward(e(BATCHES[0, 0]).sum(), weight="3"), r"engine.backward\(weight='3'\): the weight is a")])
def test_arguments_that_are_no_numbers(call: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call(dplab.parallelize(blocks(), sgd, "zero2"))
