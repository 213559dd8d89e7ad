"""Models of Hugging Face transformers, tiny and with random weights: five steps equal one process. No download."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import dplab
from dplab.specs import SHARDINGS
from tests import worlds
from tests.worlds import in_threads

transformers = pytest.importorskip("transformers", reason="needs the peers extra: pip install 'dplab[peers]'")
pytestmark = pytest.mark.peers

STEPS, LENGTH, WORDS = 5, 6, 19


def gpt2() -> nn.Module:
    """Its head is its embedding."""
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=12, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0))


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=12, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16, bos_token_id=0, eos_token_id=0, pad_token_id=None))


def t5() -> nn.Module:
    """Encoder and decoder share the embedding, and each its first block's position bias."""
    return transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=WORDS, d_model=12, d_kv=6, d_ff=20, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1))


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(
        hidden_size=12, num_hidden_layers=2, num_attention_heads=2, intermediate_size=20, image_size=8, patch_size=4,
        num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


class Loss(nn.Module):
    """The model's own loss; shapes by keyword, as these models are called."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return self.inner(**batch).loss


def tokens(count: int, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    made = [torch.randint(2, WORDS, (2, LENGTH), generator=generator) for _ in range(count)]
    return [{"input_ids": words, "labels": words} for words in made]


def images(count: int, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [{"pixel_values": torch.randn(2, 3, 8, 8, generator=generator).to(dtype),
             "labels": torch.randint(0, 3, (2,), generator=generator)} for _ in range(count)]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., list[dict[str, torch.Tensor]]]]] = {
    "gpt2": (gpt2, tokens), "llama": (llama, tokens), "t5": (t5, tokens), "vit": (vit, images)}


def built(kind: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    return Loss(MODELS[kind][0]()).to(dtype).train()


def reference(model: nn.Module, batches: list[dict[str, torch.Tensor]], size: int) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(model)
    optimizer = worlds.adamw(model.parameters())
    for start in range(0, len(batches), size):
        optimizer.zero_grad()
        for batch in batches[start:start + size]:
            (model(**batch) / size).backward()
        optimizer.step()
    return model.state_dict()


def trained(model: nn.Module, batches: list[dict[str, torch.Tensor]], strategy: str) -> dict[str, torch.Tensor]:
    world = dplab.init()
    engine = dplab.parallelize(copy.deepcopy(model), worlds.adamw, strategy)
    for start in range(0, len(batches), world.size):
        engine.backward(engine(**batches[start + world.rank]))
        assert engine.step()
    engine.check_agreement()
    return engine.full_state_dict()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", SHARDINGS)
@pytest.mark.parametrize("kind", MODELS)
def test_five_steps_equal_one_process(kind: str, name: str, size: int) -> None:
    model = built(kind, torch.float64)
    batches = MODELS[kind][1](STEPS * size, torch.float64)
    expected = reference(model, batches, size)
    for state in in_threads(size, trained, model, batches, f"{name}+bucket_mb=0.001"):
        assert list(state) == list(expected)
        for key, value in state.items():
            # models keep a part of their arithmetic in float32 whatever their dtype
            torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", MODELS)
def test_strategies_agree_to_the_bit(kind: str, precision: str) -> None:
    model = built(kind, torch.float32)
    batches = MODELS[kind][1](STEPS * 2, torch.float32)
    states = [state for name in SHARDINGS for state in in_threads(
        2, trained, model, batches, name if precision == "fp32" else f"{name}+{precision}")]
    for state in states[1:]:
        for key, value in state.items():
            assert torch.equal(value, states[0][key]), key
