"""Profiles: parameter counts as published, FLOPs as the literature counts them, and what is refused."""

from __future__ import annotations

import json
import re

import pytest

from dplab import cards
from dplab.errors import UsageError
from dplab.planner import configs

EXACT = {
    "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616, "llama-2-13b": 13_015_864_320, "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248, "llama-3-70b": 70_553_706_496, "llama-3-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400, "mistral-7b": 7_241_732_096, "qwen2-7b": 7_615_616_512,
    "t5-small": 60_506_624, "t5-11b": 11_307_321_344, "vit-b-16": 86_567_656, "vit-h-14": 632_045_800,
    "bert-base": 109_482_240, "resnet-50": 25_557_032,
}


@pytest.mark.parametrize("name", EXACT)
def test_published_parameter_counts_exactly(name):
    assert configs.model(name).parameters == EXACT[name]


@pytest.mark.parametrize("name", cards.names("models"))
def test_every_card_counts_what_it_says_was_published(name):
    profile = configs.model(name)
    rounded = 0.012 if "rounded" in profile.source else 0
    assert profile.parameters == pytest.approx(profile.published_parameters, rel=rounded or 1e-12)
    assert profile.source


MOSAIC = {125_311_488: (12, 768), 355_985_408: (24, 1024), 760_470_528: (24, 1536), 1_315_950_592: (24, 2048),
          2_651_837_440: (32, 2560), 12_853_954_560: (40, 5120), 64_862_437_376: (80, 8192)}
"""Parameter counts of the GPTs in mosaicml/llm-foundry's benchmark table: layers and width."""


@pytest.mark.parametrize("count", MOSAIC)
def test_gpts_of_the_llm_foundry_table(count):
    layers, hidden = MOSAIC[count]
    config = {"model_type": "gpt2", "n_layer": layers, "n_embd": hidden, "n_head": hidden // 64, "n_positions": 2048,
              "vocab_size": 50368}
    assert configs.model(config).parameters == count


@pytest.mark.parametrize(("name", "layers", "hidden", "vocabulary"), [
    ("gpt3-175b", 96, 12288, 51200), ("megatron-1t", 128, 25600, 51200)])
def test_flops_are_the_formula_of_the_megatron_paper(name, layers, hidden, vocabulary):
    """arXiv:2104.04473: 96 B s L h^2 (1 + s/(6h) + V/(16Lh)) with recomputation, 72 (... V/(12Lh)) without."""
    profile, s = configs.model(name), 2048
    model = 72 * s * layers * hidden**2 * (1 + s / (6 * hidden) + vocabulary / (12 * layers * hidden))
    hardware = 96 * s * layers * hidden**2 * (1 + s / (6 * hidden) + vocabulary / (16 * layers * hidden))
    assert profile.model_flops() == pytest.approx(model, rel=1e-12)
    assert profile.hardware_flops("full") == pytest.approx(hardware, rel=1e-12)
    assert profile.hardware_flops("none") == profile.model_flops()


def test_mfu_and_hfu_differ_by_what_the_recomputation_paper_says():
    """arXiv:2205.05198 section 5: selective recomputation adds s/(6h) of the layers' FLOPs over three passes; its
    table 5 prints MFU 51.4 and HFU 52.8 % for 175B."""
    profile = configs.model("gpt3-175b")
    assert profile.hardware_flops("selective") / profile.model_flops() == pytest.approx(52.8 / 51.4, abs=0.02)
    assert profile.hardware_flops("full") / profile.model_flops() == pytest.approx(4 / 3, rel=0.01)


def test_a_causal_count_halves_the_attention_alone():
    profile = configs.model("llama-7b")
    block = profile.blocks[0]
    assert (profile.model_flops() - profile.model_flops(causal=True)
            == pytest.approx(3 * 32 * 2.0 * 2048 * 2048 * block.inner))
    encoder = configs.model("bert-base")
    assert encoder.model_flops(causal=True) == encoder.model_flops()


def test_a_resnet_and_a_vit_state_their_samples():
    assert configs.model("resnet-50").forward_flops() == 8.18e9
    assert configs.model("vit-b-16").forward_flops() == pytest.approx(2 * 17.58e9, rel=0.02), "torchvision: 17.56 GMACs"
    assert not configs.model("t5-base").pipelines


