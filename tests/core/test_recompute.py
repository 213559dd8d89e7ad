"""Recomputation: the same answers to the bit, fewer bytes, and what is measured is what the planner says."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import dplab
from dplab.core.recompute import within
from dplab.errors import StateError, UsageError
from dplab.planner import activations, configs
from dplab.planner.again import flops
from dplab.planner.recipes import Recipe
from dplab.planner.split import Split
from dplab.specs import SHARDINGS
from dplab.telemetry import recorder
from dplab.telemetry.recorder import Recorder
from dplab.workloads import models
from tests import worlds
from tests.worlds import in_processes, in_threads

SHAPE = {"layers": 3, "width": 32, "heads": 2, "sequence": 16, "vocabulary": 64}
WAYS = ("full", "keep:attention", "keep:attention:matmul", "0.1mb", "64mb")


def batches(count: int, vocabulary: int = 64) -> list[worlds.Batch]:
    generator = torch.Generator().manual_seed(5)
    return [tuple(torch.randint(0, vocabulary, (2, 16), generator=generator) for _ in range(2)) for _ in range(count)]


def trained(model: Any, strategy: str, **options: Any) -> tuple[dict[str, torch.Tensor], list[float], Any, Any]:
    """Weights, losses, the table of units and the memory after three steps of this rank's batches."""
    world = dplab.init()
    torch.manual_seed(3)
    made = copy.deepcopy(model) if isinstance(model, nn.Module) else model()
    engine = dplab.parallelize(made, worlds.adamw, strategy, **options)
    torch.manual_seed(100 + world.rank)
    losses = []
    for start in range(0, 3 * world.size, world.size):
        loss = engine(*batches(3 * world.size)[start + world.rank])
        engine.backward(loss)
        losses.append(loss.item())
        assert engine.step()
    return engine.full_state_dict(), losses, engine.recomputed(), engine.memory()


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(one[0][name], other[0][name]) for name in one[0]) and one[1] == other[1]


@pytest.mark.parametrize("again", WAYS)
@pytest.mark.parametrize("name", SHARDINGS)
def test_answers_are_those_of_a_plain_run_to_the_bit(name: str, again: str) -> None:
    torch.manual_seed(3)
    model = models.build("tiny-gpt", **SHAPE)
    plain = in_threads(2, trained, model, name)
    for one, other in zip(plain, in_threads(2, trained, model, f"{name}+recompute={again}"), strict=True):
        assert same(one, other)
        assert plain[0][2] == {}


class Noisy(nn.Module):
    """Blocks with dropout, batch norm, a buffer that every forward replaces and a power iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 24)
        self.blocks = nn.ModuleList(nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Linear(24, 24)), nn.BatchNorm1d(16), nn.Dropout(0.3), Counting(),
            nn.Linear(24, 24)) for _ in range(3))
        self.head = nn.Linear(24, 64)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = h + block(h)
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


class Counting(nn.Module):
    """Scales by how often it ran, in a buffer that it gives anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ran", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ran = self.ran + 1
        return x * (1 + self.ran)


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero3"])
def test_generators_and_buffers_go_on_as_in_a_plain_run(name: str) -> None:
    """In processes: threads share a generator."""
    for again in ("full", "keep:matmul"):
        plain, other = (in_processes(2, trained, Noisy, f"{name}{way}") for way in ("", f"+recompute={again}"))
        assert all(same(*pair) for pair in zip(plain, other, strict=True))
        assert plain[0][0]["blocks.0.1.num_batches_tracked"] == 3
        assert plain[0][0]["blocks.2.3.ran"] == 3


def test_training_again_after_evaluation_relearns_which_buffers_change() -> None:
    def body(strategy: str) -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        engine = dplab.parallelize(Noisy(), worlds.adamw, strategy)
        engine.eval()
        for batch in batches(2):
            engine.backward(engine(*batch))
            engine.step()
        engine.train()
        torch.manual_seed(4)
        for batch in batches(2):
            engine.backward(engine(*batch))
            engine.step()
        return engine.full_state_dict()

    plain, again = body("ddp"), body("ddp+recompute")
    assert all(torch.equal(plain[name], again[name]) for name in plain)


