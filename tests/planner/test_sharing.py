"""Hybrid and coded strategies: what is predicted of them, against what a run of them counts."""

from __future__ import annotations

import pytest
import torch

import dplab
from dplab.errors import UsageError
from dplab.planner.sharing import per_host
from dplab.specs import Strategy
from tests.worlds import in_threads


def counted(strategy: str) -> dict[str, int]:
    """Bytes that a rank sends in a step of a model whose layout has no padding."""
    engine = dplab.parallelize(Blocks(), lambda ps: torch.optim.AdamW(ps), strategy)
    engine.backward(engine(torch.ones(2, 96)).sum())
    engine.step()
    return {name: row["bytes"] for name, row in engine.wire().items() if name not in ("init", "control")}


class Blocks(torch.nn.Module):
    """Two matrices, which divide by every number of ranks here."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(96, 96 * 16, bias=False)
        self.second = torch.nn.Linear(96 * 16, 96, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


@pytest.mark.parametrize("strategy", [
    f"{sharding}{extra}" for sharding in ("ddp", "zero1", "zero2") for extra in (
        "+wire=int8", "+wire=bf16", "+wire=fp16", "+hybrid+topology=2x3@100GB/s", "+hybrid+topology=3x2@100GB/s",
        "+hybrid+topology=3x2@100GB/s+wire=int8", "+topology=2x3@100GB/s+wire=int8")])
def test_explained_bytes_are_counted_bytes(strategy):
    told = dplab.explain(strategy, Blocks(), 6)
    for row in in_threads(6, counted, strategy):
        assert row == pytest.approx({name: size for name, size in told.bytes_sent.items() if size}, rel=1e-4)


def test_states_are_cut_inside_a_host():
    strategy = "zero3+hybrid+topology=2x4@100gbe"
    assert per_host(Strategy.parse(strategy), 8) == 4
    told = dplab.explain(strategy, 8e6, 8)
    assert told.states["params"] == 8e6
    assert "1/4 of it" in str(told)
    assert dplab.estimate(8e6, 8, f"{strategy}+fp32").model_states_bytes["optimizer"] == 2 * 8e6


@pytest.mark.parametrize(("strategy", "told"), [
    ("zero2+hybrid+topology=2x4@100gbe", "gradients reduce   reduce-scatter inside a host, all-reduce across hosts\n"),
    ("ddp+hybrid+topology=2x4@100gbe+wire=int8", "gradients reduce   reduce-scatter inside a host, all-reduce across "
                                                 "hosts, all-gather inside, as int8 between hosts\n"),
    ("ddp+wire=bf16", "gradients reduce   all-reduce, as bf16\n")])
def test_it_says_in_which_levels_and_form(strategy, told):
    assert told in str(dplab.explain(strategy, 8e6, 8))


@pytest.mark.parametrize(("strategy", "ranks", "message"), [
    ("zero2+hybrid", 4, r"strategy 'zero2\+hybrid' shards inside a host, and nothing says how many ranks a host has; "
                        r"name hosts and links too, such as topology=2x8@100gbe"),
    ("zero2+hybrid+topology=2x2@10gbe", 6, r"has 4 ranks .* and the world has 6"),
    ("ddp+wire=powersgd4", 4, r"what wire=powersgd4 sends depends on every matrix's shape and is not predicted; "
                              r"predict bf16, fp16, int8, int8-ef, or leave wire out"),
])
def test_what_is_not_known_is_not_predicted(strategy, ranks, message):
    with pytest.raises(UsageError, match=message):
        dplab.explain(strategy, 1e6, ranks)
