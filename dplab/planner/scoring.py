"""The planner against everything published that it can be held to: errors by family, and regret of its advice.

Nothing is adjusted here: a family's "one constant" is the median ratio of prediction and measurement, and the error
"leaving a model size out" takes that constant from the other sizes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dplab.planner import activations, cost, filling, grid, memory, pipeline, published
from dplab.planner.collectives import Group
from dplab.planner.published import Case, Setup, Unusable
from dplab.planner.recipes import recipe
from dplab.planner.split import RECOMPUTE, Split


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case: what was measured or printed, and what is predicted, in the unit of the publication; ms a step for
    whatever measures time."""

    case: Case
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, kw_only=True)
class Family:
    """Cases of one source and kind. `seen` says which constant was set with these cases in view, "" for none."""

    name: str
    kind: str
    rows: tuple[Row, ...]
    seen: str = ""

    @property
    def mape(self) -> float:
        """Mean absolute relative error, nothing fitted to the family."""
        return float(np.mean([abs(row.error) for row in self.rows]))

    @property
    def bias(self) -> float:
        """Median of prediction over measurement."""
        return float(np.median([row.predicted / row.measured for row in self.rows]))

    @property
    def calibrated(self) -> float:
        """Mean absolute relative error after one constant for the family."""
        return float(np.mean([abs((1 + row.error) / self.bias - 1) for row in self.rows]))

    @property
    def left_out(self) -> float | None:
        """The same with each model size calibrated on the others; None where there is one size."""
        sizes = {row.case.model.get("params", row.case.model.get("layers")) for row in self.rows}
        if len(sizes) < 2:
            return None
        errors = []
        for row in self.rows:
            size = row.case.model.get("params", row.case.model.get("layers"))
            others = [1 + other.error for other in self.rows
                      if other.case.model.get("params", other.case.model.get("layers")) != size]
            errors.append(abs((1 + row.error) / float(np.median(others)) - 1))
        return float(np.mean(errors))