@pytest.mark.parametrize("name", ["ddp", "zero3"])
def test_the_ledger_holds_what_is_saved_and_the_planner_says_it_before(name: str) -> None:
    shape = {"model_type": "gpt2", "n_embd": 32, "n_head": 2, "n_layer": 3, "n_positions": 16, "vocab_size": 64,
             "resid_pdrop": 0.0}
    block = configs.model(shape, sequence=16).blocks[0]
    program, split = replace(Recipe(), element=4), Split(micro_batch=2)
    size = 2 * 16 * 32
    whole = float(activations.layer(block, split, program))
    torch.manual_seed(3)
    model = models.build("tiny-gpt", **SHAPE)
    plain = in_threads(2, trained, model, name)[0][3]["activations"]
    for again in ("full", "keep:attention", "keep:attention:matmul"):
        _, _, table, memory = in_threads(2, trained, model, f"{name}+recompute={again}")[0]
        kept = float(activations.layer(block, split, program, keep=tuple(again.split(":")[1:])))
        for row in table.values():
            assert row["recomputed"]
            assert row["saved_bytes"] == pytest.approx(whole - kept, abs=0.01 * whole)
            assert row["kept_bytes"] == pytest.approx(kept - 4 * size, rel=0.01, abs=1)
            assert row["ms"] > 0
        assert plain - memory["activations"] == sum(row["saved_bytes"] for row in table.values())


def counted(strategy: str) -> int:
    """FLOPs of the matrix products of one step; torch's counter knows no attention of the CPU."""
    torch.manual_seed(3)
    engine = dplab.parallelize(models.build("tiny-gpt", **SHAPE), worlds.adamw, strategy)
    with FlopCounterMode(display=False) as counter:
        engine.backward(engine(*batches(1)[0]))
    return counter.get_total_flops()


@pytest.mark.parametrize("again", ["full", "keep:attention", "keep:matmul"])
def test_what_is_computed_again_is_what_the_planner_says(again: str) -> None:
    shape = {"model_type": "gpt2", "n_embd": 32, "n_head": 2, "n_layer": 3, "n_positions": 16, "vocab_size": 64}
    block = configs.model(shape, sequence=16).blocks[0]
    kinds = {"attention", *again.split(":")[1:]}
    assert counted(f"ddp+recompute={again}") - counted("ddp") == 3 * 2 * flops(block, tuple(kinds))
    assert flops(block) - flops(block, ("attention",)) == block.attention_flops()


def test_a_budget_recomputes_no_more_units_than_it_must() -> None:
    torch.manual_seed(3)
    model = models.build("tiny-gpt", **SHAPE)
    everything = in_threads(2, trained, model, "zero2+recompute")[0]
    base, each = everything[3]["activations"], everything[2]["blocks.0"]["saved_bytes"]
    for units in (0, 2, 3):
        peak = base + (3 - units) * each + (units > 0) * each
        _, _, table, memory = in_threads(2, trained, model, f"zero2+recompute={(peak + 1) / 2**20:.6f}mb")[0]
        assert sum(row["recomputed"] for row in table.values()) == units
        assert memory["activations"] + (units > 0) * each == peak


def test_within_takes_the_largest_first() -> None:
    assert within(100, 10, [20, 30, 25]) == (set(), 85)
    assert within(70, 0, [20, 30, 25]) == ({1, 2}, 50)
    assert within(5, 10, [20, 30]) == ({0, 1}, 40)


def test_a_budget_that_nothing_meets_says_what_would() -> None:
    torch.manual_seed(3)
    model = models.build("tiny-gpt", **SHAPE)
    with pytest.raises(UsageError) as caught:
        in_threads(2, trained, model, "zero2+recompute=0.01mb")
    assert str(caught.value).startswith("strategy recompute=0.01mb: with every unit computed again activations still "
                                        "take 0.1 MiB; give at least 0.1mb, or a smaller batch")


class Kept(Recorder):
    def __init__(self) -> None:
        self.spans: list[tuple[str, str, dict[str, Any]]] = []

    def span(self, kind: str, name: str, t0: int, t1: int, **attrs: Any) -> None:
        self.spans.append((kind, name, attrs))


def test_each_recomputation_is_a_span_with_the_bytes_it_saved() -> None:
    def body() -> list[tuple[str, str, dict[str, Any]]]:
        kept = Kept()
        recorder.install(kept)
        try:
            trained(models.build("tiny-gpt", **SHAPE), "ddp+recompute")
        finally:
            recorder.install(Recorder())
        return kept.spans

    spans = [span for span in in_threads(1, body)[0] if span[0] == "recompute"]
    assert [name for _, name, _ in spans] == ["blocks.2", "blocks.1", "blocks.0"] * 3
    assert all(attrs["bytes"] > 0 for _, _, attrs in spans)


def test_two_backwards_through_one_forward_recompute_twice() -> None:
    def body(strategy: str) -> list[torch.Tensor]:
        torch.manual_seed(3)
        engine = dplab.parallelize(Noisy(), worlds.adamw, strategy)
        loss = engine(*batches(1)[0])
        loss.backward(retain_graph=True)
        engine.backward(loss)
        engine.step()
        return list(engine.full_state_dict().values())

    plain = body("ddp")
    for again in ("full", "keep:matmul"):
        assert all(map(torch.equal, plain, body(f"ddp+recompute={again}")))


