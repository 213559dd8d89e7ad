"""Models from the meta device: the values of a plain model, never more than a unit whole, and who cannot is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dplab
from dplab.errors import UsageError
from dplab.specs import SHARDINGS
from tests import worlds
from tests.core.test_peak import LAYERS, UNIT, WIDTH, Peak, bytes_of, steps, tensors
from tests.worlds import in_processes, in_threads


class Varied(nn.Module):
    """Norms with buffers, attention whose reset writes to a child, a tied head with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embed.weight
        self.last = nn.Linear(11, 11)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = h + block(h)
        return nn.functional.cross_entropy(self.last(self.head(self.norm(h))).flatten(0, 1), y.flatten())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(5)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return self.mlp(x + self.attention(x, x, x, need_weights=False)[0])


def on_meta(build: Any) -> nn.Module:
    with torch.device("meta"):
        return build()


def started(build: Any, strategy: str, meta: bool, **options: Any) -> dict[str, torch.Tensor]:
    """Initial values and those after two steps."""
    model = on_meta(build) if meta else None
    torch.manual_seed(7)
    engine = dplab.parallelize(model or build(), worlds.adamw, strategy, **options)
    first = engine.full_state_dict()
    for x, y in worlds.uneven_batches(2):
        engine.backward(engine(x, y))
        engine.step()
    return {**first, **{f"then {name}": value for name, value in engine.full_state_dict().items()}}


@pytest.mark.parametrize("name", [*SHARDINGS, "zero2+bucket_mb=1e-05", "zero3+bf16", "zero3+recompute"])
def test_values_are_those_of_the_plain_model_with_the_same_seed(name: str) -> None:
    """In processes: threads share a generator."""
    plain, meta = (in_processes(2, started, Varied, name, meta) for meta in (False, True))
    for one, other in zip(plain, meta, strict=True):
        assert list(one) == list(other)
        assert [key for key in one if not torch.equal(one[key], other[key])] == []


def test_ranks_with_other_seeds_start_from_rank_0() -> None:
    def body() -> dict[str, torch.Tensor]:
        model = on_meta(Varied)
        torch.manual_seed(7 + dplab.init().rank)
        engine = dplab.parallelize(model, worlds.adamw, "zero3")
        engine.check_agreement()
        return engine.full_state_dict()

    first, second = in_processes(2, body)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("name", SHARDINGS)
def test_h47_setting_up_holds_no_more_than_training_and_a_unit(name: str) -> None:
    def body() -> tuple[int, int]:
        before = bytes_of(tensors())
        model = on_meta(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))))
        assert bytes_of(tensors()) == before
        with Peak() as setting_up:
            engine = dplab.parallelize(model, worlds.adamw, f"{name}+bf16")
        with Peak() as training:
            steps(engine, 3)
        return setting_up.bytes - before, training.bytes - before

    whole = LAYERS * UNIT
    for setting_up, training in in_processes(4, body):
        assert setting_up <= training + UNIT
        if name == "zero3":
            # a fourth of weights and gradients in bf16 and of the master; one unit in fp32, laid flat, and rounded; and
            # the one before, which the transport may let go of a moment later
            assert setting_up <= whole // 4 * (2 + 2 + 4) / 4 + 3.5 * UNIT < whole


def test_an_optimizer_built_on_the_meta_parameters_keeps_its_groups() -> None:
    def body() -> list[tuple[float, int]]:
        model = on_meta(Varied)
        optimizer = torch.optim.AdamW([
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0}], lr=1e-2)
        engine = dplab.parallelize(model, optimizer, "zero3")
        engine.backward(engine(*worlds.uneven_batches(1)[0]))
        engine.step()
        return [(group["weight_decay"], len(group["params"]) > 0) for group in engine.optimizer.param_groups]

    assert in_processes(2, body)[0] == [(0.1, True), (0.0, True)]


class Scaled(nn.Module):
    """A parameter that no reset_parameters makes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.scale = nn.Parameter(torch.full((), 0.7))
        self.register_buffer("shift", torch.ones(8), persistent=False)
        self.head = nn.Linear(8, 11)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.embed(x) * self.scale + self.shift)
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def test_a_function_fills_what_it_is_given() -> None:
    called = []

    def fill(path: str, module: nn.Module) -> None:
        called.append(path)
        if isinstance(module, Scaled):
            module.scale.fill_(0.7)
            module.shift.fill_(1.0)
        else:
            module.reset_parameters()

    plain = started(Scaled, "ddp", False)
    meta = started(Scaled, "ddp", True, materialize=fill)
    assert called == ["embed", "head", ""]
    assert all(torch.equal(plain[name], meta[name]) for name in plain)


class Own(Scaled):
    """With `_init_weights`, as transformers' models and many others have."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.fill_(0.5)
        if isinstance(module, Own):
            module.scale.fill_(0.7)
            module.shift.fill_(1.0)


