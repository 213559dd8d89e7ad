"""Memory and communication volume in closed form: what tests, the ledger, `estimate` and `explain` share.

Bytes are exact integers wherever they divide; elements are those that one rank sends in ring collectives
(the least possible): u = (N-1)/N * P for a reduce-scatter or an all-gather of P elements, 2u for an
all-reduce. Sources: Rajbhandari et al. 2020 (arXiv:1910.02054) for model states, Korthikanti et al. 2022
(arXiv:2205.05198) for activations. `numel` counts what is allocated, padding included.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from dplab.errors import UsageError
from dplab.planner.shape import ModelShape, at_least
from dplab.planner.sharing import per_host
from dplab.planner.units import Unit, unit_of
from dplab.specs import DTYPE_BYTES, PRECISIONS, SHARDINGS, Placement, Precision, Recompute, Sharding, Strategy
from dplab.specs.offload import moves

MODEL_STATES = ("params", "grads", "optimizer", "master")
OPTIMIZER_SLOTS = {"adamw": 2, "adam": 2, "nadam": 2, "radam": 2, "adamax": 2,
                   "sgd": 0, "sgd-momentum": 1, "rmsprop": 1, "adagrad": 1}
"""Elements of state that an optimizer keeps a parameter, beside its scalars."""


@dataclass(frozen=True, kw_only=True)
class ElementBytes:
    """Bytes of one element of each model state; `model` is the dtype that `None` in a precision stands for."""

    params: int
    grads: int
    optimizer: int
    master: int

    @classmethod
    def of(cls, precision: Precision, *, accumulate: int = 1, slots: int = 2, model: str = "fp32") -> ElementBytes:
        """Of a precision. Gradients that add up over several micro-batches are kept in fp32 at least."""
        param = DTYPE_BYTES[precision.param or model]
        grad = DTYPE_BYTES[precision.grad or precision.param or model]
        master = DTYPE_BYTES[precision.master] if precision.master else 0
        return cls(params=param, grads=max(grad, 4) if accumulate > 1 else grad,
                   optimizer=slots * (master or param), master=master)

    def here(self, offload: str, whole: set[str]) -> ElementBytes:
        """What of it is on the device; gradients that are `whole` there are, whatever leaves."""
        optimizer, params = moves(offload)
        return ElementBytes(params=0 if params else self.params,
                            grads=0 if optimizer and "grads" not in whole else self.grads,
                            optimizer=0 if optimizer else self.optimizer, master=0 if optimizer else self.master)

    def there(self, offload: str, *, adds: bool) -> int:
        """Bytes of an owned element in the host's memory. The optimizer's part has the weights that go back; where
        micro-batches' sums come one by one (`adds`), one that arrives lies beside their sum."""
        optimizer, params = moves(offload)
        steps = self.grads * (2 if adds else 1) + self.optimizer + self.master
        return (steps if optimizer else 0) + (self.params if optimizer or params else 0)

    @property
    def total(self) -> int:
        """Bytes a parameter where nothing is sharded: 16, or 18 with fp32 gradients beside 2-byte weights."""
        return self.params + self.grads + self.optimizer + self.master

    def __str__(self) -> str:
        """The parts that there are: `params 2 + grads 2 + optimizer 8 + master 4`."""
        return " + ".join(f"{name} {size}" for name in MODEL_STATES if (size := getattr(self, name)))


def model_states(numel: float, *, sharding: Sharding, shard: int, precision: Precision = PRECISIONS["fp32"],
                 optimizer_slots: int = 2, accumulate: int = 1, reduces_every_backward: bool | None = None,
                 model: str = "fp32", offload: str = "none") -> dict[str, float]:
    """Bytes a rank's device holds between steps, by category: params, grads, optimizer, master.

    `shard`: size of the shard axis. `reduces_every_backward=False` with `accumulate` > 1 means that a window's
    unreduced gradients stay whole on every rank, sharded or not. Step counters of an optimizer are not in it.
    """
    element = ElementBytes.of(precision, accumulate=accumulate, slots=optimizer_slots, model=model)
    whole = held_whole(sharding, accumulate=accumulate, reduces_every_backward=reduces_every_backward)
    element = element.here(offload, whole)
    return {name: _exact(Fraction(numel) * getattr(element, name) / (1 if name in whole else shard))
            for name in MODEL_STATES}


def host_states(numel: float, strategy: Strategy, *, shard: int, element: ElementBytes) -> float:
    """Bytes a rank holds in the host's memory under `offload`, between steps."""
    adds = (strategy.sharding.grads is Placement.SHARDED and strategy.accumulate > 1
            and strategy.reduces_every_backward)
    return _exact(Fraction(numel) * element.there(strategy.offload, adds=adds) / shard)


