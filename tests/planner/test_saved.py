"""Activation formulas against autograd itself: bytes of what a layer of a real model saves for its backward."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest

from dplab.planner import activations, configs
from dplab.planner.recipes import Recipe
from dplab.planner.split import Split

torch = pytest.importorskip("torch")

BATCH, TOKENS, WIDTH = 2, 128, 128
PLAIN = Recipe()


def saved_bytes(run, model):
    """Storages that autograd keeps, each once, weights left out."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run(model)
    size = sum(storage.nbytes() for storage in kept.values())
    del out
    gc.collect()
    return size


def a_layer(build, run):
    """What each layer adds: the difference of three layers and one."""
    torch.manual_seed(0)
    sizes = [saved_bytes(run, build(layers)) for layers in (1, 3)]
    return (sizes[1] - sizes[0]) / 2


def predicted(config, dtype, **facts):
    profile = configs.model(config, sequence=TOKENS)
    program = replace(PLAIN, element=2 if dtype == torch.bfloat16 else 4, **facts)
    return float(activations.layer(profile.blocks[0], Split(micro_batch=BATCH), program))


def hidden_states(dtype):
    return torch.randn(BATCH, TOKENS, WIDTH, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_a_llama_layer(dtype, kv_heads):
    transformers = pytest.importorskip("transformers")

    def build(layers):
        return transformers.LlamaModel(transformers.LlamaConfig(**config, num_hidden_layers=layers)).to(dtype)

    config = {"hidden_size": WIDTH, "num_attention_heads": 8, "num_key_value_heads": kv_heads, "vocab_size": 64,
              "intermediate_size": 344, "attn_implementation": "sdpa", "use_cache": False}
    measured = a_layer(build, lambda model: model(inputs_embeds=hidden_states(dtype)).last_hidden_state)
    assert measured == pytest.approx(
        predicted({**config, "model_type": "llama", "num_hidden_layers": 1}, dtype), rel=0.005)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_gpt_2_layer(dtype, attention):
    transformers = pytest.importorskip("transformers")

    def build(layers):
        return transformers.GPT2Model(transformers.GPT2Config(**config, n_layer=layers)).to(dtype).train()

    config = {"n_embd": WIDTH, "n_head": 8, "n_positions": TOKENS, "vocab_size": 64, "use_cache": False,
              "activation_function": "gelu", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
              "bos_token_id": 0, "eos_token_id": 0, "attn_implementation": attention}
    measured = a_layer(build, lambda model: model(inputs_embeds=hidden_states(dtype)).last_hidden_state)
    shape = {**config, "model_type": "gpt2", "n_layer": 1}
    assert measured == pytest.approx(predicted(shape, dtype, flash=attention == "sdpa"), rel=0.005)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_layer_of_our_own_gpt(dtype):
    from dplab.workloads.models import GPT

    measured = a_layer(lambda layers: GPT(layers=layers, width=WIDTH, heads=8, sequence=TOKENS).to(dtype),
                       lambda model: model.blocks(hidden_states(dtype)))
    shape = {"model_type": "gpt2", "n_embd": WIDTH, "n_head": 8, "n_layer": 1, "n_positions": TOKENS, "vocab_size": 64,
             "resid_pdrop": 0.0}
    assert measured == pytest.approx(predicted(shape, dtype), rel=0.005)


def test_a_checkpointed_layer_keeps_its_input():
    from torch.utils.checkpoint import checkpoint

    from dplab.workloads.models import GPT

    def run(model):
        hidden = hidden_states(torch.float32)
        for block in model.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return hidden

    measured = a_layer(lambda layers: GPT(layers=layers, width=WIDTH, heads=8, sequence=TOKENS), run)
    shape = {"model_type": "gpt2", "n_embd": WIDTH, "n_head": 8, "n_layer": 1, "n_positions": TOKENS, "vocab_size": 64,
             "resid_pdrop": 0.0}
    block = configs.model(shape, sequence=TOKENS).blocks[0]
    kept = activations.layer(block, Split(micro_batch=BATCH, recompute=2), replace(PLAIN, element=4))
    assert measured == pytest.approx(float(kept), rel=0.02)
