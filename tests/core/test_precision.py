"""Low precision: the same bits under every strategy, the same as one process that does it by hand."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import dplab
from dplab.core.scaler import LossScaler
from dplab.errors import StateError
from dplab.planner import footprint
from dplab.specs import PRECISIONS, SHARDINGS, Precision, Strategy
from tests import worlds
from tests.worlds import STRATEGIES, in_processes, in_threads

STEPS = 4
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def by_hand(model: nn.Module, batches: Sequence[worlds.Batch], size: int, window: int,
            dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], list[float]]:
    """One process: fp32 master weights, 2-byte compute; ranks' gradients summed in fp32 in rank order.

    A window of one keeps sums in 2 bytes, a longer one in fp32. fp16 scales the loss as torch's GradScaler.
    """
    low, master = copy.deepcopy(model).to(dtype), [p.detach().clone().requires_grad_() for p in model.parameters()]
    optimizer = adamw(master)
    scale, scales = (2.0**16 if dtype == torch.float16 else 1.0), []
    for start in range(0, len(batches), size * window):
        sums: list[torch.Tensor] = [torch.zeros_like(p) for p in master]
        for rank in range(size):
            mine = [torch.zeros_like(p) for p in master]
            for index in range(window):
                low.zero_grad()
                (low(*batches[start + rank * window + index]) * scale).backward()
                for total, parameter in zip(mine, low.parameters(), strict=True):
                    assert parameter.grad is not None
                    total.add_(parameter.grad)
            for total, part in zip(sums, mine, strict=True):
                total.add_(part)
        if window == 1:
            sums = [total.to(dtype) for total in sums]
        overflow = not all(torch.isfinite(total).all() for total in sums)
        if not overflow:
            for parameter, total in zip(master, sums, strict=True):
                divided = total.float() if dtype == torch.float16 else total
                parameter.grad = (divided / (size * window * scale)).float()
            optimizer.step()
            with torch.no_grad():
                for to, parameter in zip(low.parameters(), master, strict=True):
                    to.copy_(parameter)
        if dtype == torch.float16:
            scale = scale / 2 if overflow else scale
        scales.append(scale)
    return {name: p.detach() for (name, _), p in zip(model.named_parameters(), master, strict=True)}, scales


def trained(model: nn.Module, batches: Sequence[worlds.Batch], strategy: Strategy) -> dict[str, Any]:
    world = dplab.init()
    engine = dplab.parallelize(copy.deepcopy(model), adamw, strategy)
    per_step, scales = world.size * strategy.accumulate, []
    for start in range(0, len(batches), per_step):
        for index in range(strategy.accumulate):
            engine.backward(engine(*batches[start + world.rank * strategy.accumulate + index]))
        engine.step()
        scaler = engine._reduction.scaler
        scales.append(scaler.scale if scaler else 1.0)
    engine.check_agreement()
    with engine.gathered() as module:
        low = {name: p.detach().clone() for name, p in module.named_parameters()}
    return {"state": engine.full_state_dict(), "low": low, "scales": scales, "memory": engine.memory(),
            "padded": sum(b.layout.numel for b in engine._buckets)}


@pytest.mark.parametrize(("where", "size"), [(in_threads, 1), (in_threads, 2), (in_threads, 3), (in_processes, 2)])
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("precision", DTYPES)
def test_low_precision_equals_one_process_by_hand_to_the_bit(precision: str, window: int, where: Any,
                                                             size: int) -> None:
    model = worlds.build(worlds.Even, torch.float32)
    batches = worlds.uneven_batches(STEPS * size * window)
    expected, scales = by_hand(model, batches, size, window, DTYPES[precision])
    for name in SHARDINGS:
        strategy = Strategy(sharding=name, precision=precision, accumulate=window, accumulate_mode="window")
        for got in where(size, trained, model, batches, strategy):
            assert got["scales"] == scales
            for key, value in expected.items():
                torch.testing.assert_close(got["state"][key], value, rtol=2e-6, atol=1e-7)
                assert got["low"][key].dtype == DTYPES[precision]
                assert torch.equal(got["low"][key], got["state"][key].to(DTYPES[precision]))


@pytest.mark.parametrize("mode", ["window", "micro_batch"])
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize(("precision", "where", "size"), [
    *itertools.product(["bf16", "fp16"], [in_threads], [2, 3]),
    # threads share autocast's cache of cast weights, so what is shared in it depends on their timing
    *itertools.product(["amp-bf16", "amp-fp16"], [in_processes], [2])])
def test_strategies_agree_to_the_bit_in_every_precision(precision: str, where: Any, size: int, window: int,
                                                        mode: str) -> None:
    model = worlds.build(worlds.Uneven, torch.float32)
    batches = worlds.uneven_batches(STEPS * size * window)
    results = []
    for name, bucket_mb in itertools.product(SHARDINGS, (0.0005, None)):
        strategy = Strategy(sharding=name, precision=precision, accumulate=window, accumulate_mode=mode,
                            bucket_mb=bucket_mb, clip_grad_norm=0.3)
        results += where(size, trained, model, batches, strategy)
    for got in results[1:]:
        assert got["scales"] == results[0]["scales"]
        for key, value in got["state"].items():
            assert torch.equal(value, results[0]["state"][key]), key


@pytest.mark.parametrize("words", ["bf16", "bf16+accum2"])
@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_low_precision_on_a_mesh_that_only_replicates_equals_ddp_to_the_bit(name: str, words: str) -> None:
    model, batches = worlds.build(worlds.Uneven, torch.float32), worlds.uneven_batches(12)
    expected = in_threads(2, worlds.train, model, batches, f"ddp+{words}")[0]
    for state in in_threads(2, worlds.train, model, batches, f"{name}+{words}", mesh=(2, 1)):
        assert all(torch.equal(value, expected[key]) for key, value in state.items())


@pytest.mark.parametrize("name", SHARDINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_amp_equals_one_process_under_autocast(dtype: torch.dtype, name: str) -> None:
    model = worlds.build(worlds.Even, torch.float32)
    batches = worlds.uneven_batches(STEPS * 2)
    optimizer = adamw((whole := copy.deepcopy(model)).parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16, init_scale=2.0**16)
    for start in range(0, len(batches), 2):
        optimizer.zero_grad()
        for batch in batches[start:start + 2]:
            with torch.autocast("cpu", dtype):
                loss = whole(*batch)
            scaler.scale(loss / 2).backward()
        scaler.step(optimizer)
        scaler.update()
    precision = "amp-bf16" if dtype == torch.bfloat16 else "amp-fp16"
    for got in in_threads(2, trained, model, batches, Strategy(sharding=name, precision=precision)):
        if dtype == torch.float16:
            assert got["scales"][-1] == scaler.get_scale()
        for key, value in whole.state_dict().items():
            assert got["state"][key].dtype == torch.float32
            torch.testing.assert_close(got["state"][key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", SHARDINGS)
def test_memory_equals_the_formula_of_sixteen_and_eighteen_bytes(name: str, precision: str, window: int,
                                                                 size: int) -> None:
    model = worlds.build(worlds.Even, torch.float32)
    strategy = Strategy(sharding=name, precision=precision, accumulate=window)
    for got in in_threads(size, trained, model, worlds.uneven_batches(size * window), strategy):
        theory = footprint.model_states(got["padded"], sharding=strategy.sharding, shard=1 if name == "ddp" else size,
                                        precision=PRECISIONS[precision], accumulate=window)
        for category in ("params", "grads", "master"):
            assert got["memory"][category] == theory[category]


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("size", [1, 2])
def test_h31_bf16_weights_move_through_their_master(size: int, name: str, where: Any) -> None:
    """Updates of 0.001 at 1.0 all round away in bf16; the master copy keeps them."""

    class Ones(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))

        def forward(self) -> torch.Tensor:
            return self.w.sum()

    def body(precision: Any) -> tuple[torch.Tensor, torch.Tensor]:
        engine = dplab.parallelize(Ones(), lambda ps: torch.optim.AdamW(ps, lr=1e-3, weight_decay=0.0),
                                   dataclasses.replace(Strategy.parse(name), precision=precision))
        for _ in range(100):
            engine.backward(engine())
            engine.step()
        with engine.gathered() as module:
            low = module.w.detach().clone()
        # reading must not have cost the master its digits
        return engine.full_state_dict()["w"], low

    for exact, low in where(size, body, "bf16"):
        torch.testing.assert_close(exact, torch.full((4,), 0.9), rtol=0, atol=1e-4)
        assert exact.dtype == torch.float32
        assert (low == 0.8984375).all()
    for _, low in where(size, body, Precision(param="bf16", grad="bf16")):
        assert (low == 1.0).all()


def test_writing_while_gathered_refreshes_the_master() -> None:
    def body() -> tuple[torch.Tensor, torch.Tensor]:
        engine = dplab.parallelize(nn.Linear(2, 2, bias=False), adamw, "zero3+bf16")
        before = engine.full_state_dict()["weight"]
        with engine.gathered() as module, torch.no_grad():
            module.weight[0].fill_(0.5)
        return before, engine.full_state_dict()["weight"]

    for before, after in in_threads(2, body):
        assert (after[0] == 0.5).all()
        assert torch.equal(before[1], after[1])


class Crafted(nn.Module):
    """Its gradient is what it is told: w holds four slots of one element a rank or more."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(600))

    def forward(self, slope: torch.Tensor) -> torch.Tensor:
        return (self.w * slope).sum()


