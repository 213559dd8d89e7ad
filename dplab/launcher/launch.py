"""`dplab.launch`: runs a function on several ranks in the background and returns a handle at once.

What can be wrong is found before anything starts; what goes wrong later is the run's, and `Run.wait` tells it.
"""

from __future__ import annotations

import os
import platform
import secrets
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dplab import __version__
from dplab.errors import RunError, UsageError
from dplab.launcher import payload
from dplab.launcher.job import CALL, RANK_VARIABLES, Job
from dplab.launcher.run import Run
from dplab.launcher.starter import start_run
from dplab.specs import BACKENDS, RunSpec, Strategy
from dplab.telemetry.files import write_json
from dplab.telemetry.process import Identity
from dplab.telemetry.rundir import RunDirectory, require_folder, runs_root
from dplab.topology import Topology

LABEL_LENGTH = 80


def launch(
    function: payload.Function,
    *,
    world_size: int = 1,
    strategy: Strategy | str | None = None,
    backend: str | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    detach: bool = True,
    threads: int | None = None,
    env: Mapping[str, str] | None = None,
    label: str | None = None,
    max_restarts: int = 0,
    min_ranks: int | None = None,
    root: str | os.PathLike[str] | None = None,
    warm: bool | None = None,
) -> Run:
    """Starts `function(*args, **kwargs)` on `world_size` ranks of this machine; returns at once.

    `function`: any callable, also one defined in a notebook cell, or `"package.module:function"`.
    `strategy`: what `dplab.parallelize` uses in the ranks where the program names none.
    `backend`: `gloo`, `nccl`, `shm` (CPU ranks of one host), or None for what the machine has.
    `detach`: True: the run outlives this process, `dplab.attach` finds it again; False: it ends with it.
    `threads`: intra-operation threads a rank; None: OMP_NUM_THREADS, else the cores shared out evenly.
    `env`: variables for the ranks on top of this process's, which stays as it is.
    `max_restarts`: after a failure all ranks start again, so many times at most; a program that saves through a
    CheckpointManager and loads at its start goes on from there. `min_ranks`: ranks that died are left out, while so
    many are left; None: every start has `world_size` ranks.
    `root`: folder for the run's directory; None: DPLAB_RUNS, else the user's data folder.
    `warm`: True or False forces the preloaded parent or fresh interpreters; None: what fits.

    UsageError: a value that is not allowed, arguments that do not fit the function, something that cannot travel.
    RunError: the run's directory or its first process cannot be made.
    """
    spec = _check(payload.function_name(function), world_size, strategy, backend, detach, label,
                  (max_restarts, min_ranks))
    if warm not in (True, False, None):
        raise UsageError(f"launch(warm={warm!r}) is not allowed; warm is True, False or None")
    cwd = _current_folder()
    environ = {**os.environ, **_check_env(env)}
    threads = _threads(threads, world_size, environ)
    args, kwargs = _check_args(args), _check_kwargs(kwargs)
    payload.require_fit(function, args, kwargs)
    return _launch(spec, Call(payload.encode(function, args, kwargs), threads, cwd, environ, _root(root), warm))


@dataclass(frozen=True)
class Call:
    """What a run is made from besides its spec; the process that launched it keeps it, so that it can again."""

    encoded: bytes
    threads: int
    cwd: str
    environ: dict[str, str]
    root: Path
    warm: bool | None


def launch_again(run: Run, *, strategy: Strategy | str | None, world_size: int | None, label: str | None) -> Run:
    """`Run.relaunch`: everything is checked before the run that goes is stopped."""
    old = run.spec
    spec = _check(old.function, old.world_size if world_size is None else world_size,
                  old.strategy if strategy is None else strategy, old.backend, old.detach,
                  old.label if label is None else label, (old.max_restarts, old.min_ranks))
    call = run._call or _found(run)
    if world_size is not None and world_size != old.world_size and run._call is None:
        call = replace(call, threads=_threads(None, world_size, call.environ))
    run.stop()
    return _launch(spec, call)


def _found(run: Run) -> Call:
    """The call of a run that another process launched: its directory keeps it while it goes."""
    directory = RunDirectory(run.path)
    directory.require_private()
    try:
        encoded = (run.path / CALL).read_bytes()
    except OSError as error:
        raise RunError(f"run {run.id} cannot be launched again: it has ended, and only the process that launched it "
                       f"keeps what it called; call dplab.launch with its function ({run.spec.function})") from error
    environ = dict(os.environ)
    return Call(encoded, _threads(None, run.spec.world_size, environ), str(directory.info().get("cwd") or os.getcwd()),
                environ, run.path.parent, None)


def _launch(spec: RunSpec, call: Call) -> Run:
    directory = _make_directory(call.root, spec, call.cwd)
    job = Job(
        directory=str(directory.path), world_size=spec.world_size, threads=call.threads,
        strategy=spec.strategy, backend=spec.backend, cwd=call.cwd, environ=call.environ,
        sys_path=[os.path.abspath(entry) for entry in sys.path],
        launcher=Identity.of(os.getpid()) if not spec.detach else None, function=spec.function,
        max_restarts=spec.max_restarts, min_ranks=spec.min_ranks)
    _start(directory, job, call.encoded, call.warm)
    run = Run(directory)
    run._call = call
    return run


def _start(directory: RunDirectory, job: Job, call: bytes, warm: bool | None) -> None:
    """Leaves no directory behind where the run cannot be started."""
    try:
        _write(directory, call)
        starter = start_run(job, warm=warm)
        # Tells readers whose death would mean that the run never comes; it reads as starting until then.
        write_json(directory.path / "starter.json", starter)
    except BaseException as error:
        shutil.rmtree(directory.path, ignore_errors=True)
        if isinstance(error, OSError):
            raise RunError(f"the run cannot be started in {directory.path}: {error.strerror}; free space there, "
                           f"or set DPLAB_RUNS to another folder") from error
        raise


