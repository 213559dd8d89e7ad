"""This machine as `dplab.calibrate` measured it: curves of products, copies and collectives, and where they are kept.

Seconds, bytes, FLOPs; of one rank, while every rank does the same. One private JSON file a kind of machine lies in the
user's data folder. Without it stand defaults, which are those of one laptop-sized machine and may be off by a lot.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from dplab import cards
from dplab.errors import UsageError
from dplab.telemetry.files import write_json

SCHEMA = 1
ERROR, ERROR_UNCALIBRATED = 0.15, 1.0
"""Share by which a predicted step may be off: after a calibration on a quiet machine, and on the defaults (a factor of
two)."""
Curve = Sequence[Sequence[float]]
"""Points (size, seconds), sizes ascending."""


def on_curve(curve: Curve, size: Any) -> Any:
    """Seconds at a size: straight between points on logarithmic axes, as the first below, at the last rate above."""
    sizes, seconds = np.asarray(curve, dtype=float).T
    size = np.asarray(size, dtype=float)
    inside = np.exp(np.interp(np.log(np.maximum(size, 1.0)), np.log(sizes), np.log(seconds)))
    return inside * np.maximum(size / sizes[-1], 1.0)


@dataclass(frozen=True, kw_only=True)
class Pace:
    """A pass of a unit takes `fixed` seconds and `factor` times what its products and copies would take alone."""

    fixed: float
    factor: float

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> Pace:
        """Through two points (alone, measured); a pass that costs less than nothing fixed goes through the origin."""
        (small, low), (large, high) = points
        factor = (high - low) / (large - small)
        fixed = low - factor * small
        return cls(fixed=fixed, factor=factor) if fixed >= 0 < factor else cls(fixed=0.0, factor=high / large)

    def at(self, alone: Any) -> Any:
        """Seconds of a pass."""
        return self.fixed + self.factor * alone


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What was measured, and when and on what. `gemm`: FLOPs and seconds by dtype; `copy`: bytes a second, read and
    write counted; `paces`: of layer and ends (embedding, head and loss), forward and backward; `saved`: bytes that the
    benchmark GPT's layer keeps for one sample; `optimizer`: of AdamW, over parameters; `wire`: curves by backend and
    collective over `ranks` ranks; `contention`: seconds that compute loses to a second of hidden collective, by
    backend. `load`: processes that wanted a core meanwhile; `spread`: middle half of the repetitions, as a share."""

    schema: int = SCHEMA
    date: str
    torch: str
    cpu: str
    cores: int
    memory: float
    ranks: int
    threads: int
    load: float
    spread: float
    gemm: dict[str, Curve]
    copy: float
    paces: dict[str, Pace]
    saved: float
    optimizer: Pace
    wire: dict[str, dict[str, Curve]]
    contention: dict[str, float]
    calibrated: bool = True

    @property
    def error(self) -> float:
        """Share by which a predicted step may be off."""
        return max(ERROR, self.spread) if self.calibrated else ERROR_UNCALIBRATED

    @property
    def backend(self) -> str:
        """The wire that a run takes here."""
        return "shm" if "shm" in self.wire else next(iter(self.wire))

    @property
    def busy(self) -> bool:
        """True where more wanted to compute than the measuring ranks, so that figures are noisy."""
        return self.load > self.ranks + 0.5

    def product(self, rows: Any, depth: Any, columns: Any, dtype: str) -> Any:
        """Seconds of one matrix product."""
        return on_curve(self.gemm.get(dtype, self.gemm["fp32"]), 2.0 * rows * depth * columns)

    def collective(self, backend: str, name: str, size: Any, ranks: Any) -> Any:
        """Seconds of one collective of `size` bytes in all; other numbers of ranks by what a ring sends."""
        ring = (np.asarray(ranks) - 1) / np.maximum(ranks, 1) * self.ranks / (self.ranks - 1)
        return on_curve(self.wire[backend][name], size) * ring

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` is its inverse."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Machine:
        """From `to_dict`'s values; UsageError where they are not."""
        try:
            if values["schema"] != SCHEMA:
                raise UsageError(f"it has schema {values['schema']!r} where this dplab reads {SCHEMA}")
            known = {field.name: values[field.name] for field in fields(cls)}
            known["paces"] = {name: Pace(**pace) for name, pace in values["paces"].items()}
            known["optimizer"] = Pace(**values["optimizer"])
            made = cls(**known)
            curves = [*made.gemm.values(), *(curve for wire in made.wire.values() for curve in wire.values())]
            good = curves and all(_rises(curve) for curve in curves) and made.copy > 0 and made.ranks > 1
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"it is no calibration ({type(error).__name__}: {error})") from error
        if not good:
            raise UsageError("its figures are not positive numbers")
        return made

    def __str__(self) -> str:
        if not self.calibrated:
            return (f"this machine is not calibrated: defaults stand, a step may be off by {self.error:.0%}; "
                    f"run dplab calibrate")
        peak = {name: max(flops / seconds for flops, seconds in curve) / 1e9 for name, curve in self.gemm.items()}
        lines = [f"{self.cpu}, {self.cores} cores, torch {self.torch}, {self.date}: measured on {self.ranks} ranks",
                 f"products    {', '.join(f'{name} {rate:,.0f} GFLOP/s' for name, rate in peak.items())} a rank",
                 f"copies      {self.copy / 1e9:.1f} GB/s a rank, read and write",
                 f"AdamW       {self.optimizer.factor * 1e9:.2f} ms for 1e6 parameters",
                 f"activations {self.saved / 1e6:.2f} MB a layer and sample of the benchmark GPT"]
        for backend, curves in self.wire.items():
            size = curves["all_reduce"][-1]
            lines.append(f"{backend:12}all-reduce {curves['all_reduce'][0][1] * 1e6:,.0f} us at the least, "
                         f"{size[0] / size[1] / 1e9:.2f} GB/s at {size[0] / 1e6:.0f} MB; a hidden second costs "
                         f"compute {self.contention[backend]:.2f} s")
        lines.append(f"spread      {self.spread:.0%} between quarters of the repetitions"
                     + ("; the machine was busy: calibrate again when it is quiet" if self.busy else ""))
        return "\n".join(lines)


def _rises(curve: Curve) -> bool:
    points = np.asarray(curve, dtype=float)
    return bool(points.ndim == 2 and points.shape[1] == 2 and np.all(points > 0) and np.all(np.isfinite(points))
                and np.all(np.diff(points[:, 0]) > 0))


def cpu_model() -> str:
    """The processor's name, as the system tells it."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def path() -> Path:
    """Where the calibration of this kind of machine lies; homes may be shared by machines that differ."""
    root = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    kind = re.sub(r"[^a-z0-9]+", "-", cpu_model().lower()).strip("-") or "cpu"
    return root / "dplab" / "calibration" / f"{kind}-{os.cpu_count()}-cores.json"


def store(machine: Machine) -> Path:
    """Writes a calibration, readable by its user alone. UsageError where it cannot be written."""
    target = path()
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_json(target, machine.to_dict())
    except OSError as error:
        raise UsageError(f"the calibration cannot be written to {str(target)!r} ({error.strerror}); set XDG_DATA_HOME "
                         f"to a folder that you may write") from error
    return target


def load() -> Machine:
    """This machine's calibration, or the defaults where there is none. UsageError where the file is damaged."""
    target = path()
    if not target.exists():
        return DEFAULT
    try:
        return Machine.from_dict(cards.read_json(target, what="calibration"))
    except UsageError as error:
        raise UsageError(f"the calibration {str(target)!r} cannot be used: {error}; delete it or run dplab calibrate"
                         ) from error


def _line(fixed: float, rate: float, sizes: Sequence[float]) -> list[list[float]]:
    return [[size, fixed + size / rate] for size in sizes]


_BYTES = [2.0**power for power in (14, 18, 20, 22, 24)]
DEFAULT = Machine(
    date="", torch="", cpu=cpu_model(), cores=os.cpu_count() or 1, memory=8e9, ranks=2, threads=1, load=0.0,
    spread=0.0, gemm={"fp32": _line(2e-6, 60e9, [2.0 * 64**3, 2.0 * 1024**3])}, copy=8e9,
    paces={name: Pace(fixed=2e-4, factor=1.5) for name in (
        "layer_forward", "layer_backward", "ends_forward", "ends_backward")},
    saved=2.1e6, optimizer=Pace(fixed=1e-4, factor=5e-9),
    wire={"gloo": {"all_reduce": _line(8e-4, 0.45e9, _BYTES), "reduce_scatter": _line(8e-4, 0.5e9, _BYTES),
                   "all_gather": _line(8e-4, 0.8e9, _BYTES)}},
    contention={"gloo": 0.5}, calibrated=False)
"""Of a two-core laptop: products and copies at round figures, gloo on loopback at what it reaches there."""


def share_lost(compute: Sequence[float], wire: Sequence[float], both: Sequence[float]) -> float:
    """Seconds that compute loses to a second of collective behind it, 0 to 1: the median over turns in which each was
    timed alone and both at once."""
    lost = (np.asarray(both) - np.asarray(compute)) / np.asarray(wire)
    return float(min(1.0, max(0.0, np.median(lost))))
