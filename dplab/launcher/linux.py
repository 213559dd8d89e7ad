"""What only Linux offers to whoever looks after processes; each call does nothing elsewhere and says so."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time

from dplab.telemetry.process import LINUX

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36


def die_with(parent: int) -> None:
    """Ends this process by SIGKILL when `parent`, which forked it from its main thread, is gone.

    Elsewhere than on Linux a daemon thread looks for it twice a second, which a call that holds the
    interpreter can delay. Call it from the main thread, first of all.
    """
    if LINUX:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), name="dplab-parent", daemon=True).start()
    if os.getppid() != parent:  # it went before we could ask
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> bool:
    """Makes descendants whose parent dies children of this process; False where the system cannot."""
    if LINUX:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    return LINUX


def step_aside(nice: int = 10) -> None:
    """Lets this thread wait for whoever computes: it takes what they leave of the cores, and a little more."""
    if LINUX:      # there a thread has a priority of its own
        with contextlib.suppress(OSError):      # already nicer than that
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


def name_process(name: str) -> None:
    """The name that `ps` and `top` show, up to 15 characters."""
    if LINUX:
        buffer = ctypes.create_string_buffer(name.encode()[:15])
        _prctl(_PR_SET_NAME, ctypes.addressof(buffer))


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
