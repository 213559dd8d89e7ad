"""The loop of one rank: forward, backward, step; and what may be asked of it between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dplab.checkpoint.checkpoints import Checkpoints, Place, Stateful
from dplab.checkpoint.saving import Saving
from dplab.checkpoint.trained import Trained
from dplab.core import build, norm
from dplab.core.boundary import Boundary
from dplab.core.buffers import Buffers, Rule
from dplab.core.census import Census
from dplab.core.control import Model
from dplab.core.deferred import Deferred
from dplab.core.described import describe
from dplab.core.full import Full
from dplab.core.gathers import GatheredUnit, Gathers, UnitHooks, in_backward
from dplab.core.hooks import ForwardHooks, hook_parameters, refuse_copies, refuse_whole
from dplab.core.ledger import Ledger
from dplab.core.optim import OptimizerLike, OwnedOptimizer, make
from dplab.core.precision import explain_mismatch, scales_loss
from dplab.core.recompute import Recomputation, recomputable
from dplab.core.reduction import Reduction
from dplab.core.scaler import LossScaler
from dplab.core.shortage import Shortage
from dplab.core.units import UnitRule, find_units
from dplab.errors import UsageError, WireError
from dplab.specs import Placement, Recompute, Strategy
from dplab.telemetry import recorder
from dplab.telemetry.recorder import now
from dplab.wire.world import Mesh, World


class Engine:
    """A model under a strategy. Call it like the model; then `backward(loss)` and `step()`."""

    def __init__(self, model: nn.Module, optimizer: OptimizerLike, strategy: Strategy, world: World, mesh: Mesh,
                 units: UnitRule, buffers: Rule = "rank0", *, deferred: Deferred) -> None:
        self.module, self.strategy, self.world, self.mesh = model, strategy, world, mesh
        self._recorder = recorder.current()
        build.check_model(model, strategy, mesh)
        if deferred:
            deferred.move(world.device)
        made = make(optimizer, model)
        model.to(world.device)
        found = find_units(model, units)
        rule = Recompute.parse(strategy.recompute)
        again = recomputable(model, found, rule)
        self._buckets, pools = build.build_buckets(model, found, strategy, mesh, deferred)
        build.make_equal(model, mesh)
        trainable = [bucket for bucket in self._buckets if bucket.trainable]
        build.check_optimizer(made, trainable)
        self._owned = OwnedOptimizer(made, trainable, whole=mesh.shard.size == 1)
        self.optimizer = made
        self._census, self._synced = Census(model, self._buckets), Buffers(model, buffers, mesh.world)
        mesh.world.counters.labels |= {bucket.index: bucket.label for bucket in self._buckets}
        seen = Model(self._census, self._synced, self._owned)
        self._reduction = Reduction(trainable, mesh, self._recorder, model=seen, accumulate=strategy.accumulate,
                                    every_backward=strategy.reduces_every_backward,
                                    scaler=LossScaler() if scales_loss(strategy.precision) else None,
                                    share=None if strategy.shares is None else strategy.shares[world.rank])
        for pool in pools:
            self._reduction.serve(pool)
        self._ledger = Ledger(self._buckets, pools, self._owned)
        self._shortage = Shortage(self._ledger, strategy, mesh, world, self._recorder)
        self._gathers: Gathers | None = None
        self._unit_hooks: UnitHooks | None = None
        if strategy.sharding.params is Placement.SHARDED:
            self._gather_units([GatheredUnit(unit, [b for b in self._buckets if set(b.names) & set(dict(
                unit.parameters))], self._recorder) for unit in found])
        self._recomputation = Recomputation(again, rule, self._ledger, self._recorder) if again else None
        self._full = Full(model, self._buckets, self._gathers, mesh, world)
        self.checkpoints = Checkpoints(Trained(model, self._buckets, self._owned, self._full, self._reduction,
                                                self._synced, mesh, world, self._recorder, str(strategy)))
        hook_parameters(self._reduction)
        refuse_copies(model)
        self._forward_hooks = ForwardHooks(model, self._reduction, self._ledger, strategy.precision, world.device)
        made.zero_grad = model.zero_grad = self.zero_grad  # type: ignore[method-assign]
        self._recorder.gauge("layout", **describe(self._buckets, mesh, strategy, world.device))
        self._boundary = Boundary(self._recorder, world.device)
        self._step_began = now()
        self.steps = 0
        self._losses: list[tuple[torch.Tensor, float]] = []
        """loss and weight of each backward of the window"""

    def __repr__(self) -> str:
        ranks = f"{self.world.size} rank{'' if self.world.size == 1 else 's'}"
        return f"<Engine {type(self.module).__name__} · {self.strategy} on {ranks} · {self.steps} steps>"

    # ---- the loop

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward; returns what it returns."""
        with self._step_named(), self._shortage.told("forward", self.steps):
            try:
                return self.module(*args, **kwargs)
            except RuntimeError as error:
                explain_mismatch(error, self.strategy.precision, self.module)
                raise
            except Exception:
                raise
            except BaseException:  # an interrupt: torch runs no forward hooks then
                self._forward_hooks.abandon(self._unit_hooks)
                raise

    def backward(self, loss: torch.Tensor, *, weight: float | None = None) -> None:
        """Backward of a scalar loss. With `weight` the loss is a sum over that many tokens (or samples), and the
        gradient becomes the sum over all ranks and micro-batches divided by the sum of all weights. Without, under a
        strategy with `shares`, the loss is a mean over this rank's share of samples and weighs as many.

        A loss that reaches no parameter still counts: this rank takes part with nothing.
        """
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise UsageError(f"engine.backward takes a scalar loss; got {_describe(loss)}")
        if weight is not None and not (isinstance(weight, int | float) and 0 <= weight < float("inf")):
            raise UsageError(f"engine.backward(weight={weight!r}): the weight is a number of tokens or samples, >= 0")
        if weight is None and self._reduction.share is not None:
            weight = self._reduction.share
            loss = loss.float() * weight if loss.element_size() < 4 else loss * weight
        self._reduction.begin(None if weight is None else float(weight))
        self._losses.append((loss.detach(), 1.0 if weight is None else float(weight)))
        scaler = self._reduction.scaler
        with self._step_named(), self._shortage.told("backward", self.steps):
            try:
                if loss.requires_grad:
                    (loss if scaler is None else loss.float() * scaler.scale).backward()  # type: ignore[no-untyped-call]
                self._reduction.end()
            finally:
                self._reduction.abandon()

    def step(self, *, last: bool = False) -> bool:
        """Moves the weights if the window is complete (`last=True` closes a shorter one) and starts a new one.

        Returns True when weights moved. Raises RunStopped, on all ranks at the same step, once somebody asked
        the run to end.
        """
        self._full.refuse_inside("engine.step()")
        reduction = self._reduction
        if not reduction.due and not (last and reduction.window.backwards):
            return False
        self._close()
        overflow = reduction.window.overflow
        if self.strategy.clip_grad_norm is not None and not overflow:
            self.clip_grad_norm_(self.strategy.clip_grad_norm)
        began = self._recorder.open("optimizer", type(self.optimizer).__name__)
        self._recorder.phase("optimizer")
        moved = not overflow and any(any(bucket.moved) for bucket in reduction.buckets)
        if moved:
            self.checkpoints.settle()
            with self._shortage.told("optimizer", self.steps):
                self._owned.run_hooks(before=True)
                for bucket in reduction.buckets:
                    bucket.params.refresh_master()
                self._owned.step()
                for bucket in reduction.buckets:
                    bucket.params.round_master()
        self._recorder.span("optimizer", type(self.optimizer).__name__, began, now())
        if self._gathers is not None:
            self._gathers.release()
        if moved:
            for pending in [bucket.params.publish(bucket.index) for bucket in reduction.buckets]:
                pending.wait()
            self._owned.run_hooks(before=False)
        self._synced.sync(reduction.window.buffers)
        self._end_step(moved)
        return moved

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients of this window, and the window with them. (They are None afterwards either way.)"""
        self._losses.clear()
        self._reduction.reset()
        self._owned.close()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor | None:
        """Clips the averaged gradients to a global norm; returns the norm before, the same tensor on all ranks.

        Inside a window it touches nothing and returns None. Collective.
        """
        norm.check(max_norm, norm_type)
        if not self._reduction.due and not self._reduction.window.closed:
            return None
        self._close()
        total = norm.global_norm(self._reduction.buckets, self.mesh, float(norm_type))
        norm.clip(self._reduction.buckets, total, max_norm)
        return total

    def _close(self) -> None:
        with self._step_named():
            self._reduction.close()
        for bucket in self._reduction.buckets:
            bucket.take_edits()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside stay local (nothing is reduced); a later one, or `step(last=True)`, reduces all."""
        before, self._reduction.syncing = self._reduction.syncing, False
        try:
            yield
        finally:
            self._reduction.syncing = before

    def train(self, mode: bool = True) -> Engine:
        """As nn.Module.train."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """As nn.Module.eval."""
        return self.train(False)

    # ---- looking inside; collective unless said otherwise

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """Full parameters inside, readable and writable; afterwards rank 0's values are everybody's."""
        self.checkpoints.settle()
        with self._full.write():
            yield self.module

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The plain model's state_dict: its keys, shapes and order, full values on the CPU of every rank.

        Where the optimizer steps a master copy, its values are the ones given, not their rounding.
        """
        self.checkpoints.settle()      # a master copy follows what somebody has written to the weights
        return self._full.state_dict()

    def full_grad(self, name: str) -> torch.Tensor | None:
        """The averaged gradient of a parameter once the window is closed; None where no rank has one."""
        return self._full.grad(name)

    def check_agreement(self) -> None:
        """Raises StateError, naming parameter and ranks, where copies of a parameter differ between ranks."""
        self._full.check_agreement()

    def memory(self) -> dict[str, int]:
        """Bytes on this rank by category (see `dplab.telemetry.events.CATEGORIES`). Not collective."""
        return self._ledger.bytes()

    def recomputed(self) -> dict[str, dict[str, Any]]:
        """By unit: `recomputed` (whether), `saved_bytes` and `kept_bytes` of one forward, `ms` of the last time it was
        computed again; empty without `recompute`. Not collective."""
        return {} if self._recomputation is None else self._recomputation.table()

    def wire(self) -> dict[str, dict[str, Any]]:
        """What this rank has sent so far, by collective: `count` and `bytes`. Not collective."""
        return {name: dict(row) for name, row in self.mesh.world.counters.rows.items()}

    # ---- checkpoints; collective

    def save(self, place: Place, *, wait: bool = True, limit: float = 60.0, **parts: Stateful) -> Saving:
        """Writes a torch.distributed.checkpoint folder, complete or not there: weights (of the master copy), optimizer
        state, loss scale, steps, random generators, and the state of `parts` (loader=..., scheduler=...).
        `wait=False` writes a snapshot of this moment beside training; its `wait()`, or the next save or load, tells
        of a failure. A name that ends in .safetensors gets the weights alone. Raises WireError naming the ranks that
        have not called it within `limit` seconds; CheckpointError, on every rank, where a write failed."""
        return self.checkpoints.save(place, wait=wait, limit=limit, steps=self.steps, parts=parts)

    def load(self, place: Place, *, strict: bool = True, optimizer: bool = True, limit: float = 60.0,
             **parts: Stateful) -> int:
        """Loads what `save`, FSDP2 or a single process wrote, under any strategy on any number of ranks; returns its
        steps. Raises UsageError, on every rank, for other names or shapes (`strict=False` loads what fits);
        CheckpointError for a torn one. Weights alone: `optimizer=False`, or a .safetensors file."""
        self.zero_grad()
        self.steps = self.checkpoints.load(place, strict=strict, optimizer=optimizer, limit=limit, parts=parts)
        self._recorder.step = self.steps
        return self.steps

    # ---- hooks

    def _gather_units(self, units: Sequence[GatheredUnit]) -> None:
        gathers = self._gathers = Gathers(units, prefetch=self.strategy.prefetch, reshard=self.strategy.reshard)
        self._unit_hooks = UnitHooks(gathers)
        self._reduction.filled = gathers.gradients_came
        self._reduction.backward_ended = gathers.backward_ended
        refuse_whole(self.module, self._buckets)
        self.module.register_forward_pre_hook(self._refuse_changes, prepend=True)

    def _refuse_changes(self, *_: Any) -> None:
        # ranks that train other parameters gather other units: they would not come to the control message
        if torch.is_grad_enabled() and not in_backward():
            self._census.refuse_here(self.world.rank)

    @contextmanager
    def _step_named(self) -> Iterator[None]:
        """A collective that fails inside says how far all ranks had come together."""
        try:
            yield
        except WireError as error:
            raise WireError(f"in step {self.steps + 1}, after {self.steps} that every rank ended: {error}") from error

    def _end_step(self, moved: bool) -> None:
        reduction, end = self._reduction, now()
        window = reduction.window
        if reduction.scaler is not None and reduction.window.closed:
            reduction.scaler.update(overflow=reduction.window.overflow)
            self._recorder.gauge("loss_scale", value=reduction.scaler.scale)
            self._recorder.gauge("overflow", value=int(reduction.window.overflow))
        if self._recomputation is not None:
            self._recomputation.settle(self.mesh.world.gather_objects)
        self._recorder.gauge("memory", **self._ledger.gauge())
        if self._losses:
            total = sum(loss.item() for loss, _ in self._losses)
            self._recorder.gauge("loss", value=total / (sum(weight for _, weight in self._losses) or 1.0))
            self._losses.clear()
        self._recorder.span("step", "train", self._step_began, end, micro_batches=window.backwards,
                            moved=moved)
        self._recorder.step += 1
        self._recorder.phase("running")
        self._step_began = end
        self.steps += 1
        self.zero_grad()
        self._boundary.cross(stop=window.stop, pause=window.pause)


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
