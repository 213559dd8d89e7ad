"""From a model and a strategy to buckets: what is checked, equalised and laid out when a model is wrapped.

One bucket after the other: its parameters are made equal to rank 0's, moved into the flat buffer and, for
ZeRO-3, cut at once, so that the peak of wrapping is the model plus one bucket.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from dplab.core.bucket import Bucket
from dplab.core.deferred import Deferred
from dplab.core.grads import BufferPool
from dplab.core.home import Home
from dplab.core.precision import Dtypes
from dplab.core.units import Unit
from dplab.errors import UsageError
from dplab.layout import bucket_cap, bucket_plan
from dplab.specs import Placement, Strategy
from dplab.wire.world import Mesh

Named = list[tuple[str, nn.Parameter]]

WRAPPED = "_dplab_wrapped"
"""Marks a parameter that an engine has laid out."""


def check_model(model: nn.Module, strategy: Strategy, mesh: Mesh) -> None:
    """Refuses what cannot be trained here, by name; and ranks that do not hold the same model."""
    named = list(model.named_parameters())
    if strategy.sharding.params is Placement.SHARDED and (
            "_orig_mod" in model._modules or getattr(model, "_compiled_call_impl", None) is not None):
        raise UsageError(f"strategy {strategy} gathers weights around each unit, and a model compiled as a whole runs "
                         f"as one; compile its units instead (for block in model.blocks: block.compile())")
    for name, parameter in named:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise UsageError(f"parameter {name!r} has no shape yet (a lazy module); run the model once on a sample "
                             f"before dplab.parallelize")
        if parameter.is_inference():
            raise UsageError(f"parameter {name!r} was made under torch.inference_mode, where nothing can be trained; "
                             f"make the model outside of it")
        if hasattr(parameter, WRAPPED):
            raise UsageError(f"parameter {name!r} is in a model that was wrapped already; wrap a model once, or build "
                             f"it again and load engine.full_state_dict() into it")
    if not any(parameter.requires_grad and parameter.numel() for _, parameter in named):
        raise UsageError(f"model {type(model).__name__} has no trainable parameter; set requires_grad on what is to "
                         f"be trained")
    for name, parameter in named:
        dtype = str(parameter.dtype).removeprefix("torch.")
        if parameter.requires_grad and parameter.is_complex():
            raise UsageError(f"parameter {name!r} is {dtype}; hold its real and imaginary parts as one real parameter "
                             f"(torch.view_as_real) and use torch.view_as_complex in forward")
        if parameter.requires_grad and parameter.element_size() < 4 and strategy.precision.param is None:
            raise UsageError(f"parameter {name!r} is {dtype}; without a master copy small updates of it round away: "
                             f"choose precision 'bf16' or 'fp16' in the strategy, or call model.float() first")
        if parameter.layout is not torch.strided:
            raise UsageError(f"parameter {name!r} is {parameter.layout}; only dense parameters can be laid out")
    _check_buffers(model)
    described = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in named]
    digest = hashlib.sha256(repr(described).encode()).digest()
    if len(set(mesh.world.gather_objects(digest))) > 1:
        _name_difference(mesh.world.gather_objects(described))


def _check_buffers(model: nn.Module) -> None:
    """Refuses buffers that no rank's values can be written into."""
    for name, buffer in model.named_buffers():
        if buffer.layout is not torch.strided:
            raise UsageError(f"buffer {name!r} is {buffer.layout}, and buffers are made equal on all ranks byte by "
                             f"byte; register its to_dense()")
        expanded = any(size > 1 and not stride for size, stride in zip(buffer.shape, buffer.stride(), strict=True))
        if buffer.numel() and (expanded or buffer.is_conj() or buffer.is_neg()):
            how = "an expanded" if expanded else "a conjugated" if buffer.is_conj() else "a negated"
            raise UsageError(f"buffer {name!r} is {how} view, which nothing can be written into; register "
                             f"{'its contiguous()' if expanded else 'its resolve_conj().resolve_neg()'}")


def _name_difference(every: list[list[tuple[object, ...]]]) -> None:
    for rank, described in enumerate(every[1:], start=1):
        for mine, theirs in zip(every[0], described, strict=False):
            if mine != theirs:
                raise UsageError(f"the ranks hold different models: rank 0 has parameter {mine}, rank {rank} has "
                                 f"{theirs} in its place; build the same model on every rank")
        if len(described) != len(every[0]):
            raise UsageError(f"the ranks hold different models: rank 0 has {len(every[0])} parameters, rank {rank} "
                             f"has {len(described)}; build the same model on every rank")


