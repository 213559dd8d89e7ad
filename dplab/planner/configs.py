"""Profiles from cards and from Hugging Face config.json files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dplab import cards
from dplab.errors import UsageError
from dplab.planner.profile import Block, Profile


def model(given: str | Path | dict[str, Any] | Profile, *, sequence: int | None = None) -> Profile:
    """The profile of a card's name, of a Hugging Face config (a dict or the path of a config.json).

    `sequence` replaces the card's tokens a sample. Raises UsageError for an unknown name (with the nearest), an
    unsupported model_type, a missing or impossible field.
    """
    if sequence is not None and (isinstance(sequence, bool) or not isinstance(sequence, int) or sequence < 1):
        raise UsageError(f"sequence={sequence!r} is not allowed; sequence is a whole number of tokens >= 1")
    if isinstance(given, Profile):
        if sequence not in (None, given.sequence):
            raise UsageError(f"the profile {given.name} is for sequence {given.sequence}; "
                             f"make it anew for sequence {sequence}")
        return given
    if isinstance(given, dict):
        return _profile(given.get("name") or given.get("_name_or_path") or "config", given, sequence)
    text = str(given)
    if isinstance(given, Path) or text.endswith(".json") or "/" in text:
        path = Path(given)
        path = path / "config.json" if path.is_dir() else path
        return _profile(path.parent.name or path.stem, cards.read_json(path, what="model config"), sequence)
    card = cards.find("models", text, what="model", otherwise=", or give the path of a Hugging Face config.json")
    profile = _profile(card["name"], card["config"], sequence or card.get("sequence"))
    return replace(profile, published_parameters=card.get("published_parameters"), source=card.get("source", ""))


@dataclass(frozen=True)
class _Config:
    """A config with the model's name, for messages that say which field is wrong."""

    name: str
    values: dict[str, Any]

    def number(self, *keys: str, default: int | None = None) -> int:
        """The first of some fields, a whole number >= 1."""
        for key in keys:
            value = self.values.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"model {self.name}: {key}={value!r} is not allowed; it is a whole number >= 1")
            return value
        if default is None:
            raise UsageError(f"model {self.name}: its config has no {' or '.join(keys)}; add it")
        return default

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        return default if value is None else bool(value)


def _profile(name: str, values: dict[str, Any], sequence: int | None) -> Profile:
    kind = values.get("model_type")
    if kind not in _MODEL_TYPES:
        raise UsageError(f"model {name}: model_type {kind!r} is not supported; "
                         f"supported are {', '.join(sorted(_MODEL_TYPES))}")
    return _MODEL_TYPES[kind](_Config(name, values), sequence)


@dataclass(frozen=True, kw_only=True)
class _Family:
    """How a kind of decoder spends its parameters."""

    gated: bool
    norm: int = 1
    """parameters a normalised feature: 1 for RMSNorm, 2 for LayerNorm"""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    positions: int | None = None
    """None: no learned positions; else rows added to the config's"""
    tied: bool = False
    dropout: bool = False
    head_norms: bool = False
    causal: bool = True


_FAMILIES = {
    "gpt2": _Family(gated=False, norm=2, qkv_bias=True, out_bias=True, mlp_bias=True, positions=0, tied=True,
                    dropout=True),
    "gpt_neox": _Family(gated=False, norm=2, qkv_bias=True, out_bias=True, mlp_bias=True),
    "opt": _Family(gated=False, norm=2, qkv_bias=True, out_bias=True, mlp_bias=True, positions=2, tied=True,
                   dropout=True),
    "llama": _Family(gated=True), "mistral": _Family(gated=True), "phi3": _Family(gated=True),
    "qwen2": _Family(gated=True, qkv_bias=True), "qwen3": _Family(gated=True, head_norms=True),
    "gemma": _Family(gated=True, tied=True),
    "bert": _Family(gated=False, norm=2, qkv_bias=True, out_bias=True, mlp_bias=True, positions=0, tied=True,
                    dropout=True, causal=False),
}


