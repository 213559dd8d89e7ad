"""The fault drill: a random rank fails at a random moment, in one of nine ways, and the run is judged.

A trial is good if the run ends within its limit in a right result or in an error that names what happened, leaves no
process and nothing in shared memory, and loses no checkpoint that had been reported complete.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

import dplab
from dplab.errors import CheckpointError, DplabError, RankFailed, RunFailed, UsageError
from dplab.telemetry.rundir import RunDirectory
from dplab.wire import threads
from dplab.workloads import faults, models

KINDS = ("kill", "stop", "exception", "out-of-memory", "hang", "nan", "torn", "disk", "network")
STEPS, RANKS = 6, 2
LIMIT = 45.0
"""Seconds within which a trial must have ended; the ranks wait WAIT for each other."""
WAIT = 5.0
_NAMED = {"exception": ("the drill's own error",),
          "out-of-memory": ("MemoryError", "OutOfMemoryError", "allocate memory", "not enough memory"),
          "disk": ("the disk is full", "No space left", "File too large", "failed, and nothing"),
          "network": ("rank",)}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What is to happen; all of it follows from the seed. `step` is an index; in words it counts from 1."""

    seed: int
    kind: str
    strategy: str
    rank: int
    step: int
    point: str
    variant: int
    restarts: int

    @classmethod
    def of(cls, seed: int) -> Trial:
        """Kinds take turns; the rest is chance."""
        chance = random.Random(seed)
        kind = KINDS[seed % len(KINDS)]
        strategy = chance.choice(["ddp", "zero1", "zero2", "zero3", "zero3+recompute"])
        point = "save" if kind == "torn" else chance.choice(faults.POINTS[:3])
        saving = [step for step in range(1, STEPS) if step % faults.EVERY == 0]
        step = chance.choice(saving) if point == "save" else chance.randrange(STEPS)
        again = chance.randrange(2) if kind in ("kill", "torn", "exception", "hang", "stop") else 0
        return cls(seed=seed, kind=kind, strategy=f"{strategy}+amp-fp16" if kind == "nan" else strategy,
                   rank=chance.randrange(RANKS), step=step, point=point, variant=chance.randrange(3), restarts=again)

    def __str__(self) -> str:
        again = ", restarted once" if self.restarts else ""
        return f"{self.kind} on rank {self.rank} in the {self.point} of step {self.step + 1}, {self.strategy}{again}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a trial: `told` in a line; `problems` is empty where it is good; `skipped` says why it was not
    tried."""

    trial: Trial
    seconds: float
    told: str
    problems: tuple[str, ...] = ()
    skipped: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def drill(seeds: Iterable[int], *, root: str | os.PathLike[str] | None = None) -> Iterator[Outcome]:
    """Runs the trials of these seeds one after the other. `root`: folder for their runs; None: one that goes with them.

    UsageError for a seed below 0.
    """
    with contextlib.ExitStack() as around:
        folder = Path(root or around.enter_context(tempfile.TemporaryDirectory(prefix="dplab-drill-")))
        expected: list[list[float]] = []
        for seed in seeds:
            if seed < 0:
                raise UsageError(f"drill(seeds=[{seed}, ...]) is not allowed; a seed is an integer >= 0")
            trial = Trial.of(seed)
            if trial.kind == "network" and not os.environ.get("DPLAB_DRILL_ALONE"):
                yield _in_namespace(trial)
                continue
            if not expected:
                expected = dplab.launch(faults.program, world_size=RANKS, kwargs={"steps": STEPS}, detach=False,
                                        threads=1, root=folder).wait(LIMIT)
            yield _try(trial, folder / f"trial-{seed}", expected)


def _try(trial: Trial, folder: Path, expected: list[list[float]]) -> Outcome:
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    folder.mkdir(parents=True)
    began = time.monotonic()
    with _disk(folder if trial.kind == "disk" else None) as disk:
        run = dplab.launch(
            faults.program, world_size=RANKS, strategy=trial.strategy, detach=False, threads=1, root=folder,
            backend="gloo" if trial.kind == "network" else None, max_restarts=trial.restarts,
            kwargs={"steps": STEPS, "fault": {**asdict(trial), "disk": disk}}, env={"DPLAB_TIMEOUT": f"{WAIT:g}"})
        results: list[Any] | None = None
        error: BaseException | None = None
        try:
            results = run.wait(LIMIT)
        except (DplabError, TimeoutError) as raised:
            error = raised
        seconds = time.monotonic() - began
        problems = [*_end(trial, results, error, expected), *_checkpoints(trial, run.path)]
        if isinstance(error, TimeoutError):
            run.stop(0.0)
        problems += _left(run.path, before)
    if not problems:
        shutil.rmtree(folder, ignore_errors=True)
    told = "the right result" if error is None else f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return Outcome(trial=trial, seconds=seconds, told=told, problems=tuple(problems))


def _end(trial: Trial, results: list[Any] | None, error: BaseException | None,
         expected: list[list[float]]) -> Iterator[str]:
    """What is wrong with how it ended."""
    if isinstance(error, TimeoutError):
        yield f"it had not ended after {LIMIT:g} s"
        return
    if trial.kind == "nan":
        if results is None or not all(math.isfinite(value) for losses in results for value in losses):
            yield f"a NaN of one rank is a skipped step of all, and the run ended with {error or results}"
    elif trial.restarts:
        if results != expected:
            yield f"restarted, it should give the losses of an undisturbed run, and gave {error or results}"
    elif not isinstance(error, RankFailed | RunFailed):
        yield f"it should have failed, and ended with {error or results}"
    elif trial.kind in ("kill", "torn"):
        if getattr(error, "rank", None) != trial.rank or "was killed by SIGKILL" not in str(error):
            yield f"the error does not name rank {trial.rank} and SIGKILL: {error}"
    elif trial.kind in ("stop", "hang"):
        if f"rank {trial.rank}" not in str(error):
            yield f"the error does not name rank {trial.rank}: {error}"
    elif not any(word in str(error) for word in _NAMED[trial.kind]):
        yield f"the error does not name its cause: {error}"


def _checkpoints(trial: Trial, path: Path) -> Iterator[str]:
    """Checkpoints that were reported complete and are not, or cannot be loaded."""
    with contextlib.suppress(FileNotFoundError):
        reported = [int(line) for line in Path(path, faults.REPORTED).read_text().split()]
        manager = dplab.CheckpointManager(path / "checkpoints", keep=2)
        there = manager.steps()
        yield from (f"checkpoint {step} was reported complete, and there are {there}"
                    for step in reported[-manager.keep:] if step not in there)

        def load() -> int:
            model = models.build("tiny-gpt", layers=2, width=32, heads=2, sequence=8, vocabulary=32)
            return manager.load(dplab.parallelize(model, lambda p: torch.optim.AdamW(p), "ddp"))

        latest = there[-1] if there else 0
        try:
            if (loaded := threads.run(load, 1)[0]) != latest:
                yield f"checkpoint {latest} says that it is of step {loaded}"
        except DplabError as error:
            yield f"checkpoint {latest} does not load: {error}"
        if trial.variant == 0 and there and trial.kind == "torn":
            yield from _torn(manager.place(latest), load)


def _torn(checkpoint: Path, load: Any) -> Iterator[str]:
    """A file of a checkpoint that lost its end must be found out."""
    file = max((path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    os.truncate(file, file.stat().st_size // 2)
    try:
        threads.run(load, 1)
        yield f"{file.name} lost half of its bytes, and the checkpoint loaded"
    except CheckpointError:
        pass
    except DplabError as error:
        yield f"{file.name} lost half of its bytes, and was told as {type(error).__name__}: {error}"


def _left(path: Path, before: set[str]) -> Iterator[str]:
    """What is still there of a run that has ended."""
    found = RunDirectory(path).processes()
    session = None if found is None else found["supervisor"].pid
    until = time.monotonic() + 10.0
    while (living := [each for each in psutil.pids() if _session(each) == session]) and time.monotonic() < until:
        time.sleep(0.02)
    if living:
        yield f"processes {living} of the run are left"
    if os.path.isdir("/dev/shm") and (more := set(os.listdir("/dev/shm")) - before):
        yield f"/dev/shm holds {sorted(more)}"


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return -1


@contextlib.contextmanager
def _disk(folder: Path | None) -> Iterator[str | None]:
    """A disk of 8 MB at `folder`, where this process may mount one; None: there is none."""
    if folder is None or os.geteuid() != 0 or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=8m,mode=0700", "tmpfs", str(folder)], capture_output=True,
            check=False).returncode:
        yield None
        return
    try:
        yield str(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _in_namespace(trial: Trial) -> Outcome:
    """The trial by an interpreter in a network of its own, whose loopback can be cut without cutting this machine's."""
    code = (f"import json; from dplab.workloads.drill import drill; "
            f"print(json.dumps(next(drill([{trial.seed}])).to_dict()))")
    command = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$0" -c "$1"', sys.executable, code]
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        return Outcome(trial=trial, seconds=0.0, told="", skipped="a network of its own needs root, ip and unshare")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3 * LIMIT,
                          env={**os.environ, "DPLAB_DRILL_ALONE": "1"})
    if done.returncode:
        return Outcome(trial=trial, seconds=0.0, told="",
                       skipped=f"no network of its own: {done.stderr.strip()[-300:]}")
    told = json.loads(done.stdout.splitlines()[-1])
    return Outcome(trial=trial, seconds=told["seconds"], told=told["told"], problems=tuple(told["problems"]))
