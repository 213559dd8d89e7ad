"""What a search answers: plans, best first, each with its memory, its time and the reason of its place."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dplab.planner.cost import Cost
from dplab.planner.grid import Rejected, name
from dplab.planner.hardware import Cluster
from dplab.planner.memory import Memory
from dplab.planner.profile import Profile
from dplab.planner.simulate import Timeline, simulate
from dplab.planner.split import OFFLOAD, RECOMPUTE, Split
from dplab.specs import PRECISIONS, SHARDINGS, Strategy

if TYPE_CHECKING:
    from dplab.planner.unequal import Mixed

_WORDS = {"compute": "compute", "tensor": "tensor-parallel collectives", "bubble": "the pipeline's bubble",
          "data": "exposed data-parallel collectives", "optimizer": "the optimizer"}


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Samples of each rank in one micro-batch on unequal GPUs. `equal_step`: seconds of the best layout with equal
    shares, None where none fits; `filled`: share of its memory that the fullest rank's `gpu` uses; `peak`:
    dense FLOP/s of all GPUs together."""

    samples: tuple[int, ...]
    equal_step: float | None
    filled: float
    gpu: str
    peak: float

    @property
    def equal(self) -> bool:
        """True where every rank gets as many."""
        return len(set(self.samples)) == 1

    def __str__(self) -> str:
        return ":".join(map(str, self.samples))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One layout. `step` is seconds, predicted; `memory` and `cost` explain themselves, on unequal GPUs those of the
    fullest rank."""

    split: Split
    precision: str
    step: float
    memory: Memory
    cost: Cost
    shares: Shares | None = None

    @property
    def pure(self) -> bool:
        """True where dplab can run it: data parallelism alone."""
        return bool(self.split.tp == self.split.pp == 1)

    @property
    def strategy(self) -> Strategy | None:
        """The dplab strategy that runs this layout, None where it needs tensor or pipeline parallelism.

        Of the ways to recompute a strategy has `full`; for another it leaves that out and the model is to checkpoint
        its blocks (torch.utils.checkpoint).
        """
        if not self.pure:
            return None
        values: dict[str, Any] = {"sharding": SHARDINGS[name(self.split.zero)], "accumulate": self.split.accumulate,
                                  "precision": PRECISIONS[self.precision], "hybrid": self.split.groups > 1,
                                  "offload": OFFLOAD[self.split.offload]}
        runs = Strategy(**values, recompute="full" if RECOMPUTE[self.split.recompute] == "full" else "none")
        return runs if self.shares is None or self.shares.equal else replace(runs, shares=self.shares.samples)

    @property
    def mesh(self) -> tuple[int, int] | None:
        """Where shards are cut inside groups of ranks: (groups, ranks of each)."""
        return (int(self.split.groups), int(self.split.shard)) if self.split.groups > 1 else None

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization at `step`."""
        if self.shares is not None:
            return self._utilization(self.cost.profile.model_flops(), self.shares)
        return float(self.cost.mfu) * float(self.cost.step) / self.step

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilization at `step`: recomputation counted."""
        if self.shares is not None:
            return self._utilization(self.cost.profile.hardware_flops(RECOMPUTE[self.split.recompute]), self.shares)
        return float(self.cost.hfu) * float(self.cost.step) / self.step

    def _utilization(self, flops: float, shares: Shares) -> float:
        return flops * sum(shares.samples) * int(self.split.accumulate) / (self.step * shares.peak)

    def __str__(self) -> str:
        strategy, split = self.strategy, self.split
        groups = f" in {split.groups} groups" if split.groups > 1 else ""
        if strategy is not None:
            return str(strategy)
        text = f"{name(split.zero)}+{self.precision}"
        text += f"+offload={OFFLOAD[split.offload]}" if split.offload else ""
        text += "" if self.pure else f" x tp{split.tp} x pp{split.pp}"
        return text + groups + (f" x {split.chunks} chunks" if split.chunks > 1 else "")

    def timeline(self) -> Timeline:
        """The step as predicted events, of the type that a run records."""
        told = self.cost
        return simulate(told.profile, self.split, told.cluster, told.recipe)

    def explain(self) -> str:
        """Memory with its formulas and the parts of the step."""
        return f"{self.memory.explain()}\n\n{self._time()}"

    def _time(self) -> str:
        """The parts of the closed form by their names, and the simulated step that the table tells."""
        parts = {part: float(value) for part, value in self.cost.parts.items()}
        total = sum(parts.values())
        lines = [f"step: predicted {self.step * 1e3:,.1f} ms by simulation, MFU {self.mfu:.1%}, HFU {self.hfu:.1%}; in "
                 f"closed form {total * 1e3:,.1f} ms, of which"]
        lines += [f"  {_WORDS[part]:36}{value * 1e3:12,.1f} ms{value / total:8.1%}"
                  for part, value in parts.items() if value]
        hidden = f"  {'collectives hidden behind compute':36}{float(self.cost.hidden) * 1e3:12,.1f} ms, not counted"
        return "\n".join([*lines, hidden])

    def to_dict(self, why: str = "") -> dict[str, Any]:
        """Plain values for JSON; bytes, milliseconds, shares."""
        split = self.split
        return {"strategy": str(self), "dp": split.dp, "tp": split.tp, "pp": split.pp, "zero": split.zero,
                "micro_batch": split.micro_batch, "accumulate": split.accumulate, "chunks": split.chunks,
                "recompute": RECOMPUTE[split.recompute], "precision": self.precision,
                "mesh": None if self.mesh is None else list(self.mesh), "offload": OFFLOAD[split.offload],
                "host_bytes": round(float(self.memory.host)), "step_ms": self.step * 1e3,
                "memory_bytes": self.memory.to_dict()["total"], "mfu": self.mfu, "hfu": self.hfu, "why": why,
                "memory": self.memory.to_dict(),
                "shares": None if self.shares is None else list(self.shares.samples),
                "equal_step_ms": None if self.shares is None or self.shares.equal_step is None
                else self.shares.equal_step * 1e3,
                "time_ms": {part: float(value) * 1e3 for part, value in self.cost.parts.items()}}


@dataclass(frozen=True, kw_only=True)
class Plans:
    """The answer of a search. `limit` is the memory of a GPU that plans may use, in bytes."""

    profile: Profile
    cluster: Cluster | Mixed
    limit: float
    plans: tuple[Plan, ...]
    rejected: tuple[Rejected, ...]
    searched: int
    seconds: float

    @property
    def best(self) -> Plan:
        """The fastest plan."""
        return self.plans[0]

    @property
    def fitting(self) -> int:
        """Candidates that were not rejected; `plans` are the fastest of them."""
        return self.searched - sum(item.count for item in self.rejected)

    def why(self, plan: Plan) -> str:
        """Why a plan stands where it does, in one sentence."""
        parts = {part: float(value) for part, value in plan.cost.parts.items()}
        total = sum(parts.values())
        if plan.shares is not None:
            text = self._why_shares(plan, plan.shares)
        elif plan is self.best:
            spent = ", ".join(f"{value / total:.1%} {_WORDS[part]}" for part, value in sorted(
                parts.items(), key=lambda item: -item[1]) if value / total >= 0.001)
            text = (f"the fastest that fits: {spent}; {float(plan.memory.total) / 2**30:.1f} of "
                    f"{self.limit / 2**30:.1f} GiB")
        else:
            best = {part: float(value) for part, value in self.best.cost.parts.items()}
            part = max(parts, key=lambda name: parts[name] - best[name])
            more, longer = parts[part] - best[part], plan.step - self.best.step
            text = f"{plan.step / self.best.step - 1:.1%} slower than the best: " + (
                f"{more * 1e3:,.1f} ms more in {_WORDS[part]}" if more > longer / 10 else
                "its parts take no longer, and overlap less")
        if plan.split.recompute and plan.strategy is not None and plan.strategy.recompute == "none":
            text += "; let the model checkpoint its blocks (torch.utils.checkpoint)"
        if plan.pure and plan.mesh is not None:
            text += f"; shards stay in {plan.split.groups} groups of {plan.split.shard}"
        if plan.split.offload:
            text += f"; {float(plan.memory.host) / 2**30:.1f} GiB a rank on the host"
        return text

    def _why_shares(self, plan: Plan, shares: Shares) -> str:
        slower = "the fastest that fits" if plan is self.best else f"{plan.step / self.best.step - 1:.1%} slower"
        if shares.equal:
            gain = "equal shares are as fast as any"
        elif shares.equal_step is None:
            gain = "equal shares fit nowhere"
        else:
            gain = f"{shares.equal_step / plan.step - 1:.1%} faster than the best equal shares"
        text = (f"{slower}: samples {shares} of a micro-batch by speed and memory, {gain}; the fullest GPU, "
                f"{shares.gpu}, is {shares.filled:.0%} full")
        return text + ("" if shares.equal else "; the strategy has the shares, and dplab.loader(data, strategy.shares) "
                       "deals the samples so")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"plans": [plan.to_dict(self.why(plan)) for plan in self.plans],
                "rejected": [item.to_dict() for item in self.rejected], "searched": self.searched,
                "fitting": self.fitting,
                "seconds": self.seconds, "model": self.profile.to_dict(), "cluster": str(self.cluster),
                "step_error": self.cluster.error}

    def __str__(self) -> str:
        head = (f"{self.profile.name} ({self.profile.parameters:,} parameters, sequence {self.profile.sequence}) on "
                f"{self.cluster}: predicted, a step within about {self.cluster.error:.0%}; "
                f"{self.searched:,} candidates in {self.seconds:.2f} s")
        lines = [head, "", f"{'strategy':34}{'dp':>6}{'micro':>7}{'accum':>7}{'recompute':>11}{'step ms':>12}"
                 f"{'GiB a GPU':>11}{'GB a GPU':>10}{'MFU':>7}"]
        for plan in self.plans:
            split, held = plan.split, float(plan.memory.total)
            lines.append(f"{plan!s:34}{split.dp:6}{split.micro_batch:7}{split.accumulate:7}"
                         f"{RECOMPUTE[split.recompute]:>11}{plan.step * 1e3:12,.1f}{held / 2**30:11.1f}"
                         f"{held / 1e9:10.1f}{plan.mfu:7.1%}")
            lines.append(f"    {self.why(plan)}")
        lines += ["", f"{self.fitting:,} of {self.searched:,} candidates can run" + (
            f", the fastest {len(self.plans)} above" if self.fitting > len(self.plans) else "")]
        lines += ["rejected:"] if self.rejected else []
        lines += [f"{item.count:8,}  {item.reason} (such as {item.example})" for item in self.rejected]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        text = str(self).replace("&", "&amp;").replace("<", "&lt;")
        return f"<pre>{text}</pre>"