def held_whole(sharding: Sharding, *, accumulate: int = 1, reduces_every_backward: bool | None = None) -> set[str]:
    """Categories of model states that every rank holds all of, between the backwards of a window."""
    window = accumulate > 1 and reduces_every_backward is False
    placements = {"params": sharding.params, "grads": Placement.REPLICATED if window else sharding.grads,
                  "optimizer": sharding.optim, "master": sharding.optim}
    return {name for name, placement in placements.items() if placement is Placement.REPLICATED}


def transients(*, sharding: Sharding, bucket_numels: Sequence[int] = (), unit_numels: Sequence[int] = (),
               precision: Precision = PRECISIONS["fp32"], model: str = "fp32") -> dict[str, int]:
    """Upper bounds, in bytes, of what lives only inside a step: `buckets` and `gathered`.

    Sharded gradients pass through two rotating buffers of the largest bucket; sharded parameters are whole
    for the unit that computes and for one gathered ahead of it (the two largest neighbours).
    """
    element = ElementBytes.of(precision, model=model)
    buckets = 2 * max(bucket_numels, default=0) if sharding.grads is Placement.SHARDED else 0
    pairs = [a + b for a, b in itertools.pairwise([*unit_numels, 0])]
    gathered = max(pairs, default=0) if sharding.params is Placement.SHARDED else 0
    return {"buckets": buckets * element.grads, "gathered": gathered * element.params}


def volume(numel: float, *, sharding: Sharding, shard: int, replicate: int = 1, accumulate: int = 1,
           reduces_every_backward: bool | None = None, reshard: bool = True,
           kept_numel: float = 0) -> dict[str, float]:
    """Elements that a rank sends in one optimizer step, by collective: all_reduce, reduce_scatter, all_gather.

    `shard` and `replicate` are the two axes of the mesh; `accumulate` micro-batches make a step;
    `reduces_every_backward` defaults to what the sharding is for (True where gradients are sharded).
    Of a hybrid mesh the copies of a shard meet once a step, with what the micro-batches have left in each.
    Sharded parameters are gathered twice a micro-batch (forward and backward), once where `reshard` is off;
    `kept_numel` elements of them stay after their forward and are gathered once.
    """
    if reduces_every_backward is None:
        reduces_every_backward = sharding.grads is Placement.SHARDED
    reductions = accumulate if reduces_every_backward else 1
    elements = Fraction(numel)
    if sharding.optim is Placement.REPLICATED:
        ranks = shard * replicate
        return {"all_reduce": _exact(2 * reductions * _others(ranks) * elements), "reduce_scatter": 0, "all_gather": 0}
    if sharding.params is Placement.SHARDED:
        gathered = accumulate * (2 * elements - Fraction(kept_numel) if reshard else elements)
    else:
        gathered = elements
    return {"all_reduce": _exact(2 * (1 if shard > 1 else reductions) * _others(replicate) * elements / shard),
            "reduce_scatter": _exact(reductions * _others(shard) * elements),
            "all_gather": _exact(_others(shard) * gathered)}


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Predicted bytes of one rank. `activations_bytes` is None where no model shape was given.

    `precision` says which one is counted, and where that is an assumption.
    """

    strategy: str
    precision: str
    params: float
    world_size: int
    model_states_bytes: dict[str, float]
    activations_bytes: int | None
    total_bytes: float
    formula: str
    note: str
    other_bytes: dict[str, int] | None = None
    """gathered units, buckets, fragmentation and context, where a model was given"""
    formulas: dict[str, str] = field(default_factory=dict)
    """the sum behind each figure, with its numbers"""
    host_bytes: float = 0
    """what is offloaded to the host's memory"""

    def explain(self) -> str:
        """Each figure with its formula and the numbers in it."""
        sizes, unit = dict(self._rows()), self._unit
        lines = [f"{name:12}{sizes[name] / unit.decimal:12.3f} {unit.name}   {text}"
                 for name, text in self.formulas.items() if name in sizes]
        total = (f"{'total':12}{self.total_bytes / unit.decimal:12.3f} {unit.name} = "
                 f"{self.total_bytes / unit.binary:.3f} {unit.binary_name}")
        host = (f"{'host':12}{self.host_bytes / unit.decimal:12.3f} {unit.name} = "
                f"{self.host_bytes / unit.binary:.3f} {unit.binary_name}   in the host's memory")
        return "\n".join([*lines, total, *([host] if self.host_bytes else [])])

    @property
    def _unit(self) -> Unit:
        return unit_of(self.total_bytes or self.host_bytes)

    def _rows(self) -> list[tuple[str, float]]:
        """Name and bytes of what would not read 0.000."""
        sizes: dict[str, float] = {**self.model_states_bytes, "activations": self.activations_bytes or 0,
                                   **(self.other_bytes or {})}
        return [(name, size) for name, size in sizes.items()
                if name != "total" and size >= 5e-4 * self._unit.decimal]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; every size in bytes."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def __str__(self) -> str:
        """A table in GB (1e9 bytes) with GiB (2^30) beside it, MB and MiB where the whole is below 10 GB; of a model
        each figure's sum as well."""
        unit = self._unit
        ranks = f"{self.world_size} rank{'' if self.world_size == 1 else 's'}"
        lines = [f"{self.strategy}, {self.params:.4g} parameters, {ranks}: predicted, one rank",
                 f"{'':12}{unit.name + ' (' + unit.decimal_text + ')':>12}"
                 f"{unit.binary_name + ' (' + unit.binary_text + ')':>12}"]
        whole = self.other_bytes is not None
        for name, size in [*self._rows(), ("total", self.total_bytes)]:
            text = f"   {self.formulas.get(name, '')}" if whole else ""
            lines.append(f"{name:12}{size / unit.decimal:12.3f}{size / unit.binary:12.3f}{text}".rstrip())
        if self.host_bytes:
            lines.append(f"{'host':12}{self.host_bytes / unit.decimal:12.3f}{self.host_bytes / unit.binary:12.3f}"
                         f"   in the host's memory")
        return "\n".join([*lines, f"{'model' if whole else 'formula'}: {self.formula}",
                          f"precision: {self.precision}", f"note: {self.note}"])

    def __repr__(self) -> str:
        return str(self)