def _check(name: str, world_size: int, strategy: Strategy | str | None, backend: str | None,
           detach: bool, label: str | None, restarts: tuple[int, int | None]) -> RunSpec:
    _check_label(label)
    if strategy is not None:
        strategy = Strategy.parse(strategy)
    if backend is not None and backend not in BACKENDS:
        raise UsageError(f"launch(backend={backend!r}) is not known; use one of {', '.join(sorted(BACKENDS))}, or None "
                         f"for what the machine has")
    if not isinstance(detach, bool):
        raise UsageError(f"launch(detach={detach!r}) is not allowed; detach is True or False")
    spec = RunSpec(function=name, world_size=world_size, strategy=None if strategy is None else str(strategy),
                   backend=backend, detach=detach, label=label, max_restarts=restarts[0], min_ranks=restarts[1])
    if strategy is not None:
        strategy.require_ranks(world_size)
    if strategy is not None and strategy.topology is not None:
        links = Topology.parse(strategy.topology)
        links.require(world_size)
        if strategy.hybrid:
            links.grid()
    if (reason := too_many(world_size)) is not None:
        raise UsageError(f"launch(world_size={world_size}) is not allowed; {reason}")
    return spec


def too_many(world_size: int) -> str | None:
    """Why this machine cannot hold so many ranks; None where it can."""
    most = 32 * (os.cpu_count() or 1)
    return None if world_size <= most else (f"this machine has {os.cpu_count()} cores, and more than {most} ranks on "
                                            f"it would only wait for each other")


def _check_label(label: str | None) -> None:
    """A label is shown in one line, and may become part of a file's name."""
    if label is None:
        return
    if (not isinstance(label, str) or not label.strip() or not label.isprintable() or set(label) & {"/", "\\"}
            or len(label) > LABEL_LENGTH):
        raise UsageError(f"launch(label={str(label)[:LABEL_LENGTH]!r}) is not allowed; a label is a string of 1 to "
                         f"{LABEL_LENGTH} printable characters without / and \\, or None")


def _check_env(env: Mapping[str, str] | None) -> dict[str, str]:
    for name, value in (env or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise UsageError(f"launch(env={{{name!r}: {value!r}}}) is not allowed; names and values are strings")
        if name in RANK_VARIABLES:
            raise UsageError(f"launch(env={{{name!r}: ...}}) is not allowed; the launcher sets {name} for each rank")
    return dict(env or {})


def _check_args(args: Sequence[Any]) -> Sequence[Any]:
    if isinstance(args, str) or not isinstance(args, Sequence):
        raise UsageError(f"launch(args={args!r}) is not allowed; args is a tuple or list, write args=({args!r},)")
    return args


def _check_kwargs(kwargs: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise UsageError(f"launch(kwargs={kwargs!r}) is not allowed; kwargs is a dict of keyword arguments")
    return kwargs or {}


def _threads(threads: int | None, world_size: int, environ: Mapping[str, str]) -> int:
    if threads is None:
        given = environ.get("OMP_NUM_THREADS", "")
        return int(given) if given.isdigit() and int(given) else max(1, (os.cpu_count() or 1) // world_size)
    if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
        raise UsageError(f"launch(threads={threads!r}) is not allowed; threads is an integer >= 1, or None")
    return threads


def _current_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise UsageError("the current folder, in which the ranks would start, no longer exists; os.chdir to one that "
                         "does") from None


def _root(root: str | os.PathLike[str] | None) -> Path:
    if root is None:
        return runs_root()
    if not isinstance(root, str | os.PathLike) or not os.fspath(root):
        raise UsageError(f"launch(root={root!r}) is not allowed; root is a folder's path, or None")
    return Path(root).absolute()


def _make_directory(root: Path, spec: RunSpec, cwd: str) -> RunDirectory:
    info = {"spec": spec.to_dict(), "created": time.time_ns(), "versions": _versions(), "argv": sys.argv,
            "cwd": cwd, "host": platform.node()}
    require_folder(root)
    odd = sorted({character for character in str(root) if character in "#?" or not character.isprintable()})
    if odd:
        raise UsageError(f"runs cannot lie in {str(root)!r}: ranks meet at the URL of a file there, and "
                         f"{' and '.join(map(repr, odd))} would cut it short; set DPLAB_RUNS or root to another folder")
    while True:
        # Sorts by time, also within a second; the random end keeps apart what starts in one millisecond.
        now = time.time()
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
        directory = RunDirectory(root / f"{stamp}-{int(now * 1000) % 1000:03d}{secrets.token_hex(2)}")
        try:
            directory.create(info, spec.world_size)
            return directory
        except FileExistsError:
            continue  # one chance in 65,536, for launches in one millisecond
        except RunError:
            shutil.rmtree(directory.path, ignore_errors=True)
            raise


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"dplab": __version__, "python": platform.python_version()}
    for name in ("torch", "numpy"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return versions


def _write(directory: RunDirectory, call: bytes) -> None:
    path = directory.path / CALL
    try:
        write_json(directory.path / "starter.json", None)
        payload.write_private(path, call)
    except OSError as error:
        raise RunError(f"the function and its arguments ({len(call)} bytes) cannot be written to {path}: "
                       f"{error.strerror}; free space there, pass less, or set DPLAB_RUNS to another folder") from error
