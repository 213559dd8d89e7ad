"""The rank: puts on the launch's surroundings, runs the function, leaves its result or the reason of its failure.

A rank is forked from a preloaded parent (through the supervisor) or, on the cold path, a fresh interpreter;
from `main` on both are the same. Order at the end: the program's own threads, result on disk, process group
down, events on disk, exit functions, then `os._exit`. From the result on the supervisor waits only so long.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn, TextIO

from dplab.errors import RunStopped, WireError
from dplab.launcher import linux, payload
from dplab.launcher.job import Job
from dplab.launcher.streams import Printed
from dplab.telemetry import recorder
from dplab.telemetry.file_recorder import FileRecorder
from dplab.telemetry.files import write_reserved
from dplab.telemetry.state import under_way

_WIRE_WORDS = ("gloo", "nccl", "connection closed by peer", "connection reset", "broken pipe", "tcpstore")
"""How torch's own errors of a lost peer read; they have no common type."""


class Terminated(BaseException):
    """SIGTERM came: unwinds the program so that its `finally` blocks run. No Exception, so nothing swallows it."""


def main(job: Job, rank: int, supervisor: int, *, forked: bool) -> NoReturn:
    """Runs one rank to its end; never returns."""
    status = 1
    try:
        linux.die_with(supervisor)
        linux.name_process(f"dplab-rank{rank}")
        _reset_signals()
        _redirect(job.rank_directory(rank))
        status = _report(job, rank, forked)
    except BaseException:  # the last resort of a rank that could not even report; stderr.log keeps it
        _tell(traceback.format_exc())
    finally:
        _leave(status)


def _leave(status: int) -> NoReturn:
    """Ends the process. Whatever the program did to its streams, and whatever signal comes now, `os._exit` is reached:
    a rank that unwound further would run the code of the supervisor it was forked from."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            with contextlib.suppress(Exception):  # a full disk; a stream that the program closed, replaced, set to None
                stream.flush()  # type: ignore[union-attr]
    finally:
        os._exit(status)


def _tell(text: str) -> None:
    """To stderr.log, also where the program replaced or closed its sys.stderr."""
    with contextlib.suppress(OSError):  # a full disk
        os.write(2, text.encode(errors="backslashreplace"))


def _report(job: Job, rank: int, forked: bool) -> int:
    """Exit status of the rank; where it failed, error.json says why."""
    try:
        _surround(job, rank, forked)
        _work(job, rank)
        return 0
    except Terminated:
        _tell(f"dplab: rank {rank} was told to end (SIGTERM) {under_way(recorder.current().step)}\n")
        with contextlib.suppress(Exception):  # full disk or not, the end comes now
            recorder.current().flush()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)  # so that the supervisor sees what it was
        return 1
    except BaseException as error:
        now = time.monotonic_ns()
        write_reserved(job.rank_directory(rank) / "error.json", _describe(error, rank, now))
        _tell(traceback.format_exc())
        with contextlib.suppress(Exception):  # the reason stands already; a full disk must not replace it
            recorder.current().flush()
        code = error.code if isinstance(error, SystemExit) else 1
        return code & 0xFF or 1 if isinstance(code, int) else 1


def _work(job: Job, rank: int) -> None:
    directory = job.rank_directory(rank)
    events = FileRecorder(directory, rank)
    recorder.install(events, process=True)
    events.phase("import")
    function, args, kwargs = payload.load_call(job.run)
    events.phase("running")
    result = None
    try:
        result = _call(function, args, kwargs)
    except RunStopped:
        pass  # what stop() asks for: an end in good order, without a result
    except SystemExit as exit_:
        if exit_.code not in (None, 0):
            raise
    events.phase("returned")
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    payload.save_result(directory / "result.pkl", rank, result)
    _leave_group()
    events.close()
    atexit._run_exitfuncs()


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    me = os.getpid()
    try:
        return function(*args, **kwargs)
    finally:
        if os.getpid() != me:  # a child that the program forked came back: it is no rank, and has no result to write
            failed = sys.exc_info()[0] is not None
            if failed:
                _tell(traceback.format_exc())
            _leave(int(failed))


def _leave_group() -> None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _surround(job: Job, rank: int, forked: bool) -> None:
    """Environment, folder, import path, streams and seeds as a fresh interpreter would have them."""
    os.environ.clear()
    os.environ.update(job.rank_environ(rank))
    os.chdir(job.cwd)
    sys.path[:] = job.sys_path
    sys.argv = [job.function]
    main_module = ModuleType("__main__")
    main_module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main_module
    if not forked:
        return
    atexit._clear()  # exit functions of the preloaded parent's libraries are about the parent
    for name in ("multiprocessing.util", "concurrent.futures.thread"):
        module: Any = sys.modules.get(name)
        if module is not None:
            atexit.register(getattr(module, "_exit_function", None) or module._python_exit)
    # A fork shares the state of every generator; Python's own reseeds itself.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        torch: Any = sys.modules["torch"]
        torch.random.default_generator.seed()
        torch.set_num_threads(job.threads)


def _redirect(directory: Path) -> None:
    """Streams of the process, C libraries' included, to the rank's files; nothing to read."""
    os.closerange(3, 65536)  # whatever the parents held open: pipes must see their other end close
    for target, path, flags in ((0, os.devnull, os.O_RDONLY),
                                (1, directory / "stdout.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND),
                                (2, directory / "stderr.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)):
        handle = os.open(path, flags, 0o600)
        if handle != target:
            os.dup2(handle, target)
            os.close(handle)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 (the streams live as long as the process)
    sys.stdout, sys.stderr = Printed(1, "stdout"), Printed(2, "stderr")
    vars(sys).update(__stdin__=sys.stdin, __stdout__=sys.stdout, __stderr__=sys.stderr)
    faulthandler.enable(sys.stderr)
    # whoever asks where this rank stands (`run.diagnose()`) gets its stacks here
    faulthandler.register(signal.SIGUSR1, _private(directory / "stack.txt"), all_threads=True)


def _private(path: Path) -> TextIO:
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w", encoding="utf-8")


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _terminate)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated


def _describe(error: BaseException, rank: int, now: int) -> dict[str, Any]:
    kind = type(error)
    known = kind.__module__ in ("builtins", "__main__")
    name = kind.__qualname__ if known else f"{kind.__module__}.{kind.__qualname__}"
    try:
        message = f"sys.exit({error.code!r})" if isinstance(error, SystemExit) else str(error)
    except Exception as unprintable:  # a __str__ that raises is the program's; the type still tells
        message = f"<its message cannot be printed: {type(unprintable).__name__}>"
    here = error.__traceback__
    while here is not None and here.tb_frame.f_code.co_filename in (__file__, payload.__file__):
        here = here.tb_next
    error = error.with_traceback(here or error.__traceback__)
    return {"rank": rank, "type": name, "message": message, "step": recorder.current().step, "time": now,
            "wall": time.time_ns(), "wire": _is_wire(error), "traceback": "".join(traceback.format_exception(error))}


def _is_wire(error: BaseException) -> bool:
    """True where the error tells of a peer rather than of this rank."""
    kinds = [kind.__name__ for kind in type(error).__mro__]
    if isinstance(error, WireError | ConnectionError) or "DistError" in kinds:
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _WIRE_WORDS)


def cold_main() -> NoReturn:
    """Entry of a fresh interpreter: the supervisor writes the job, the rank and its own pid to standard input."""
    request = json.loads(sys.stdin.buffer.read())
    main(Job.from_json(request["job"]), request["rank"], request["supervisor"], forked=False)


if __name__ == "__main__":
    cold_main()