def estimate(params: float | str | Path | dict[str, Any], world_size: int, strategy: Strategy | str = "ddp",
             optimizer: str = "adamw", shard: int | None = None, shape: ModelShape | None = None, *,
             micro_batch: int = 1, sequence: int | None = None) -> Estimate:
    """Memory of one rank, predicted from a parameter count (7.5e9), without torch and without a GPU.

    A model's name (`llama-7b`) or a Hugging Face config (dict, path) in place of the count predicts the whole peak,
    with `micro_batch` samples of `sequence` tokens (the card's).

    A strategy given as text without a precision is counted as the literature does, with 2-byte weights and
    gradients and an fp32 master copy (`bf16`), though a run of it computes in fp32, which is what `explain`
    counts; write `zero2+fp32` or `zero2+bf16` to have both count alike. `shard`: size of the shard axis where
    it is smaller than the world (hybrid). With `shape` activations are added.
    Raises UsageError for a count below 1, an unknown strategy or optimizer, a shard that does not divide.
    """
    _check_first(params, world_size)
    chosen = with_default_precision(strategy)
    shard = per_host(chosen, world_size) if shard is None else shard
    _check_sharing(optimizer, shard, world_size)
    if isinstance(params, str | Path | dict):
        return _of_model(params, world_size, strategy, optimizer, micro_batch, sequence, shape or shard != world_size)
    if micro_batch != 1 or sequence is not None:
        raise UsageError("estimate(micro_batch=..., sequence=...) needs a model's name or config in place of a number "
                         "of parameters; give that, or a ModelShape")
    slots = OPTIMIZER_SLOTS[optimizer]
    window: dict[str, Any] = {"accumulate": chosen.accumulate, "reduces_every_backward": chosen.reduces_every_backward}
    states = model_states(params, sharding=chosen.sharding, shard=shard, precision=chosen.precision,
                          optimizer_slots=slots, offload=chosen.offload, **window)
    total = sum(states.values())
    element = ElementBytes.of(chosen.precision, accumulate=chosen.accumulate, slots=slots)
    kept = held_whole(chosen.sharding, **window)
    here = element.here(chosen.offload, kept)
    formula = states_formula(params, shard=shard, element=here, whole=kept, precision=precision_name(chosen.precision))
    formulas = {name: f"{params:.6g} parameters x {getattr(here, name)} bytes"
                + ("" if name in kept else f" / {shard} ranks") for name in MODEL_STATES if states[name]}
    activations = None
    note = "activations, buckets, gathered units, the framework's own memory and fragmentation are not in it"
    if shape is not None:
        compute = DTYPE_BYTES[chosen.precision.autocast or chosen.precision.param or "fp32"]
        again = Recompute.parse(chosen.recompute).everything("estimate(shape=...)")
        activations, text = shape.activations(element_bytes=compute, recompute=again)
        formula += f"; activations (arXiv:2205.05198) = {text} = {activations / 1e9:.4g} GB"
        formulas["activations"] = f"{text} (arXiv:2205.05198)"
        note = "buckets, gathered units, the framework's own memory and fragmentation are not in it"
    return Estimate(strategy=str(chosen), precision=precision_told(strategy, chosen), params=_exact(Fraction(params)),
                    world_size=world_size, model_states_bytes={**states, "total": total}, activations_bytes=activations,
                    total_bytes=total + (activations or 0), formula=formula, note=note, formulas=formulas,
                    host_bytes=host_states(params, chosen, shard=shard, element=element))