def test_without_gradients_nothing_is_checkpointed() -> None:
    engine = dplab.parallelize(models.build("tiny-gpt", **SHAPE), worlds.adamw, "ddp+recompute")
    with torch.no_grad():
        engine(*batches(1)[0])
    assert all(row["saved_bytes"] == 0 for row in engine.recomputed().values())


@pytest.mark.parametrize("first", ["compile", "parallelize"])
@pytest.mark.parametrize("name", ["ddp", "zero3"])
def test_a_compiled_unit_is_recomputed_too(name: str, first: str) -> None:
    def body(strategy: str) -> Any:
        torch.manual_seed(3)
        model = models.build("tiny-gpt", **SHAPE)
        if first == "compile":
            for block in model.blocks:
                block.compile(backend="aot_eager")
        engine = dplab.parallelize(model, worlds.adamw, strategy)
        if first == "parallelize":
            for block in model.blocks:
                block.compile(backend="aot_eager")
        for batch in batches(3):
            engine.backward(engine(*batch))
            engine.step()
        return engine.full_state_dict(), [], engine.recomputed(), engine.memory()

    plain, again = body(name), body(f"{name}+recompute")
    assert same(plain, again)
    assert again[3]["activations"] < plain[3]["activations"] / 3
    assert all(row["saved_bytes"] > 0 for row in again[2].values())


transformers = pytest.importorskip("transformers")


def llama() -> nn.Module:
    torch.manual_seed(3)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_attention_heads=2, num_hidden_layers=2, vocab_size=64))


def gpt2() -> nn.Module:
    torch.manual_seed(3)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_embd=32, n_head=2, n_layer=2, n_positions=16, vocab_size=64, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0))


@pytest.mark.parametrize("build", [llama, gpt2])
def test_blocks_of_transformers_are_recomputed_without_their_cache(build: Any) -> None:
    model = build()

    def body(strategy: str) -> Any:
        engine = dplab.parallelize(copy.deepcopy(model), worlds.adamw, strategy)
        for x, _ in batches(2):
            engine.backward(engine(input_ids=x, labels=x).loss)
            engine.step()
        return engine.full_state_dict(), [], engine.recomputed(), engine.memory()

    for name in ("ddp", "zero3"):
        plain = in_threads(2, body, name)
        with pytest.warns(UserWarning, match="which would fill its key-value cache twice: it is given none"):
            again = in_threads(2, body, f"{name}+recompute")
        assert all(same(*pair) for pair in zip(plain, again, strict=True))
        assert again[0][3]["activations"] < plain[0][3]["activations"]


def test_two_ways_of_recomputing_at_once_are_refused() -> None:
    model = llama()
    model.gradient_checkpointing_enable()
    with pytest.raises(UsageError, match=r"the model's own gradient checkpointing is on \(in 'model'.*\), .*"
                                         r"call model.gradient_checkpointing_disable\(\), or leave recompute out"):
        dplab.parallelize(model, worlds.adamw, "ddp+recompute")
    dplab.parallelize(model, worlds.adamw, "ddp")


class InPlace(nn.Module):
    """A block that overwrites a matrix product's result."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 64))])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.blocks[0](self.embed(x)).flatten(0, 1), y.flatten())


def test_a_kept_result_that_is_overwritten_is_named() -> None:
    with pytest.raises(StateError, match=r"unit 'blocks.0' changes the result of aten.addmm.default in place, which "
                                         r"recompute=keep:... holds for its backward; leave that kind out"):
        trained(InPlace, "ddp+recompute=keep:matmul")
    assert same(trained(InPlace, "ddp"), trained(InPlace, "ddp+recompute"))


def test_torchs_own_selective_checkpoint_inside_a_sharded_model() -> None:
    """It holds every operator of the recomputation against the forward's: gathers are none of them."""
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    class Selective(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(64, 8)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
            self.head = nn.Linear(8, 64)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            h = self.embed(x)
            for block in self.blocks:
                h = checkpoint(block, h, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(
                    [torch.ops.aten.addmm.default])) if self.again else block(h)
            return nn.functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())

    torch.manual_seed(3)
    model = Selective()
    for name in ("ddp", "zero3"):
        model.again = False
        plain = in_threads(2, trained, model, name)
        model.again = True
        assert all(same(*pair) for pair in zip(plain, in_threads(2, trained, model, name), strict=True))