@pytest.mark.parametrize("micro", [0, 1, 2])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", STRATEGIES)
def test_h29_an_infinity_on_one_rank_skips_the_step_on_all(name: str, size: int, micro: int, where: Any) -> None:
    window = 3

    def body() -> list[Any]:
        world = dplab.init()
        engine = dplab.parallelize(Crafted(), lambda ps: torch.optim.AdamW(ps, lr=1e-2),
                                   f"{name}+amp-fp16+accum{window}")
        history = []
        for step in range(4):
            for index in range(window):
                slope = torch.full((600,), 1e-3)
                if step == 2 and index == micro and world.rank == 1:
                    slope[-1] = float("inf")  # owned by the last rank
                engine.backward(engine(slope))
            moved = engine.step()
            states = [state["step"].item() for state in engine.optimizer.state.values()]
            assert engine._reduction.scaler is not None
            history.append((moved, engine._reduction.scaler.scale, engine.full_state_dict()["w"][0].item(),
                            set(states)))
        return history

    every = where(size, body)
    first = every[0]
    assert [entry[0] for entry in first] == [True, True, False, True]
    assert [entry[1] for entry in first] == [65536.0, 65536.0, 32768.0, 32768.0]
    assert first[1][2] == first[2][2] != first[3][2]
    for history in every:
        assert [entry[:3] for entry in history] == [entry[:3] for entry in first]
        assert [entry[3] for entry in history if entry[3]] in ([{1.0}, {2.0}, {2.0}, {3.0}], [])


