"""Results that others published, as cases: what was run, in the planner's own terms, and what came out.

`data/published/*.json` holds the facts, each with its source; here each becomes a profile, a split, a recipe and a
cluster, or a reason why it cannot.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from dplab import cards
from dplab.planner import configs, hardware
from dplab.planner.hardware import Cluster
from dplab.planner.profile import Profile
from dplab.planner.recipes import Recipe, recipe
from dplab.planner.split import Split
from dplab.resources import DATA, folder


@dataclass(frozen=True, kw_only=True)
class Case:
    """One published result; `value` is in `unit`, text for verdicts."""

    id: str
    kind: str
    source: str
    value: float | str
    unit: str
    model: dict[str, Any]
    cluster: dict[str, Any]
    config: dict[str, Any]

    @property
    def stem(self) -> str:
        """The id's first part: whose result it is."""
        return self.id.split("-")[0]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A case in the planner's terms."""

    profile: Profile
    split: Split
    recipe: Recipe
    cluster: Cluster


ASYNC_SHARE = 0.4
"""Share of tensor-parallel collectives that torchtitan's asynchronous ones hide: read off its own three pairs."""


class Unusable(Exception):
    """A case leaves out something that a prediction needs; the message says what."""


@cache
def cases() -> tuple[Case, ...]:
    """All published results."""
    rows = [row for path in sorted((folder(DATA) / "published").glob("*.json")) for row in json.loads(path.read_text())]
    return tuple(Case(**{"model": {}, "cluster": {}, "config": {}, **row}) for row in rows)


def case(name: str) -> Case:
    """The case of an id."""
    return next(case for case in cases() if case.id == name)


def setup(case: Case) -> Setup:
    """What was run. Raises Unusable where the publication leaves it open."""
    chosen = recipe_of(case)
    profile = profile_of(case)
    return Setup(profile=profile, split=_split(case, profile), recipe=chosen, cluster=cluster_of(case))


def recipe_of(case: Case) -> Recipe:
    """The program that ran."""
    config, stem = case.config, case.stem
    if config.get("offload", "none") not in ("none", None):
        raise Unusable("offloading is not modelled")
    if str(config.get("precision", "")).startswith("fp8"):
        dtype: dict[str, Any] = {"dtype": "fp8"}
    else:
        dtype = {}
    if stem == "recomp":
        return recipe("megatron-2022" if config.get("sequence_parallel") else replace(
            recipe("megatron-2022"), sequence_parallel=False))
    if stem == "zb":
        return replace(recipe("zero-bubble"), schedule={"ZB-1p": "zb-1p", "ZB-2p": "zb-2p"}.get(
            config["schedule"], "1f1b"))
    if stem == "mosaic":
        return recipe("llm-foundry-pure" if "pure" in config["precision"] else "llm-foundry")
    if case.id.startswith("sc21-t2-zero3"):
        return recipe("deepspeed-2021")
    named = {"sc21": "megatron-2021", "mlm": "megatron-2021", "mtnlg": "megatron-2021", "vtrain": "megatron-2021",
             "mcore": "megatron-core", "nanotron": "nanotron", "titan": "fsdp", "llama1": "fsdp", "fsdp": "fsdp",
             "zero": "states-16", "alpa": "megatron-2021"}
    if stem not in named:
        raise Unusable("the program is not described")
    if case.id.startswith("nanotron-tp"):      # another script than the sweep: gathered inputs are gathered again
        return replace(recipe("nanotron"), keeps_gathered=False)
    if config.get("compile"):
        dtype["passes"] = 1.0
    if config.get("async_tp"):
        dtype["tensor_hidden"] = ASYNC_SHARE
    return replace(recipe(named[stem]), **dtype)