def _attention(config: _Config) -> tuple[int, int, int, int]:
    hidden = config.number("hidden_size", "n_embd", "d_model")
    heads = config.number("num_attention_heads", "n_head", "num_heads")
    kv_heads = config.number("num_key_value_heads", default=heads)
    if config.values.get("head_dim", config.values.get("d_kv")) is None and hidden % heads:
        raise UsageError(f"model {config.name}: hidden size {hidden} is not divisible by {heads} heads; "
                         f"change one of them or give head_dim")
    if heads % kv_heads:
        raise UsageError(f"model {config.name}: {heads} heads are not divisible by {kv_heads} key-value heads; "
                         f"change num_key_value_heads")
    return hidden, heads, kv_heads, config.number("head_dim", "d_kv", default=max(hidden // heads, 1))


def _transformer(config: _Config, sequence: int | None) -> Profile:
    family = _FAMILIES[config.values["model_type"]]
    hidden, heads, kv_heads, head_dim = _attention(config)
    layers = config.number("num_hidden_layers", "n_layer")
    ffn = config.number("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
    vocabulary = config.number("vocab_size")
    positions = config.number("max_position_embeddings", "n_positions", "n_ctx", default=2048)
    if config.values.get("word_embed_proj_dim") not in (None, hidden):
        raise UsageError(f"model {config.name}: word_embed_proj_dim other than hidden_size is not supported; "
                         f"choose another model")
    attention_bias = config.flag("attention_bias", False)
    inner, kv = heads * head_dim, kv_heads * head_dim
    each = 2 * hidden * (inner + kv) + (3 if family.gated else 2) * hidden * ffn + 2 * family.norm * hidden
    each += (inner + 2 * kv) * (family.qkv_bias or attention_bias) + hidden * (family.out_bias or attention_bias)
    each += ((2 if family.gated else 1) * ffn + hidden) * (family.mlp_bias or config.flag("mlp_bias", False))
    each += 2 * head_dim * family.head_norms
    tied = config.flag("tie_word_embeddings", family.tied)
    first = vocabulary * hidden
    if family.positions is not None:
        first += (positions + family.positions) * hidden
    last = family.norm * hidden + (0 if tied else vocabulary * hidden)
    if config.values["model_type"] == "bert":      # segments and a norm before the blocks, a pooler after them
        first += config.number("type_vocab_size", default=2) * hidden + 2 * hidden
        last = hidden * hidden + hidden
    tokens = sequence or positions
    if family.positions is not None and tokens > positions:
        raise UsageError(f"model {config.name} has {positions} learned positions, fewer than a sequence of {tokens}; "
                         f"use a sequence up to {positions}")
    rates = [config.values[key] for key in ("resid_pdrop", "dropout", "hidden_dropout_prob") if key in config.values]
    dropout = family.dropout and (any(rates) or not rates)
    block = Block(layers=layers, tokens=tokens, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
                  ffn=ffn, gated=family.gated, parameters=each, dropout=dropout, causal=family.causal)
    return Profile(name=config.name, kind="transformer", sequence=tokens, blocks=(block,), first=first, last=last,
                   vocabulary=vocabulary, tied=tied)


def _t5(config: _Config, sequence: int | None) -> Profile:
    hidden, heads, kv_heads, head_dim = _attention(config)
    ffn, vocabulary = config.number("d_ff"), config.number("vocab_size")
    gated = str(config.values.get("feed_forward_proj", "relu")).startswith("gated")
    encoders = config.number("num_layers")
    decoders = config.number("num_decoder_layers", default=encoders)
    tokens = sequence or config.number("n_positions", default=512)
    inner = heads * head_dim
    attention, mlp = 4 * hidden * inner, (3 if gated else 2) * hidden * ffn
    shape: dict[str, Any] = {"tokens": tokens, "hidden": hidden, "heads": heads, "kv_heads": kv_heads,
                             "head_dim": head_dim, "ffn": ffn, "gated": gated, "dropout": True}
    biases = 2 * config.number("relative_attention_num_buckets", default=32) * heads
    tied = config.flag("tie_word_embeddings", True)
    return Profile(
        name=config.name, kind="encoder-decoder", sequence=tokens, vocabulary=vocabulary, tied=tied,
        blocks=(Block(layers=encoders, parameters=attention + mlp + 2 * hidden, causal=False, **shape),
                Block(layers=decoders, parameters=2 * attention + mlp + 3 * hidden, crosses=tokens, **shape)),
        first=vocabulary * hidden, last=biases + 2 * hidden + (0 if tied else vocabulary * hidden))


def _vit(config: _Config, sequence: int | None) -> Profile:
    if sequence not in (None, 1):
        raise UsageError(f"model {config.name}: an image model has no sequence; leave it out")
    hidden, heads, kv_heads, head_dim = _attention(config)
    image, patch = config.number("image_size", default=224), config.number("patch_size", default=16)
    if image % patch:
        raise UsageError(f"model {config.name}: image_size {image} is not divisible by patch_size {patch}; change one")
    tokens = (image // patch) ** 2 + 1
    ffn = config.number("intermediate_size", default=4 * hidden)
    classes = config.number("num_labels", "num_classes", default=1000)
    bias = 3 * hidden if config.flag("qkv_bias", True) else 0
    each = 4 * hidden * hidden + bias + hidden + 2 * hidden * ffn + ffn + hidden + 4 * hidden
    block = Block(layers=config.number("num_hidden_layers"), tokens=tokens, hidden=hidden, heads=heads,
                  kv_heads=kv_heads, head_dim=head_dim, ffn=ffn, gated=False, parameters=each, causal=False)
    channels = config.number("num_channels", default=3)
    first = channels * patch * patch * hidden + hidden + hidden + tokens * hidden
    return Profile(name=config.name, kind="vision", sequence=1, blocks=(block,), first=first,
                   last=2 * hidden + hidden * classes + classes, vocabulary=0)


def _stated(config: _Config, sequence: int | None) -> Profile:
    """A net whose size, FLOPs and stored elements the card states outright."""
    if sequence not in (None, 1):
        raise UsageError(f"model {config.name}: an image model has no sequence; leave it out")
    return Profile(name=config.name, kind="stated", sequence=1, blocks=(), first=0, last=0, vocabulary=0,
                   stated_parameters=config.number("parameters"),
                   stated_flops=float(config.number("forward_flops_per_sample")),
                   stated_elements=float(config.number("stored_elements_per_sample")))


_MODEL_TYPES: dict[str, Callable[[_Config, int | None], Profile]] = {
    **dict.fromkeys(_FAMILIES, _transformer), "t5": _t5, "vit": _vit, "stated": _stated}