def _of_model(model: str | Path | dict[str, Any], world_size: int, strategy: Strategy | str, optimizer: str,
              micro_batch: int, sequence: int | None, more: Any) -> Estimate:
    # needs numpy, which a plain count does not
    from dplab.planner.whole import estimate_model

    if more:
        raise UsageError("estimate(shape=..., shard=...) goes with a number of parameters; a model's name or config "
                         "brings its own shape: leave them out")
    return estimate_model(model, world_size, strategy, optimizer=optimizer, micro_batch=micro_batch, sequence=sequence)


def precision_name(precision: Precision, *, model: str = "fp32") -> str:
    """`bf16`, `amp-fp16`, ...; the model's own dtype where nothing is cast; `own precision` for one without a name."""
    return model if precision.name == "fp32" else precision.name or "own precision"


def precision_told(given: Strategy | str, chosen: Strategy) -> str:
    """Which precision an estimate counts, and that it was assumed where it was."""
    name = precision_name(chosen.precision)
    if isinstance(given, Strategy) or chosen == Strategy.parse(given):
        return name
    return f"{name}, assumed because {given!r} names none; a run of it computes in fp32, estimated by '{given}+fp32'"


def states_formula(numel: float, *, element: ElementBytes, whole: set[str], shard: int, precision: str) -> str:
    """The sum behind `model_states`, with its numbers and their precision.

    `7.5e+09 x (2 + 14/64) bytes = 16.64 GB (1e9) in bf16 (params 2 + grads 2 + optimizer 8 + master 4)`
    """
    kept = sum(getattr(element, name) for name in whole)
    cut = element.total - kept
    terms = [str(kept)] if kept or not cut else []
    if cut:
        terms.append(f"{cut}/{shard}")
    total = Fraction(numel) * (kept + Fraction(cut, shard))
    return (f"{numel:.6g} x ({' + '.join(terms)}) bytes = {float(total) / 1e9:.4g} GB (1e9) "
            f"in {precision} ({str(element) or 'all of it on the host'})")


def with_default_precision(strategy: Strategy | str) -> Strategy:
    chosen = Strategy.parse(strategy)
    if isinstance(strategy, str) and not any(
            token in PRECISIONS or token.startswith("precision=") for token in strategy.split("+")):
        values = chosen.to_dict()
        return Strategy.from_dict({**values, "precision": "bf16"})
    return chosen


def _others(ranks: int) -> Fraction:
    """Share of a buffer that a ring collective of `ranks` sends: (N-1)/N."""
    return Fraction(ranks - 1, ranks)


def _exact(value: Fraction) -> float:
    return value.numerator if value.denominator == 1 else float(value)


def _check_first(params: Any, world_size: Any) -> None:
    if isinstance(params, str) and params.partition("+")[0] in SHARDINGS:
        raise UsageError(f"estimate takes the parameters first, estimate(7.5e9, 64, {params!r}); it was given the "
                         f"strategy {params!r} there")
    if not isinstance(params, str | Path | dict):
        at_least("params", params, 1)
    at_least("world_size", world_size, 1)
    if not isinstance(world_size, int):
        raise UsageError(f"estimate(world_size={world_size!r}) is not allowed; world_size is a whole number of ranks")


def _check_sharing(optimizer: str, shard: Any, world_size: int) -> None:
    if not isinstance(shard, int) or shard < 1 or world_size % shard:
        raise UsageError(f"estimate(shard={shard!r}) is not allowed; shard is an integer that divides "
                         f"world_size={world_size}")
    if optimizer not in OPTIMIZER_SLOTS:
        raise UsageError(f"optimizer {optimizer!r} is not known; use one of {', '.join(OPTIMIZER_SLOTS)}")