def test_the_sequence_can_be_changed():
    assert configs.model("llama-7b", sequence=4096).sequence == 4096
    assert configs.model("llama-7b", sequence=4096).parameters == configs.model("llama-7b").parameters


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma", "gpt_neox", "opt", "phi3",
                                  "bert", "t5"])
def test_counts_are_those_of_the_models_that_transformers_builds(kind):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config = transformers.AutoConfig.for_model(kind)
    small = {"hidden_size": 64, "n_embd": 64, "d_model": 64, "num_attention_heads": 4, "n_head": 4, "num_heads": 4,
             "num_key_value_heads": 2, "num_hidden_layers": 3, "n_layer": 3, "num_layers": 3, "num_decoder_layers": 2,
             "intermediate_size": 160, "ffn_dim": 160, "d_ff": 160, "vocab_size": 320, "head_dim": 16, "d_kv": 16,
             "word_embed_proj_dim": 64, "pad_token_id": 0}
    for name, value in small.items():
        if hasattr(config, name):
            setattr(config, name, value)
    with torch.device("meta"):
        auto = {"bert": transformers.AutoModel, "t5": transformers.AutoModelForSeq2SeqLM}.get(
            kind, transformers.AutoModelForCausalLM)
        built = auto.from_config(config)
    values = {**config.to_dict(), "tie_word_embeddings": config.tie_word_embeddings}
    assert configs.model(values).parameters == sum(p.numel() for p in built.parameters())


def test_a_config_file_and_its_folder(tmp_path):
    config = cards.find("models", "mistral-7b", what="model")["config"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(config))
    for path in (tmp_path / "mine", tmp_path / "mine" / "config.json"):
        assert configs.model(path).parameters == 7_241_732_096
    assert configs.model(str(tmp_path / "mine" / "config.json")).name == "mine"


LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
         "intermediate_size": 128, "vocab_size": 256}


@pytest.mark.parametrize(("given", "message"), [
    ("lama-7b", r"model 'lama-7b' is not known; the nearest are llama-7b, .*or give the path of a Hugging Face"),
    ("zzzz", r"model 'zzzz' is not known; there are bench-gpt, bert-base, .*vit-l-16"),
    ({**LLAMA, "model_type": "mixtral"}, r"model_type 'mixtral' is not supported; supported are bert, gemma"),
    ({**LLAMA, "hidden_size": None}, r"its config has no hidden_size or n_embd or d_model; add it"),
    ({**LLAMA, "num_attention_heads": 5}, r"hidden size 64 is not divisible by 5 heads; change one of them"),
    ({**LLAMA, "num_attention_heads": 5, "head_dim": None}, r"hidden size 64 is not divisible by 5 heads"),
    ({**LLAMA, "num_key_value_heads": 3}, r"4 heads are not divisible by 3 key-value heads"),
    ({**LLAMA, "num_hidden_layers": "two"}, r"num_hidden_layers='two' is not allowed; it is a whole number >= 1"),
    ({"model_type": "vit", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "image_size": 100},
     r"image_size 100 is not divisible by patch_size 16; change one"),
])
def test_bad_models(given, message):
    with pytest.raises(UsageError, match=message):
        configs.model(given)


def test_bad_files_and_sequences(tmp_path):
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(UsageError, match=r"bad.json' is not JSON .*give a Hugging Face config.json"):
        configs.model(tmp_path / "bad.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(UsageError, match=r"holds no JSON object"):
        configs.model(tmp_path / "list.json")
    with pytest.raises(UsageError, match=r"cannot be read \(No such file or directory\)"):
        configs.model(tmp_path / "none.json")
    with pytest.raises(UsageError, match=r"sequence=0 is not allowed; sequence is a whole number of tokens >= 1"):
        configs.model("gpt2", sequence=0)
    with pytest.raises(UsageError, match=r"gpt2 has 1024 learned positions, fewer than a sequence of 4096; use a seq"):
        configs.model("gpt2", sequence=4096)
    with pytest.raises(UsageError, match=r"an image model has no sequence; leave it out"):
        configs.model("vit-b-16", sequence=5)


@pytest.mark.parametrize("given", ["llama", "gpt", "7b", "resnet", "lama-7b"])
def test_names_that_are_suggested_are_those_that_are_listed(given):
    with pytest.raises(UsageError) as told:
        configs.model(given)
    suggested = re.search(r"the nearest are ([^;]*?), or give", str(told.value)).group(1).split(", ")
    assert suggested
    assert set(suggested) <= set(cards.names("models"))
