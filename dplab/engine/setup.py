"""What is asked for is checked and laid out, before anything of the model is touched."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from torch import nn

from dplab.core.buffers import Rule
from dplab.core.deferred import Deferred, Fill
from dplab.core.optim import OptimizerLike
from dplab.core.units import UnitRule
from dplab.engine.engine import Engine
from dplab.errors import UsageError
from dplab.specs import Placement, Strategy
from dplab.topology import Topology
from dplab.wire.codec import MakeCodec
from dplab.wire.codecs import named
from dplab.wire.world import Mesh, World, init


def parallelize(
    model: nn.Module,
    optimizer: OptimizerLike,
    strategy: Strategy | str | None = None,
    *,
    mesh: Any = None,
    units: UnitRule = None,
    buffers: Rule = "rank0",
    materialize: Fill | str | os.PathLike[str] | None = None,
    codec: MakeCodec | None = None,
) -> Engine:
    """Makes `model` train on every rank of the world; collective.

    `optimizer` is a function from the model's parameters to a torch.optim.Optimizer, or a fresh optimizer on
    them. `strategy` is a `Strategy` or its one-line form; None takes the run's own, else `ddp`. `mesh` is a
    DeviceMesh with dimensions ("replicate", "shard"), or such a pair of sizes, for hybrid sharding. `units`
    names the module classes or paths that ZeRO-3 gathers together; None: the model's `shard_units`, else
    the members of its ModuleLists and Sequentials. `buffers` (running statistics) that changed are made equal
    at the end of every step: `rank0`'s values, the `mean` of the ranks (integers: rank 0's), or `local`: never.
    `codec` makes, from a bucket's slots, the dplab.wire.Codec by which its gradients travel; None: as the strategy
    says.

    A model built under `torch.device("meta")` gets memory and values unit by unit, so that no rank ever holds the
    whole of what ZeRO-3 shards. `materialize`: a function of path and module that fills the module's own parameters
    and buffers in place; or a .safetensors file or checkpoint folder that holds them; None: each module's
    `reset_parameters()` and the model's `_init_weights(module)`, children before parents. Where the constructors drew
    their values in that order and by these alone, they are those of the model built on the CPU with the same seed.

    Raises UsageError (a ValueError) for anything that is not allowed, by name. Weights and buffers become
    rank 0's.
    """
    chosen = _strategy(strategy)
    if not isinstance(model, nn.Module):
        raise UsageError(f"model is a {type(model).__name__}; parallelize takes a torch.nn.Module")
    world = init()
    chosen.require_ranks(world.size)
    sharded = chosen.sharding.optim is Placement.SHARDED
    if codec is not None and chosen.wire is not None:
        raise UsageError(f"parallelize was given a codec and strategy {str(chosen)!r}, which names one; leave one out")
    if codec is None and chosen.wire is not None:
        codec = named(chosen.wire)
    axes = replace(_mesh(world, chosen, mesh, sharded=sharded), codec=codec)
    if axes.shard.size > 1 and not sharded:
        raise UsageError(f"strategy {chosen} shards nothing, and the mesh has a shard axis of {axes.shard.size}; leave "
                         f"mesh out, or use zero1, zero2 or zero3")
    deferred = Deferred.of(model, materialize)
    engine = Engine(model, optimizer, chosen, world, axes, units, buffers, deferred=deferred)
    if deferred.place is not None:
        engine.load(deferred.place, optimizer=False)
    return engine


def _mesh(world: World, chosen: Strategy, mesh: Any, *, sharded: bool) -> Mesh:
    topology = None if chosen.topology is None else Topology.parse(chosen.topology)
    if chosen.hybrid:
        if mesh is not None:
            raise UsageError(f"strategy {str(chosen)!r} takes its mesh from the hosts; leave hybrid or mesh out")
        return Mesh.hybrid(world, sharded=sharded, topology=topology)
    if mesh is None:
        return Mesh.flat(world, sharded=sharded, topology=topology)
    axes = Mesh.of(world, mesh, topology=topology)
    if min(axes.shard.size, axes.replicate.size) > 1 and (chosen.wire or "").startswith("powersgd"):
        raise UsageError(f"strategy {str(chosen)!r} needs whole matrices, and mesh {mesh} cuts them before they are "
                         f"compressed; use wire=int8 or wire=bf16, or a mesh of one axis")
    return axes


def _strategy(given: Strategy | str | None) -> Strategy:
    """What was given, and what the run was started with: one of them, or both if they agree."""
    ours = None if given is None else Strategy.parse(given)
    text = os.environ.get("DPLAB_STRATEGY")
    runs = Strategy.parse(text) if text else None
    if ours is not None and runs is not None and ours != runs:
        raise UsageError(f"parallelize was given strategy {str(ours)!r} and the run was launched with {str(runs)!r}; "
                         f"leave one of them out")
    return ours or runs or Strategy()
