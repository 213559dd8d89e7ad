"""How a run's supervisor is started: through the warm parent, or cold, as a fresh interpreter.

The launching process itself is never forked (it may hold a CUDA context, threads, a notebook's event loop).
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Mapping

from dplab.errors import RunError
from dplab.launcher.job import Job
from dplab.launcher.supervisor import package_path
from dplab.telemetry.process import LINUX, Identity

_IMPORT_TIME = ("LD_", "PYTHON", "TORCH", "PYTORCH", "MKL_", "KMP_", "OMP_", "GOMP_", "OPENBLAS_", "ATEN_", "DNNL_",
                "ONEDNN_", "MALLOC_")
_SET_LATER = ("OMP_NUM_THREADS",)
"""Variables that libraries read when they are imported. Where they change in the launching process, its warm parent
starts anew; a launch that asks for others (`env`) starts cold."""


class WarmParent:
    """The launching process's end of its warm parent. Thread-safe; a fork of the launching process gets its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._environ: dict[str, str] = {}

    def submit(self, job: Job) -> Identity:
        """Hands a job over and returns who will start it; starts the warm parent where there is none."""
        line = job.to_json().encode() + b"\n"
        with self._lock:
            for _ in range(2):  # the one we have may just have ended
                process = self._process if self._serves() else self._begin()
                assert process is not None
                assert process.stdin is not None
                identity = Identity.of(process.pid)
                try:
                    process.stdin.write(line)
                    process.stdin.flush()
                except BrokenPipeError:
                    self._drop()
                    continue
                except BaseException:  # an interrupt: half a line may be in the pipe
                    self._drop()
                    raise
                if identity is not None:
                    return identity
                self._drop()
        raise RunError("the warm parent of runs ends as soon as it is started; "
                       "launch with warm=False to see a rank's own reason")

    def close(self) -> None:
        """Ends the warm parent; runs under way go on."""
        with self._lock:
            self._drop()

    @property
    def pid(self) -> int | None:
        """Its process, None where there is none now."""
        with self._lock:
            return self._process.pid if self._process is not None and self._serves() else None

    def _serves(self) -> bool:
        return (self._process is not None and self._owner == os.getpid() and self._process.poll() is None
                and self._environ == _import_time(os.environ))

    def _begin(self) -> subprocess.Popen[bytes]:
        self._drop()
        self._environ = _import_time(os.environ)
        # One thread: a pool of numpy's would not come along into the ranks.
        process = _interpreter(["dplab.launcher.warm", str(os.getpid())], {**os.environ, "OPENBLAS_NUM_THREADS": "1"})
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # a wider pipe only saves waiting while it still imports torch
            fcntl.fcntl(process.stdin, getattr(fcntl, "F_SETPIPE_SZ", 1031), 1 << 20)
        _reap_when_over(process)
        self._process, self._owner = process, os.getpid()
        return process

    def _drop(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):  # bytes for a process that is gone
                self._process.stdin.close()
        self._process = None


WARM = WarmParent()
atexit.register(WARM.close)


def start_run(job: Job, *, warm: bool | None) -> Identity:
    """Starts the supervisor of a run; returns the process from which it will come."""
    alike = _import_time(job.environ) == _import_time(os.environ)
    if warm or (warm is None and LINUX and alike):
        return WARM.submit(job)
    return _start_cold(job)


def _start_cold(job: Job) -> Identity:
    process = _interpreter(["dplab.launcher.supervisor"], job.environ)
    identity = Identity.of(process.pid)
    assert process.stdin is not None
    try:
        with process.stdin as pipe:
            pipe.write(job.to_json().encode())
    except BrokenPipeError:
        identity = None
    if identity is None:
        raise RunError(f"the run's supervisor ended as soon as it was started, with status {process.wait()}; "
                       f"try `{sys.executable} -m dplab.launcher.supervisor` to see why")
    _reap_when_over(process)
    return identity


def _interpreter(module: list[str], environ: dict[str, str]) -> subprocess.Popen[bytes]:
    """A fresh interpreter in a session of its own, which an interrupt of this process's group does not reach."""
    try:
        return subprocess.Popen([sys.executable, "-P", "-m", *module], stdin=subprocess.PIPE,
                                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
                                env={**environ, "PYTHONPATH": package_path(environ)})
    except OSError as error:
        raise RunError(f"no process can be started from {sys.executable!r}: {error.strerror}; "
                       f"sys.executable must name the interpreter, and the system allow one more process") from error


def _reap_when_over(process: subprocess.Popen[bytes]) -> None:
    threading.Thread(target=process.wait, name="dplab-reaper", daemon=True).start()


def _import_time(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items()
            if name.startswith(_IMPORT_TIME) and name not in _SET_LATER}