def test_the_models_own_function_has_the_last_word() -> None:
    meta = started(Own, "zero3", True)
    assert torch.equal(meta["embed.weight"], torch.full((11, 8), 0.5))
    assert meta["scale"] == torch.tensor(0.7)


class Forgetful(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


class Reaching(nn.Module):
    """Its `_init_weights` writes to parameters of units from the root."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2))
        self.head = nn.Linear(4, 4)

    def _init_weights(self, module: nn.Module) -> None:
        if module is self:
            nn.init.zeros_(self.blocks[0][0].weight)


class Hoarding(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.table = torch.zeros(4)


@pytest.mark.parametrize(("build", "strategy", "message"), [
    (Scaled, "ddp", "module '' (Scaled) holds 'scale', 'shift' on the meta device and has no reset_parameters(); give "
                    "parallelize(materialize=...) a function of path and module that fills it, a checkpoint or a "),
    (lambda: Forgetful(4, 4), "zero3", "module '' (Forgetful) has left 'bias' without values; give parallelize("),
    (Reaching, "zero3", "Reaching._init_weights, called for module '' (Reaching), writes to parameters of other units"),
    (Hoarding, "ddp", "module '' (Hoarding) keeps tensor 'table' on the meta device, which is no parameter or buffer"),
])
def test_who_cannot_be_given_values_is_named(build: Any, strategy: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        in_threads(2, lambda: dplab.parallelize(on_meta(build), worlds.adamw, strategy))
    assert str(caught.value).startswith(message)


def test_materialize_is_refused_where_there_is_nothing_to_do() -> None:
    with pytest.raises(UsageError, match="materialize was given, and nothing of the model is on the meta device"):
        dplab.parallelize(Varied(), worlds.adamw, "ddp", materialize="weights.safetensors")
    with pytest.raises(UsageError, match="materialize is of type int; it is a function of path and module"):
        dplab.parallelize(on_meta(Varied), worlds.adamw, "ddp", materialize=3)


@pytest.mark.parametrize("kind", ["checkpoint", "weights.safetensors"])
@pytest.mark.parametrize("name", ["ddp", "zero3"])
def test_values_from_a_file(name: str, kind: str, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")

    def save() -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        engine = dplab.parallelize(Varied(), worlds.adamw, "zero2")
        engine.backward(engine(*worlds.uneven_batches(1)[0]))
        engine.step()
        engine.save(tmp_path / kind)
        return engine.full_state_dict()

    def load() -> dict[str, torch.Tensor]:
        return dplab.parallelize(on_meta(Varied), worlds.adamw, name, materialize=tmp_path / kind).full_state_dict()

    saved, loaded = in_processes(2, save)[0], in_processes(2, load)
    for each in loaded:
        assert [key for key in saved if not torch.equal(saved[key], each[key])] == []


def test_a_transformers_model_from_its_own_file(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(hidden_size=32, intermediate_size=48, num_attention_heads=2, num_hidden_layers=2,
                                      vocab_size=64, tie_word_embeddings=True)
    torch.manual_seed(3)
    plain = transformers.LlamaForCausalLM(config)
    plain.save_pretrained(tmp_path)
    tokens = torch.arange(16).view(2, 8)

    def body() -> float:
        model = on_meta(lambda: transformers.LlamaForCausalLM(config))
        engine = dplab.parallelize(model, worlds.adamw, "zero3", materialize=tmp_path / "model.safetensors")
        with torch.no_grad():
            return float(engine(input_ids=tokens, labels=tokens).loss)

    plain.eval()
    with torch.no_grad():
        assert in_threads(2, body)[0] == float(plain(input_ids=tokens, labels=tokens).loss)


def test_a_model_that_is_half_on_the_meta_device() -> None:
    def build() -> nn.Module:
        torch.manual_seed(3)
        model = Varied()
        with torch.device("meta"):
            model.last = nn.Linear(11, 11)
        return model

    engine = dplab.parallelize(build(), worlds.adamw, "zero3")
    torch.manual_seed(3)
    expected = Varied().state_dict()
    state = engine.full_state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected if not name.startswith("last"))
