"""One strategy on one cluster, predicted: what a run of it would take, without a search."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from dplab.errors import UsageError
from dplab.planner import configs, cost, memory
from dplab.planner.footprint import with_default_precision
from dplab.planner.hardware import Cluster
from dplab.planner.hardware import cluster as parse_cluster
from dplab.planner.plans import Plan
from dplab.planner.profile import Profile
from dplab.planner.recipes import Recipe
from dplab.planner.recipes import recipe as named_recipe
from dplab.planner.sharing import TRAVELS
from dplab.planner.simulate import simulate
from dplab.planner.split import Split
from dplab.specs import PRECISIONS, SHARDINGS, Recompute, Strategy
from dplab.topology import Topology


def predict(model: str | Path | dict[str, Any] | Profile, cluster: str | Cluster, strategy: Strategy | str, *,
            micro_batch: int = 1, sequence: int | None = None, network: str | None = None,
            recipe: str | Recipe | None = None) -> Plan:
    """Step, memory and timeline of `strategy` with `micro_batch` samples a rank on all of a cluster, data-parallel.

    `cluster="this-machine"` is what `dplab.calibrate` measured, and a run's own precision; elsewhere a strategy that
    names no precision counts as bf16, like `estimate`. A strategy's topology counts on this machine, which emulates it:
    the longer of what its wire takes and what the links would. Raises UsageError as `plan` does, but for what does not
    fit: see the memory.
    """
    if isinstance(micro_batch, bool) or not isinstance(micro_batch, int) or micro_batch < 1:
        raise UsageError(f"predict(micro_batch={micro_batch!r}) is not allowed; it is a whole number of samples >= 1")
    profile, place = configs.model(model, sequence=sequence), parse_cluster(cluster, network=network)
    here = place.gpu.measured is not None
    chosen = Strategy.parse(strategy) if here else with_default_precision(strategy)
    program = named_recipe(recipe or place.recipe).with_precision(chosen.precision)
    program = replace(program, bucket_mb=chosen.bucket_mb, wire=_share(chosen, program))
    if here and chosen.topology is not None:
        place = _emulated(place, chosen)
    place.gpu.flops(program.dtype)
    again = Recompute.parse(chosen.recompute).everything("a predicted step")
    split = Split(dp=place.count, zero=list(SHARDINGS).index(chosen.sharding.name), micro_batch=micro_batch,
                  groups=place.topology.hosts if place.topology is not None and place.hybrid else 1,
                  accumulate=chosen.accumulate, recompute=2 if again else 0)
    name = next((name for name, known in PRECISIONS.items() if known == chosen.precision), "own precision")
    return Plan(split=split, precision=name, step=simulate(profile, split, place, program).step,
                memory=memory.predict(profile, split, program), cost=cost.predict(profile, split, place, program))


def _share(strategy: Strategy, program: Recipe) -> float:
    """Share of a gradient's bytes that travels."""
    if strategy.wire is None:
        return 1.0
    if strategy.wire not in TRAVELS:
        raise UsageError(f"what wire={strategy.wire} sends depends on every matrix's shape and is not predicted; "
                         f"predict {', '.join(TRAVELS)}, or leave wire out")
    return min(1.0, TRAVELS[strategy.wire] / float(program.grad_bytes(Split(accumulate=strategy.accumulate))))


def _emulated(place: Cluster, strategy: Strategy) -> Cluster:
    """This machine behind the links that a strategy's run would emulate."""
    links = Topology.parse(strategy.topology or "")
    links.require(place.count)
    if strategy.hybrid:
        links.grid()
    return replace(place, topology=links, hybrid=strategy.hybrid)
