"""What a strategy does to one model, in words and in the model's own numbers. No torch: a module is only asked
for its parameters' sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dplab.errors import UsageError
from dplab.planner.footprint import (
    MODEL_STATES,
    ElementBytes,
    held_whole,
    host_states,
    model_states,
    precision_name,
    states_formula,
    volume,
)
from dplab.planner.sharing import per_host, travels
from dplab.specs import DTYPE_BYTES, Placement, Sharding, Strategy


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The row of the strategy table: who holds what, and which collective runs when."""

    params: str
    grads: str
    reduce: str
    after_step: str
    around_unit: str

    @classmethod
    def of(cls, sharding: Sharding) -> Roles:
        """Read off the placements, not off a stage's number."""
        owned, cut = sharding.optim is Placement.SHARDED, sharding.params is Placement.SHARDED
        return cls(
            params="sharded" if cut else "gathered" if owned else "replicated",
            grads="sharded" if sharding.grads is Placement.SHARDED else
                  "replicated while accumulating" if owned else "replicated",
            reduce="reduce-scatter" if owned else "all-reduce",
            after_step="all-gather" if owned and not cut else "-",
            around_unit="all-gather, free" if cut else "-")


_WIRE = ("all_reduce", "reduce_scatter", "all_gather")


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """One strategy on one model: `str()` tells it, `to_dict()` gives the numbers (bytes and elements of one rank)."""

    strategy: Strategy
    numel: int
    world_size: int
    roles: Roles
    states: dict[str, float]
    states_formula: str
    precision: str
    element: ElementBytes
    elements_sent: dict[str, float]
    bytes_sent: dict[str, float]
    host_bytes: float = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"strategy": str(self.strategy), "params": self.numel, "world_size": self.world_size,
                "roles": dict(vars(self.roles)), "model_states_bytes": {**self.states, "total": self.total_bytes},
                "formula": self.states_formula, "precision": self.precision,
                "bytes_per_parameter": self.bytes_per_parameter,
                "elements_sent": self.elements_sent, "bytes_sent": self.bytes_sent, "host_bytes": self.host_bytes}

    @property
    def bytes_per_parameter(self) -> int:
        """Bytes of model states a parameter where nothing is sharded."""
        return self.element.total

    @property
    def total_bytes(self) -> float:
        """Model states of one rank."""
        return sum(self.states.values())

    def __str__(self) -> str:
        n, roles = self.world_size, self.roles
        shard = per_host(self.strategy, n)
        share = f"1/{shard}" if shard > 1 else "all"
        reduce = roles.reduce
        if self.strategy.hybrid:
            reduce = "reduce-scatter inside a host, all-reduce across hosts" + (
                ", all-gather inside" if self.strategy.sharding.optim is Placement.REPLICATED else "")
        if self.strategy.wire is not None:
            reduce += f", as {self.strategy.wire}{' between hosts' if self.strategy.hybrid else ''}"
        lines = [f"{self.strategy} on {n} rank{'s' * (n > 1)}, {self.numel:,} parameters (predicted, one rank)", "",
                 f"  parameters         {roles.params}", f"  gradients          {roles.grads}",
                 f"  gradients reduce   {reduce}", f"  after the step     {roles.after_step}",
                 f"  around a unit      {roles.around_unit}", "",
                 f"memory: {self.bytes_per_parameter} bytes a parameter before sharding, in {self.precision}"]
        whole = held_whole(self.strategy.sharding, accumulate=self.strategy.accumulate,
                           reduces_every_backward=self.strategy.reduces_every_backward)
        lines += [f"  {name:12}{_size(self.states[name]):>12}   {'all of it' if name in whole else share + ' of it'}"
                  for name in MODEL_STATES if self.states[name]]
        lines.append(f"  {'total':12}{_size(self.total_bytes):>12}   = {self.states_formula}")
        if self.host_bytes:
            lines.append(f"  {'host':12}{_size(self.host_bytes):>12}   offload={self.strategy.offload}, where a GPU "
                         f"computes; on CPU ranks it moves nothing")
        lines += ["", f"wire: sent by one rank in one step{self._window()}"]
        lines += [f"  {name:15}{self.elements_sent[name]:>16,.0f} elements{_size(self.bytes_sent[name]):>12}"
                  for name in _WIRE if self.elements_sent[name]] or ["  nothing: there is one rank"]
        if self.strategy.sharding.params is Placement.SHARDED and self.strategy.reshard and n > 1:
            lines.append("  at most: a root unit that stays gathered after its forward is gathered once, not twice")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)

    def _window(self) -> str:
        a = self.strategy.accumulate
        if a == 1:
            return ""
        when = "after every backward" if self.strategy.reduces_every_backward else "once"
        if self.strategy.hybrid and self.strategy.sharding.optim is Placement.SHARDED and when != "once":
            when += " inside a host, once across hosts"
        return f" of {a} micro-batches, reduced {when}"

    def _repr_html_(self) -> str:
        text = str(self).replace("&", "&amp;").replace("<", "&lt;")
        return f"<pre>{text}</pre>"


