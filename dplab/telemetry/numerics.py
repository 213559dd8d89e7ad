"""The numerics lens, read back: where and when two runs stop being equal, in units in the last place.

One file a step, `rank-0/numerics/step-<n>.npz`, the full weights by the plain model's names. Files carry the step's
index, from 0; what is told of them counts steps from 1, as a run's charts do.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dplab.errors import RunError
from dplab.telemetry.lookup import find_run
from dplab.telemetry.reader import RunReader

WATCHED = "lens"
"""Name of the log event of a rank whose gradients a Lens watches."""
NOT_FINITE = "not_finite"
"""Name of the log event of a gradient with a NaN or an infinity."""

_INTEGERS: dict[Any, Any] = {np.dtype(np.float32): np.int32, np.dtype(np.float64): np.int64,
                             np.dtype(np.float16): np.int16}
FARTHEST = np.iinfo(np.int64).max
"""What a number and a NaN differ by."""


_MAKE_ONE = ("make a dplab.Lens(engine) in the program and call its record() after every step "
             "(dplab.workloads.train:train does with lens=True)")


def folder_of(run: Path) -> Path:
    """Where a run keeps the weights of its steps."""
    return run / "rank-0" / "numerics"


def write(folder: Path, step: int, weights: Mapping[str, NDArray[Any]]) -> None:
    """Keeps the weights after the step of that index; whole or not at all."""
    buffer = io.BytesIO()
    np.savez(buffer, **dict(weights))  # type: ignore[arg-type]
    partial = folder / f".step-{step}.part"
    partial.write_bytes(buffer.getvalue())
    partial.rename(folder / f"step-{step}.npz")


def steps_in(folder: Path) -> list[int]:
    """Indices of the steps that are kept there, in order."""
    return sorted(int(path.stem.removeprefix("step-")) for path in folder.glob("step-*.npz"))


def read(folder: Path, step: int) -> dict[str, NDArray[Any]]:
    """The weights after the step of that index."""
    with np.load(folder / f"step-{step}.npz", allow_pickle=False) as stored:
        return {name: stored[name] for name in stored.files}


def ulps(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.int64]:
    """How many numbers of their dtype lie between two arrays of one shape, element by element.

    Two NaNs are equal, a NaN and a number are as far apart as can be; +0 and -0 are the same.
    """
    kind = _INTEGERS[a.dtype]
    signed = [np.ascontiguousarray(x).view(kind).astype(np.int64) for x in (a, b)]
    lowest = np.int64(np.iinfo(kind).min)
    # negative floats count downwards from -0, whose pattern is the lowest integer
    x, y = (np.where(each < 0, lowest - each, each) for each in signed)
    apart: NDArray[np.int64] = np.abs(x - y)
    nan = np.isnan(a), np.isnan(b)
    apart[nan[0] & nan[1]] = 0
    apart[nan[0] ^ nan[1]] = FARTHEST
    return apart


class Difference(NamedTuple):
    """The largest difference within one parameter after one step, counted from 1."""

    step: int
    parameter: str
    ulps: int
    absolute: float


class NotFinite(NamedTuple):
    """A gradient that broke: where it arose, before anything was summed. `step` counts from 1."""

    step: int
    rank: int
    parameter: str
    what: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
    """Two runs, step by step: `steps` that both recorded, counted from 1; `ulps` and `absolute` have shape (steps,
    parameters)."""

    steps: list[int]
    parameters: list[str]
    ulps: NDArray[np.int64]
    absolute: NDArray[np.float64]

    @property
    def identical(self) -> bool:
        """True where every weight after every step is equal to the bit."""
        return not self.ulps.any()

    @property
    def first(self) -> Difference | None:
        """The first difference in time, the largest of that step; None where there is none."""
        rows = np.flatnonzero(self.ulps.any(axis=1))
        return self._at(int(rows[0])) if rows.size else None

    @property
    def largest(self) -> Difference | None:
        """The largest difference after the last step; None where there is none."""
        return self._at(len(self.steps) - 1) if self.ulps[-1].any() else None

    def _at(self, row: int) -> Difference:
        column = int(self.ulps[row].argmax())
        return Difference(self.steps[row], self.parameters[column], int(self.ulps[row, column]),
                          float(self.absolute[row, column]))

    def __str__(self) -> str:
        if self.first is None:
            return f"{len(self.steps)} steps, {len(self.parameters)} parameters: equal to the bit"
        first, last = self.first, self.largest
        text = (f"they differ from step {first.step} on, there most in {first.parameter}: {first.ulps:,} ulp "
                f"({first.absolute:.3g})")
        return text if last is None else text + (f"; after step {last.step} most in {last.parameter}: {last.ulps:,} "
                                                 f"ulp ({last.absolute:.3g})")


def compare_runs(a: Any, b: Any) -> Comparison:
    """Compares two runs that recorded their weights (`dplab.Lens`): the steps and parameters that both have.

    `a`, `b`: a `Run`, an id as `dplab.attach` takes it, or the path of a run's directory or of a Lens's own folder.
    Raises RunError, naming the run, where nothing was recorded or the two have nothing in common, and for an id that
    is none.
    """
    folders = [_folder(run) for run in (a, b)]
    steps = sorted(set(steps_in(folders[0])) & set(steps_in(folders[1])))
    if not steps:
        raise RunError(f"{folders[0]} and {folders[1]} have no recorded step in common; run both for as many steps")
    names: list[str] = []
    apart, absolute = [], []
    for step in steps:
        mine, theirs = (read(folder, step) for folder in folders)
        names = names or [name for name in mine if name in theirs and mine[name].shape == theirs[name].shape]
        if not names:
            raise RunError(f"{folders[0]} and {folders[1]} have no parameter of one name and shape in common")
        pairs = [_same_dtype(mine[name], theirs[name]) for name in names]
        apart.append([int(ulps(x, y).max(initial=0)) for x, y in pairs])
        absolute.append([float(np.abs(x.astype(np.float64) - y).max(initial=0)) for x, y in pairs])
    return Comparison(steps=[step + 1 for step in steps], parameters=names, ulps=np.array(apart),
                      absolute=np.array(absolute))


def not_finite(run: Any) -> list[NotFinite]:
    """Every gradient of a run that was not finite, in order of time.

    `run`: a `Run`, its directory, or an id as `dplab.attach` takes it. Raises RunError where no `dplab.Lens` watched
    the gradients, so that nothing can be said of them.
    """
    path = _run_path(run, "not_finite")
    events = RunReader(path).poll()
    if not folder_of(path).is_dir() and not any(e.kind == "log" and e.name == WATCHED for e in events):
        raise RunError(f"no gradient of run {path} was watched, so that nothing is known of them; {_MAKE_ONE}")
    found = sorted((e for e in events if e.kind == "log" and e.name == NOT_FINITE), key=lambda e: e.t0)
    return [NotFinite(e.step + 1, e.rank, e.attrs["parameter"], e.attrs["what"]) for e in found]


def _folder(run: Any) -> Path:
    path = run if isinstance(run, str | os.PathLike) and Path(run).is_dir() else _run_path(run, "compare_runs")
    path = Path(path)
    folder = path if steps_in(path) else folder_of(path)
    if not folder.is_dir() or not steps_in(folder):
        raise RunError(f"{path} holds no recorded weights; {_MAKE_ONE}")
    return folder


def _run_path(run: Any, caller: str) -> Path:
    path = getattr(run, "path", None)
    return path if isinstance(path, Path) else find_run(run, caller=caller).path


def _same_dtype(x: NDArray[Any], y: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Both in the narrower of the two dtypes, in which they can be equal."""
    dtype = min(x.dtype, y.dtype, key=lambda d: d.itemsize)
    return x.astype(dtype, copy=False), y.astype(dtype, copy=False)
