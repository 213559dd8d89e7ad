"""What `parallelize` and the engine refuse, in words; and that ranks start out equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dplab
from dplab.errors import RunStopped, StateError, UsageError
from dplab.specs import SHARDINGS
from dplab.telemetry import recorder
from dplab.telemetry.recorder import Recorder
from tests.worlds import in_threads


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize(("make", "kwargs", "message"), [
    (lambda: nn.Linear(2, 2), {"strategy": "zero4"},
     "strategy 'zero4' is not known (did you mean 'zero3'?); use one of ddp, zero1, zero2, zero3"),
    (lambda: nn.Linear(2, 2), {"strategy": "zero3+recompute"},
     "strategy recompute=full: Linear has no unit that could be computed again; name modules in parallelize(units="),
    (lambda: nn.Linear(2, 2), {"strategy": 3}, "strategy 3 is of type int; give a name such as 'zero2'"),
    (lambda: nn.ReLU(), {}, "model ReLU has no trainable parameter; set requires_grad"),
    (lambda: nn.Linear(2, 2).requires_grad_(False), {}, "model Linear has no trainable parameter"),
    (lambda: nn.Linear(2, 2).bfloat16(), {},
     "parameter 'weight' is bfloat16; without a master copy small updates of it round away"),
    (lambda: nn.Linear(2, 2, dtype=torch.complex64), {},
     "parameter 'weight' is complex64; hold its real and imaginary parts as one real parameter"),
    (lambda: "model", {}, "model is a str; parallelize takes a torch.nn.Module"),
    (lambda: nn.Linear(2, 2), {"strategy": "zero3", "units": [nn.GRU]}, "units: no module of the model is"),
    (lambda: nn.Linear(2, 2), {"strategy": "zero3", "units": ["blocks"]}, "no module of the model is 'blocks'"),
])
def test_what_cannot_be_wrapped_is_refused_by_name(make: Any, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        dplab.parallelize(make(), sgd, **kwargs)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", SHARDINGS)
def test_h17_a_model_of_only_empty_parameters_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="has no trainable parameter"):
        dplab.parallelize(nn.Linear(4, 0, bias=False), sgd, name)


def test_ddp_takes_a_mesh_without_shards_only() -> None:
    in_threads(2, lambda: dplab.parallelize(nn.Linear(2, 2), sgd, "ddp", mesh=(2, 1)))
    with pytest.raises(UsageError, match="strategy ddp shards nothing, and the mesh has a shard axis of 2; leave mesh"):
        in_threads(2, lambda: dplab.parallelize(nn.Linear(2, 2), sgd, "ddp", mesh=(1, 2)))


def test_the_run_and_the_program_may_not_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPLAB_STRATEGY", "zero2")
    assert dplab.parallelize(nn.Linear(2, 2), sgd).strategy == dplab.Strategy.parse("zero2")
    assert dplab.parallelize(nn.Linear(2, 2), sgd, "zero2").strategy == dplab.Strategy.parse("zero2")
    with pytest.raises(UsageError, match="given strategy 'ddp' and the run was launched with 'zero2'; leave one"):
        dplab.parallelize(nn.Linear(2, 2), sgd, "ddp")


@pytest.mark.parametrize(("loss", "message"), [
    (lambda e: e(torch.ones(1, 2)), "takes a scalar loss; got a tensor of shape (1, 2)"),
    (lambda e: 3.0, "takes a scalar loss; got a float")])
def test_a_loss_that_is_none_is_refused(loss: Any, message: str) -> None:
    engine = dplab.parallelize(nn.Linear(2, 2), sgd)
    with pytest.raises(UsageError) as caught:
        engine.backward(loss(engine))
    assert message in str(caught.value)
    with pytest.raises(UsageError, match=r"engine.backward\(weight=-1\): the weight is a number of tokens"):
        engine.backward(torch.zeros(()), weight=-1)
    with pytest.raises(UsageError, match="parameter 'x' is not in the model; names are as in"):
        engine.full_grad("x")


def test_h45_ranks_with_different_models_are_told_where() -> None:
    with pytest.raises(UsageError, match=r"the ranks hold different models: rank 0 has parameter .*\(2, 2\).*rank 1"):
        in_threads(2, lambda: dplab.parallelize(nn.Linear(2, 2 + dplab.init().rank), sgd))

    def longer() -> None:
        layers = [nn.Linear(2, 2) for _ in range(1 + dplab.init().rank)]
        dplab.parallelize(nn.Sequential(*layers), sgd)

    with pytest.raises(UsageError, match=r"rank 0 has 2 parameters, rank 1 has 4; build the same model on every rank"):
        in_threads(2, longer)


class Different(nn.Module):
    """Another value on every rank, in parameters and in buffers of several kinds."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 4)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("steps", torch.tensor(rank))
        self.register_buffer("mask", torch.tensor([[True, False], [False, rank == 0]]).T)
        for value in (*self.parameters(),):
            nn.init.constant_(value, float(rank + 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).sum()


@pytest.mark.parametrize("mesh", [None, (2, 2)])
@pytest.mark.parametrize("name", SHARDINGS)
def test_h45_ranks_start_from_rank_0s_weights_and_buffers(name: str, mesh: Any) -> None:
    if name == "ddp" and mesh is not None:
        pytest.skip("ddp takes no mesh")

    def body() -> dict[str, torch.Tensor]:
        engine = dplab.parallelize(Different(dplab.init().rank), sgd, name, mesh=mesh)
        engine.check_agreement()
        return engine.full_state_dict()

    expected = Different(0).state_dict()
    for state in in_threads(4, body):
        assert list(state) == list(expected)
        for key, value in state.items():
            assert torch.equal(value, expected[key]), key


def test_a_rank_that_wrote_outside_is_named() -> None:
    def body() -> None:
        engine = dplab.parallelize(nn.Linear(2, 2), sgd, "ddp")
        if dplab.init().rank == 2:
            engine.module.weight.data.add_(1)
        with pytest.raises(StateError):
            engine.check_agreement()
        engine.check_agreement()  # looking repairs nothing

    with pytest.raises(StateError, match=r"parameter 'weight' differs between rank 0 and ranks \[2\]"):
        in_threads(3, body)


class Stopping(Recorder):
    """Somebody asks for the end of the run while the third step is under way, and only rank 1 has heard."""

    def __init__(self) -> None:
        self.spans: list[str] = []

    def span(self, kind: str, name: str, t0: int, t1: int, **attrs: Any) -> None:
        assert t0 <= t1
        self.spans.append(kind)

    def stop_requested(self) -> bool:
        return self.step == 2 and dplab.init().rank == 1


@pytest.mark.parametrize("name", SHARDINGS)
def test_all_ranks_stop_at_the_same_step(name: str) -> None:
    def body() -> tuple[int, set[str]]:
        recorder.install(mine := Stopping())
        engine = dplab.parallelize(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), sgd, name)

        def loop() -> None:
            for _ in range(9):
                engine.backward(engine(torch.ones(1, 2)).sum())
                engine.step()

        with pytest.raises(RunStopped, match="asked to stop; it ended after step 3"):
            loop()
        engine.check_agreement()
        return mine.step, set(mine.spans)

    kinds = {"step", "forward", "backward", "optimizer", "collective"}
    kinds |= {"unshard", "reshard"} if name == "zero3" else set()
    assert in_threads(2, body) == [(3, kinds)] * 2


@pytest.mark.parametrize("name", SHARDINGS)
def test_frozen_parameters_stay_and_cost_no_gradient(name: str) -> None:
    def body() -> tuple[dict[str, torch.Tensor], int]:
        engine = dplab.parallelize(Different(0), sgd, name)
        engine.backward(engine(torch.ones(1, 2)))
        engine.step()
        return engine.full_state_dict(), engine.memory()["grads"]

    for state, grads in in_threads(2, body):
        assert torch.equal(state["frozen.weight"], Different(0).frozen.weight)
        assert not torch.equal(state["layer.weight"], Different(0).layer.weight)
        assert grads <= 4 * 2 * 128


def test_its_repr_says_what_it_is():
    engine = dplab.parallelize(torch.nn.Linear(2, 2), torch.optim.SGD, "zero2")
    assert repr(engine) == "<Engine Linear · zero2 on 1 rank · 0 steps>"