def explain(strategy: Strategy | str | None = None, model: Any = None, world_size: int | None = None) -> Explanation:
    """The row of the strategy table for `model` (an nn.Module, or a number of parameters) on `world_size` ranks.

    It counts in the precision that a run would have: the strategy's, without one the model's own dtype (fp32 for
    a number), where `estimate` assumes bf16. Padding is left out (below 128 elements a parameter and rank); a
    ZeRO-3 root that stays gathered after its forward is sent once, not twice, so that less is sent than
    printed. Raises UsageError for what has no parameters, and where one of the three is left out.
    """
    if strategy is None or model is None or world_size is None:
        raise UsageError("explain needs a strategy, a model or its number of parameters, and a number of ranks: "
                         "explain('zero2', 7.4e6, 4)")
    if not isinstance(strategy, Strategy | str):
        raise UsageError(f"explain takes the strategy first, explain('zero2', model, world_size); it was given a "
                         f"{type(strategy).__name__} there")
    chosen = Strategy.parse(strategy)
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise UsageError(f"explain(world_size={world_size!r}) is not allowed; world_size is an integer >= 1")
    numel, dtype = _size_of(model)
    replicated = chosen.sharding.optim is Placement.REPLICATED
    window: dict[str, Any] = {"accumulate": chosen.accumulate,
                              "reduces_every_backward": chosen.reduces_every_backward}
    element = ElementBytes.of(chosen.precision, accumulate=chosen.accumulate, model=dtype)
    whole = held_whole(chosen.sharding, **window)
    shard = per_host(chosen, world_size)
    sent = volume(numel, sharding=chosen.sharding, shard=1 if replicated else shard,
                  replicate=world_size if replicated else world_size // shard, reshard=chosen.reshard, **window)
    # what travels is what waits in a bucket: one backward's gradients, or a window's sums
    one_backward = chosen.sharding.grads is Placement.SHARDED and chosen.reduces_every_backward
    reduced = DTYPE_BYTES[chosen.precision.param or dtype] if one_backward else element.grads
    precision = precision_name(chosen.precision, model=dtype)
    on_the_wire = {"all_gather": element.params, "reduce_scatter": reduced, "all_reduce": reduced}
    return Explanation(
        strategy=chosen, numel=numel, world_size=world_size, roles=Roles.of(chosen.sharding),
        states=model_states(numel, sharding=chosen.sharding, shard=shard, precision=chosen.precision,
                            model=dtype, offload=chosen.offload, **window),
        states_formula=states_formula(numel, element=element.here(chosen.offload, whole), whole=whole, shard=shard,
                                      precision=precision),
        host_bytes=host_states(numel, chosen, shard=shard, element=element),
        precision=precision, element=element, elements_sent=sent,
        bytes_sent=travels(chosen, sent, on_the_wire, world_size // shard))


def _size_of(model: Any) -> tuple[int, str]:
    """Trainable parameters of a module (a tied weight once) and its dtype's name, or a plain number and fp32."""
    if isinstance(model, int | float) and not isinstance(model, bool):
        if not 1 <= model < float("inf"):
            raise UsageError(f"explain(model={model!r}) is not allowed; a number of parameters is >= 1")
        return int(model), "fp32"
    if not hasattr(model, "parameters"):
        shown = repr(model) if isinstance(model, str) else f"a {type(model).__name__}"      # not all of what it holds
        raise UsageError(f"explain(model={shown}) is not allowed; give an nn.Module or a number of parameters")
    params = [param for param in model.parameters() if param.requires_grad]
    if not params:
        raise UsageError(f"explain({type(model).__name__}) has no trainable parameters; nothing would be synchronised")
    names = {"torch.float64": "fp64", "torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
    return sum(param.numel() for param in params), names.get(str(params[0].dtype), "fp32")


def _size(size: float) -> str:
    """Decimal bytes, the unit named."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:,.2f} {unit}"
    return f"{size:,.0f} B"