def make_equal(model: nn.Module, mesh: Mesh) -> None:
    """Buffers of every rank become rank 0's. (Parameters follow bucket by bucket.)"""
    for buffer in model.buffers():
        broadcast(buffer.detach(), mesh)


def broadcast(tensor: torch.Tensor, mesh: Mesh) -> None:
    """Rank 0's values into `tensor` on every rank, whatever its dtype and strides."""
    if not tensor.numel():
        return
    plain = tensor.contiguous()
    mesh.world.broadcast(plain.view(-1).view(torch.uint8)).wait()
    tensor.copy_(plain)


def build_buckets(model: nn.Module, units: Sequence[Unit], strategy: Strategy, mesh: Mesh,
                  deferred: Deferred) -> tuple[list[Bucket], list[BufferPool]]:
    """All buckets in launch order, with their roles; and the pools that sharded gradients fill from.

    A ZeRO-3 unit is one bucket, but for the root, whose parameters lie at both ends of the model and are cut
    by size like everything else. A bucket is full once backward has met its first registered parameter, and
    buckets launch in that order.
    """
    order = {name: place for place, (name, _) in enumerate(model.named_parameters())}
    # kernels of normalisation take 2-byte inputs with weights in the dtype of their running statistics
    kept = {parameter for module in model.modules() if isinstance(module, _NormBase)
            for parameter in module.parameters(recurse=False)} if strategy.precision.param else set()
    if strategy.sharding.params is Placement.SHARDED:
        pieces = [piece for unit in units for alike in _alike(unit.parameters, kept)
                  for piece in (_by_size(alike, strategy.bucket_mb) if unit.is_root else [alike[::-1]])]
    else:
        pieces = [piece for alike in _alike(list(model.named_parameters()), kept)
                  for piece in _by_size(alike, strategy.bucket_mb)]
    pieces.sort(key=lambda piece: -min(order[name] for name, _ in piece))
    buckets = [Bucket(index, piece, mesh, _dtypes(piece[0][1], strategy, kept)) for index, piece in enumerate(pieces)]
    pools: dict[tuple[torch.dtype, torch.device], BufferPool] = {}
    if strategy.sharding.grads is Placement.SHARDED:
        for key in {(bucket.dtypes.unreduced, bucket.device) for bucket in buckets if bucket.trainable}:
            longest = max(b.layout.numel for b in buckets if b.trainable and (b.dtypes.unreduced, b.device) == key)
            pools[key] = BufferPool(longest, *key, mesh.shard)
    home = Home.of(strategy, buckets[0].device, tell=mesh.world.rank == 0)
    for bucket in deferred.laid(buckets, units):
        for parameter in bucket.parameters:
            if deferred.place is None:
                broadcast(parameter.detach(), mesh)
            setattr(parameter, WRAPPED, True)
        bucket.take_roles(strategy.sharding, pools.get((bucket.dtypes.unreduced, bucket.device)), home)
    return buckets, list(pools.values())


def check_optimizer(optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
    """Refuses one that is bound to the GPU where it is to step on the host."""
    if any(bucket.params.steps_on_host for bucket in buckets) and any(
            group.get("capturable") for group in optimizer.param_groups):
        raise UsageError(f"optimizer {type(optimizer).__name__} has capturable=True, which steps on the GPU, and the "
                         f"strategy's offload steps on the host; leave one of them out")


def _alike(named: Named, kept: set[nn.Parameter]) -> list[Named]:
    """Grouped by dtype, device and trainability, which a flat buffer cannot mix."""
    groups: dict[tuple[torch.dtype, torch.device, bool, bool], Named] = defaultdict(list)
    for name, parameter in named:
        key = parameter.dtype, parameter.device, parameter.requires_grad, parameter in kept
        groups[key].append((name, parameter))
    return list(groups.values())


def _dtypes(first: nn.Parameter, strategy: Strategy, kept: set[nn.Parameter]) -> Dtypes:
    if first in kept or not first.is_floating_point():
        return Dtypes.as_is(first.dtype)
    return Dtypes.of(strategy, first.dtype)


def _by_size(named: Named, bucket_mb: float | None) -> list[Named]:
    nbytes = [parameter.numel() * parameter.element_size() for _, parameter in named]
    plan = bucket_plan(nbytes, bucket_cap(sum(nbytes), bucket_mb))
    return [[named[index] for index in bucket] for bucket in plan]
