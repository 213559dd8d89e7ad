"""All of a rank's memory for a model with a card or a config: states, activations, buffers, slack and context."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from dplab.errors import UsageError
from dplab.planner import configs, memory
from dplab.planner.activations import divided, whole
from dplab.planner.again import under
from dplab.planner.footprint import (
    OPTIMIZER_SLOTS,
    ElementBytes,
    Estimate,
    host_states,
    model_states,
    precision_told,
    with_default_precision,
)
from dplab.planner.recipes import Recipe
from dplab.planner.split import OFFLOAD, Split
from dplab.specs import SHARDINGS, Recompute, Strategy
from dplab.specs.offload import moves

_ALIVE = ("activations", "working", "logits")
_OTHERS = ("gathered", "buckets", "slack", "context")


def estimate_model(model: str | Path | dict[str, Any], world_size: int, strategy: Strategy | str, *,
                   optimizer: str = "adamw", micro_batch: int = 1, sequence: int | None = None) -> Estimate:
    """The peak of one rank under data parallelism, with every figure's formula.

    `activations_bytes` counts what lives for the backward, one layer's working set and the logits. Raises
    UsageError as `estimate` does, and for an unknown model.
    """
    if isinstance(micro_batch, bool) or not isinstance(micro_batch, int) or micro_batch < 1:
        raise UsageError(f"estimate(micro_batch={micro_batch!r}) is not allowed; micro_batch is a whole number >= 1")
    profile = configs.model(model, sequence=sequence)
    chosen = with_default_precision(strategy)
    program = Recipe().with_precision(chosen.precision)
    program = replace(program, moments=OPTIMIZER_SLOTS[optimizer] * (program.master or program.param))
    split = Split(dp=world_size, zero=list(SHARDINGS).index(chosen.sharding.name), micro_batch=micro_batch,
                  accumulate=chosen.accumulate,
                  offload=OFFLOAD.index("optimizer" if moves(chosen.offload)[0] else "none"))
    told, more = under(Recompute.parse(chosen.recompute), profile, split, program)
    states = model_states(profile.parameters, sharding=chosen.sharding, shard=world_size, precision=chosen.precision,
                          optimizer_slots=OPTIMIZER_SLOTS[optimizer], accumulate=chosen.accumulate,
                          reduces_every_backward=chosen.reduces_every_backward, offload=chosen.offload)
    element = ElementBytes.of(chosen.precision, accumulate=chosen.accumulate, slots=OPTIMIZER_SLOTS[optimizer])
    sizes = told.to_dict()
    others = {name: round(sizes[name]) for name in _OTHERS}
    others["slack"] = round(program.slack * (sum(states.values()) + sum(
        sizes[name] for name in (*_ALIVE, "gathered", "buckets"))))
    alive = round(sum(sizes[name] for name in _ALIVE))
    formulas = memory.formulas(told)
    formulas["activations"] += more
    if states["grads"] and states["grads"] != round(sizes["grads"]):
        formulas["grads"] += ", whole between the backwards of a window"
    formulas["activations"] = " + ".join(formulas[name] for name in _ALIVE if sizes[name])
    formulas = {name: formulas[name] for name in (*states, "activations", *_OTHERS) if {**sizes, **states}[name]}
    text = f"{profile.parameters:,} parameters of {profile.name}"
    if profile.blocks:
        block = profile.blocks[-1]
        text += f"; an activation's element holds {whole(block, program) + divided(block, program):.4g} bytes a layer"
    sample = f"sequence {profile.sequence}, " if profile.vocabulary else ""
    note = f"{sample}micro-batch {micro_batch}" + ("; flash attention is assumed" if profile.blocks else "")
    return Estimate(
        strategy=str(chosen), precision=precision_told(strategy, chosen), params=profile.parameters,
        world_size=world_size, model_states_bytes={**states, "total": sum(states.values())}, activations_bytes=alive,
        total_bytes=sum(states.values()) + alive + sum(others.values()), formula=text, other_bytes=others,
        formulas=formulas, note=note,
        host_bytes=host_states(profile.parameters, chosen, shard=world_size, element=element))