@dataclass(frozen=True, kw_only=True)
class Regret:
    """Advice on a set of measured layouts of one model and cluster: how much slower the pick is than the best."""

    name: str
    layouts: int
    first: float
    third: float
    picked: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A published "fits" or "does not fit" and the prediction: bytes needed and bytes there."""

    case: Case
    fits: bool
    needed: float
    limit: float

    @property
    def right(self) -> bool:
        """True where the prediction says the same."""
        return self.fits == (self.needed <= self.limit)


@dataclass(frozen=True, kw_only=True)
class Score:
    """All of it. `unused` holds the ids of cases by the reason why they were left out."""

    families: tuple[Family, ...]
    regrets: tuple[Regret, ...]
    verdicts: tuple[Verdict, ...]
    unused: dict[str, list[str]] = field(default_factory=dict)

    def family(self, name: str) -> Family:
        """The family of a name."""
        return next(family for family in self.families if family.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "families": [{"name": family.name, "kind": family.kind, "cases": len(family.rows), "mape": family.mape,
                          "bias": family.bias, "mape_after_one_constant": family.calibrated,
                          "mape_leaving_a_size_out": family.left_out, "seen": family.seen,
                          "rows": [{"id": row.case.id, "source": row.case.source, "unit": row.case.unit,
                                    "measured": row.measured, "predicted": row.predicted, "error": row.error}
                                   for row in family.rows]} for family in self.families],
            "regrets": [dict(vars(regret)) for regret in self.regrets],
            "verdicts": {"right": sum(verdict.right for verdict in self.verdicts), "of": len(self.verdicts),
                         "wrong": [verdict.case.id for verdict in self.verdicts if not verdict.right]},
            "unused": self.unused}


_TIME: dict[str, tuple[Callable[[str], bool], str]] = {
    "Megatron-LM 2021, A100": (lambda id_: id_.startswith(("sc21-t1", "sc21-t2-ptdp")), "sustained speed of an A100"),
    "ZeRO-3 2021, A100": (lambda id_: id_.startswith("sc21-t2-zero3"), "network share of deepspeed-2021"),
    "Megatron-LM January 2021, A100, gaps filled": (lambda id_: id_.startswith("mlm-jan21"), ""),
    "Megatron-Core, H100, gaps filled": (lambda id_: id_.startswith("mcore-h100"), "sustained speed of an H100"),
    "LLaMA, A100, gaps filled": (lambda id_: id_.startswith("llama1"), ""),
    "Megatron-LM tables, V100 and A100": (lambda id_: id_.startswith("mlm-"), ""),
    "Alpa's Megatron-LM, V100": (lambda id_: id_.startswith("alpa"), ""),
    "MT-NLG 530B, A100": (lambda id_: id_.startswith("mtnlg"), ""),
    "Recomputation paper, one layer, A100": (lambda id_: id_.startswith("recomp-t4"), ""),
    "Recomputation paper, A100": (lambda id_: id_.startswith("recomp"), ""),
    "Zero Bubble, A100": (lambda id_: id_.startswith("zb-thr"), ""),
    "vTrain multi-node, A100": (lambda id_: id_.startswith("vtrain-m"), "network share"),
    "vTrain single-node, A100": (lambda id_: id_.startswith("vtrain-s"), "host time of megatron-2021"),
    "llm-foundry, A100": (lambda id_: id_.startswith("mosaic-a100"), "passes of eager PyTorch"),
    "llm-foundry, H100": (lambda id_: id_.startswith("mosaic-h100"), "sustained speed of an H100"),
    "torchtitan, A100": (lambda id_: id_.startswith("titan-a100"), ""),
    "torchtitan, H100": (lambda id_: id_.startswith("titan"), "share that asynchronous collectives hide"),
    "nanotron, H100": (lambda id_: id_.startswith("nanotron"), "network share"),
}
"""Families of step times: which ids belong to each (the first that matches), and what was set with them in view."""


def score() -> Score:
    """Every published case against its prediction."""
    unused: dict[str, list[str]] = {}
    rows: dict[str, list[Row]] = {}
    verdicts: list[Verdict] = []
    for case in published.cases():
        try:
            if case.unit != "feasibility":
                family = _family(case)
                rows.setdefault(family, []).append(_row(case))
            if case.unit == "feasibility" or (family in _TIME and "filled" not in family):
                verdicts.append(_verdict(case))
        except Unusable as reason:
            unused.setdefault(str(reason), []).append(case.id)
    families = [Family(name=name, kind=_kind(name), rows=tuple(found), seen=_seen(name))
                for name, found in rows.items()]
    return Score(families=tuple(sorted(families, key=lambda family: (_KINDS.index(family.kind), family.name))),
                 regrets=tuple(regrets()), verdicts=tuple(verdicts), unused=unused)


_KINDS = ("formula", "memory", "bubble", "collective", "time")
_FORMULAS = "formulas of papers"
_PEAKS = {"nanotron": "nanotron peaks, H100", "zb": "Zero Bubble peaks, A100", "titan": "torchtitan peaks, H100"}


def _kind(family: str) -> str:
    if family in _TIME:
        return "time"
    return next(kind for kind, found in (
        ("formula", family.startswith("formula")), ("memory", family in _PEAKS.values()),
        ("bubble", family.startswith("bubble")), ("collective", True)) if found)


def _seen(family: str) -> str:
    if family == _PEAKS["nanotron"]:
        return "gathered inputs kept, yes or no"
    if family.startswith("collective"):
        return "latency of a ring step"
    return _TIME[family][1] if family in _TIME else ""


def _family(case: Case) -> str:
    """The family of a case. Raises Unusable where it says nothing that is predicted."""
    if case.id.startswith("vtrain-best"):
        raise Unusable("the best of the rows that are used one by one")
    if case.kind in ("throughput", "best-config") and not isinstance(case.value, str):
        found = next((name for name, (belongs, _) in _TIME.items() if belongs(case.id)), None)
        if found is None:
            raise Unusable("no step time of a described program")
        return found
    if case.kind == "memory":
        if case.id.startswith(("nanotron-mem", "zb-mem")) or case.id.startswith("titan-70B"):
            return _PEAKS[case.stem]
        if case.id.startswith(("zero-fig1", "zero-t1", "recomp-fig1")) or case.stem == "playbook" or "-th-" in case.id:
            return _FORMULAS
        raise Unusable("a memory figure without the shapes behind it, or another tool's estimate")
    if case.kind == "bubble" and str(case.config.get("schedule", "")).startswith("1F1B"):
        return "bubble rates, 1F1B and interleaved"
    if case.id.startswith("vtrain-nccl"):
        return "collective bandwidth, 8 A100"
    raise Unusable("a formula, a plan in words, or a schedule that is not simulated")


def _row(case: Case) -> Row:
    family = _family(case)
    if family in _TIME:
        return _time_row(case, filling.setup(case))
    if family == _FORMULAS:
        return Row(case=case, measured=float(case.value), predicted=_formula(case))
    if case.kind == "memory":
        made = published.setup(case)
        size = float(memory.predict(made.profile, made.split, made.recipe).total)
        return Row(case=case, measured=float(case.value),
                   predicted=size / published.measured_bytes(case) * float(case.value))
    if case.kind == "bubble":
        return Row(case=case, measured=float(case.value), predicted=bubble(case))
    size = case.config["bytes"]
    group = Group.of(8, 8, published.cluster_of(case), recipe("modern"))
    return Row(case=case, measured=float(case.value), predicted=2 * 7 / 8 * size / float(group.all_reduce(size)) / 1e9)


def _time_row(case: Case, made: Setup) -> Row:
    """Both as ms a step, whatever rate was published, so that all families count alike."""
    if case.unit.endswith("one layer"):
        alone = cost.pieces(made.profile, made.split, made.cluster, made.recipe)
        layer = float(alone.layers.total + alone.tensor.total)
        return Row(case=case, measured=float(case.value), predicted=layer * 1e3)
    step = float(cost.predict(made.profile, made.split, made.cluster, made.recipe).step)
    return Row(case=case, measured=step_seconds(case, made) * 1e3, predicted=step * 1e3)


def step_seconds(case: Case, made: Setup) -> float:
    """The measured step behind a published rate; FLOP/s as the unit says, MFU or HFU."""
    value, unit, split = float(case.value), case.unit, made.split
    samples, ranks = float(split.samples), float(split.ranks)
    if unit.startswith("TFLOP/s/GPU"):
        mode = RECOMPUTE[split.recompute] if "HFU" in unit else "none"
        return made.profile.hardware_flops(mode) * samples / (ranks * value * 1e12)
    if unit.startswith("% MFU"):
        return made.profile.model_flops() * samples / (value / 100 * ranks * made.cluster.gpu.flops("bf16"))
    if unit.startswith("tokens/s/GPU"):
        return samples * made.profile.sequence / (ranks * value)
    if unit.startswith("samples/s/GPU"):
        return samples / (ranks * value)
    if unit == "GPU-hours":
        return value * 3600 / ranks * samples * made.profile.sequence / float(case.config["training_tokens"])
    scales = {"ms/iteration": 1e-3, "s/iteration": 1.0}
    if unit not in scales:
        raise Unusable("the unit is no step time")
    return value * scales[unit]


def bubble(case: Case) -> float:
    """The simulated bubble rate of a case with profiled times."""
    config, stages = case.config, case.config.get("pp", 0)
    if "T_F_ms" not in config:
        raise Unusable("a formula, a plan in words, or a schedule that is not simulated")
    chunks = (case.model["layers"] + 2) // stages if config["schedule"] == "1F1B-I" else 1
    return pipeline.bubble_rate(pipeline.run(
        forward=[config["T_F_ms"]] * stages, backward=[config["T_B_ms"] + config["T_W_ms"]] * stages, chunks=chunks,
        micro_batches=config["micro_batches"], hop=config["T_comm_ms"], streams=True))


def _formula(case: Case) -> float:
    """Model states or activations as the paper's own formula counts them, in the case's unit."""
    config = case.config
    if case.stem == "playbook":
        name = "states-20" if "fp32 grad" in config["precision"] else "states-16"
        return float(recipe(name).state_bytes * case.model["params"] / 1e9)
    if case.stem == "zero":
        if not config.get("dp") or not isinstance(case.value, int | float):
            raise Unusable("a formula, a plan in words, or a schedule that is not simulated")
        each = float(sum(memory.states(1.0, Split(dp=config["dp"], zero=config["zero"]), recipe("states-16")).values()))
        return float(config["tp"] * 32e9 / each if "-th-" in case.id else each * case.model["params"] / 1e9)
    made = published.setup(case)
    if case.unit.endswith("activations"):
        full = Split(**{**vars(made.split), "accumulate": 10**6})
        block = made.profile.blocks[0]
        held = activations.in_flight(0, full, made.recipe)
        return float(block.layers / full.pp * held * activations.layer(block, full, made.recipe)) / 2**30
    numel = 12 * made.profile.layers * made.profile.hidden**2 / (made.split.tp * made.split.pp)
    return float(sum(memory.states(numel, made.split, recipe("states-18")).values())) / 2**30


def _verdict(case: Case) -> Verdict:
    """What ran did fit; what was published as not fitting did not. Without a split: the leanest legal one."""
    limit = published.cluster_of(case).gpu.memory
    if "micro_batch" in case.config:
        made = published.setup(case)
        needed = float(memory.predict(made.profile, made.split, made.recipe).total)
    else:
        profile, program = published.profile_of(case), published.recipe_of(case)
        cluster = published.cluster_of(case)
        samples = case.config["global_batch"]
        split = grid.candidates(cluster, samples, profile, program, grid.Space(
            hybrid=False, zero=(0, 1), recompute=("none",), chunks=(1,)))
        legal, _ = grid.sift(split, grid.laws(split, profile, cluster, samples))
        needed = float(np.min(memory.predict(profile, split.take(np.flatnonzero(legal)), program).total))
    return Verdict(case=case, fits=case.unit != "feasibility", needed=needed, limit=limit)


def regrets() -> list[Regret]:
    """Advice on every published set that holds several layouts of one model, cluster and batch."""
    groups: dict[tuple[Any, ...], list[tuple[float, float, str]]] = {}
    for case in published.cases():
        if not case.id.startswith(("vtrain-m", "sc21-t2")) or case.unit == "feasibility":
            continue
        made = published.setup(case)
        key = (case.id.split("-")[0], case.model["params"], case.cluster["count"], made.split.samples)
        step = float(cost.predict(made.profile, made.split, made.cluster, made.recipe).step)
        groups.setdefault(key, []).append((step, step_seconds(case, made), case.id))
    return [_regret(key, sorted(found)) for key, found in groups.items() if len(found) > 1]


def _regret(key: Sequence[Any], found: Sequence[tuple[float, float, str]]) -> Regret:
    best = min(measured for _, measured, _ in found)
    name = f"{'vTrain' if key[0] == 'vtrain' else 'ZeRO-3 or PTD-P'} {key[1] / 1e9:g}B on {key[2]} GPUs"
    return Regret(name=name, layouts=len(found), first=found[0][1] / best - 1,
                  third=min(measured for _, measured, _ in found[:3]) / best - 1, picked=found[0][2])