def test_h30_the_scale_follows_torchs_scaler() -> None:
    ours, theirs = LossScaler(window=5), torch.amp.GradScaler("cpu", growth_interval=5)
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    theirs.scale(torch.ones(()))
    for turn in [1, 1, 1, *[0] * 12, 1, *[0] * 6]:
        weight.grad = torch.tensor([float("inf") if turn else 1.0])
        theirs.step(optimizer)
        theirs.update()
        ours.update(overflow=bool(turn))
        assert ours.scale == theirs.get_scale()


@pytest.mark.parametrize(("value", "kind"), [(float("nan"), "NaN"), (float("inf"), "infinite")])
@pytest.mark.parametrize("name", STRATEGIES)
def test_h30_overflow_for_ever_ends_with_the_first_cause(name: str, value: float, kind: str, where: Any) -> None:
    def body() -> list[float]:
        engine = dplab.parallelize(Crafted(), adamw, f"{name}+amp-fp16")
        scales = []
        try:
            for _ in range(40):
                slope = torch.ones(600)
                if dplab.init().rank == 1:
                    slope[3] = value
                engine.backward(engine(slope))
                assert not engine.step()
                assert engine._reduction.scaler is not None
                scales.append(engine._reduction.scaler.scale)
        except StateError as error:
            message = str(error)
        assert f"first on rank 1: the gradient of 'w' ({kind})" in message
        assert "at the smallest loss scale (1.0)" in message
        return scales

    assert where(2, body) == [[2.0**power for power in range(15, -1, -1)]] * 2


def test_a_plain_backward_is_refused_where_the_loss_is_scaled() -> None:
    engine = dplab.parallelize(nn.Linear(2, 2), adamw, "zero2+amp-fp16")
    with pytest.raises(StateError, match=r"loss.backward\(\) was called under a precision that scales the loss; call"):
        engine(torch.ones(1, 2)).sum().backward()


def test_a_users_own_autocast_works() -> None:
    def body() -> torch.Tensor:
        engine = dplab.parallelize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), adamw, "zero3")
        with torch.autocast("cpu", torch.bfloat16):
            out = engine(torch.ones(1, 4))
        engine.backward(out.sum())
        assert engine.step()
        engine.check_agreement()
        return out

    assert all(out.dtype == torch.bfloat16 for out in in_threads(2, body))