def profile_of(case: Case) -> Profile:
    """The model that was trained."""
    given, stem = case.model, case.stem
    if stem == "llama1" and given.get("params"):
        return configs.model(f"llama-{round(given['params'] / 1e9)}b")
    if not all(given.get(name) for name in ("layers", "hidden", "seq")):
        raise Unusable("the model's shape was not published")
    layers, hidden, sequence = given["layers"], given["hidden"], given["seq"]
    heads = given.get("heads") or hidden // 64
    vocabulary = given.get("vocab", 50304 if stem == "zb" else 51200)
    if given.get("ffn") or stem == "titan":
        values = {"model_type": "llama", "num_hidden_layers": layers, "hidden_size": hidden,
                  "num_attention_heads": heads, "num_key_value_heads": given.get("kv_heads", 8 if (
                      stem == "titan" and hidden == 8192) else heads),
                  "intermediate_size": given.get("ffn", 28672), "vocab_size": vocabulary,
                  "tie_word_embeddings": given.get("tied", False)}
    else:
        values = {"model_type": "gpt2", "n_layer": layers, "n_embd": hidden, "n_head": heads,
                  "n_positions": sequence, "vocab_size": vocabulary, "resid_pdrop": 0.0 if stem == "mosaic" else 0.1}
    return configs.model({**values, "name": f"{layers} x {hidden}"}, sequence=sequence)


def _split(case: Case, profile: Profile) -> Split:
    config = case.config
    if isinstance(config.get("zero"), str) or config.get("cp", 1) > 1:
        raise Unusable("context parallelism and hybrid sharding are not modelled")
    if "model_parallel" in config:
        raise Unusable("only the product of tensor and pipeline degree was published")
    if "dp" not in config:
        raise Unusable("the degrees of parallelism were not published")
    dp, tp, pp = (config.get(name, 1) for name in ("dp", "tp", "pp"))
    micro = config.get("micro_batch")
    if case.stem == "alpa":      # its micro-batch is that of all replicas together
        micro //= dp
    if micro is None:
        raise Unusable("the micro-batch was not published")
    # a pipeline whose micro-batches were not said is taken as full
    accumulate = config.get("grad_accum") or config.get("micro_batches") or (
        config["global_batch"] // (dp * micro) if config.get("global_batch") else 4 * pp if pp > 1 else 1)
    chunks = config.get("interleave", 1)
    if config.get("schedule") == "1F1B-I":
        chunks = (profile.layers + 2) // pp
    # the FLOP/s printed beside these times count a second forward
    again = case.id.startswith("mlm-tables") or case.stem == "mtnlg"
    mode = "full" if again else str(config.get("recompute", "none"))
    known = {"none": 0, "selective": 1, "full": 2, "selective op": 3, "selective layer": 4}
    if mode not in known:
        raise Unusable(f"recomputation {mode!r} is not modelled")
    return Split(dp=dp, tp=tp, pp=pp, zero=config.get("zero", 0), micro_batch=micro, accumulate=accumulate,
                 recompute=known[mode], chunks=chunks)


def cluster_of(case: Case) -> Cluster:
    """The GPUs that it ran on; links as published, else the card's."""
    given = case.cluster
    name = re.split(r"[ (]", given.get("gpu", "A100-SXM-80GB"))[0]
    if name.lower() not in cards.cards("hardware"):
        raise Unusable("the GPU was not published")
    part = hardware.cluster(f"1x{name}")
    count = given.get("count") or 8
    # vTrain's files say 150 GB/s inside a node, but its own all-reduce table shows 178: the card's figure is used
    link = None if case.stem == "vtrain" else given.get("intra_bw")
    return replace(part, count=count, per_node=min(given.get("per_node", 8), count),
                   link=link * 1e9 if link else part.link,
                   network=given["inter_bw"] * 1e9 if given.get("inter_bw") else part.network)


def measured_bytes(case: Case) -> float:
    """A published memory figure in bytes; GB and GiB as the unit says."""
    scales = {"GiB": 2.0**30, "GB": 1e9, "MiB": 2.0**20, "MB": 1e6}
    unit = "GiB" if "2^30" in case.unit else case.unit.split()[0]
    if unit not in scales or isinstance(case.value, str):
        raise Unusable("the figure is not a size")
    return float(case.value) * scales[unit]
