"""Pausing a run, letting it go on, one step at a time; and recording some of its steps. From any process.

Every request is a file that the ranks look at (`telemetry.wishes`); those that wait do so by polling the directory.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from dplab.errors import RunError, UsageError
from dplab.telemetry.rundir import ENDED, RunDirectory
from dplab.telemetry.wishes import Capture, Pause, read_pause, write_capture, write_pause

PAUSE_SECONDS = 60.0
"""How long a run that is asked to pause may take to the end of its step, where nobody says otherwise."""
NEXT_STEPS = 3
"""Steps that the board's buttons record."""
MOST_STEPS = 1000
"""Steps of one recording: torch's profiler keeps every operation of them in memory."""
_POLL_SECONDS = 0.02


def request_pause(directory: RunDirectory) -> None:
    """Asks the ranks to wait before their next step."""
    if directory.state() not in ENDED:
        write_pause(directory.control, Pause(True, read_pause(directory.control).go))


def request_resume(directory: RunDirectory) -> None:
    """Lets the ranks go on. A run that is being stopped is not let go: it ends where it stands."""
    if directory.state() in (*ENDED, "stopping"):
        return
    # A later pause must not hold a rank where another has gone on by this resume. Those that wait, or have agreed to,
    # do so at the end of the step that a page tells, which may be one behind; looked at once more when the wish is
    # there, since until then they went on agreeing.
    go = max(read_pause(directory.control).go, steps_of(directory, max) + 2)
    write_pause(directory.control, Pause(False, go))
    if (later := steps_of(directory, max) + 2) > go:
        write_pause(directory.control, Pause(False, later))


def request_step(directory: RunDirectory, steps: int = 1) -> int:
    """Lets paused ranks do some steps more; of a run that is not paused, pauses it. Returns how many steps will have
    ended when it is paused again. UsageError for a number that is not allowed."""
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise UsageError(f"step({steps!r}) is not allowed; give a whole number of steps >= 1")
    ended = steps_of(directory, max)
    if directory.state() != "paused":
        request_pause(directory)
        return ended
    write_pause(directory.control, Pause(True, ended + steps))
    return ended + steps


def wait_until_paused(directory: RunDirectory, steps: int, timeout: float) -> str:
    """The state, `paused`, once every rank waits with that many steps ended or more; or the state in which the run
    ended. TimeoutError when neither came: the wish stands."""
    deadline = time.monotonic() + timeout
    while (state := directory.state()) not in ENDED:
        if state == "paused" and steps_of(directory, min) >= steps:
            return state
        if time.monotonic() >= deadline:
            raise TimeoutError(f"run {directory.path.name} is {state} {timeout:g} s after it was asked to pause; a "
                               f"program pauses in engine.step(), and this one will when it comes there: wait again "
                               f"with pause(), or resume() it")
        time.sleep(_POLL_SECONDS)
    return state


def request_capture(directory: RunDirectory, steps: tuple[int, int], *, memory: bool) -> Capture:
    """Asks every rank to record the steps from the first to the last, counted from 1, both included. UsageError for
    steps that are not ahead; RunError where the run has ended."""
    allowed = (isinstance(steps, tuple | list) and len(steps) == 2 and all(type(step) is int for step in steps)
               and 1 <= steps[0] <= steps[1] < steps[0] + MOST_STEPS)
    if not allowed:
        raise UsageError(f"profile(steps={steps!r}) is not allowed; give the first and the last step, counted "
                         f"from 1, such as (10, 12), at most {MOST_STEPS} of them")
    state, ended = directory.state(), steps_of(directory, max)
    if state in ENDED:
        raise RunError(f"run {directory.path.name} has ended ({state}); only steps of a run that goes can be recorded")
    if steps[0] <= ended + 2 and state != "paused":      # the next one may begin before every rank has seen the wish
        raise UsageError(f"profile(steps={tuple(steps)}) is not allowed; the run is in step {ended + 1}: give steps "
                         f"ahead of it, such as ({ended + 11}, {ended + 13}), or pause() it first")
    if steps[0] <= ended:
        raise UsageError(f"profile(steps={tuple(steps)}) is not allowed; {ended} steps have ended: give {ended + 1} "
                         f"or later")
    capture = Capture(steps[0], steps[1], memory)
    write_capture(directory.control, capture)
    return capture


def request_next_capture(directory: RunDirectory, *, memory: bool, steps: int = NEXT_STEPS) -> Capture:
    """Asks for a recording of the next few steps, from one that no rank can have begun."""
    first = steps_of(directory, max) + (1 if directory.state() == "paused" else 3)
    return request_capture(directory, (first, first + steps - 1), memory=memory)


def steps_of(directory: RunDirectory, over: Callable[[list[int]], int]) -> int:
    """Steps that have ended on the rank that is the furthest (`max`) or the least far (`min`), by their state pages."""
    pages = map(directory.standing, range(directory.world_size))
    return over([0 if page is None else page.step for page in pages])
