"""One save under way: every rank writes its share, rank 0 completes it, and all ranks learn how it went."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dplab.checkpoint import pieces
from dplab.checkpoint.folder import Folder
from dplab.checkpoint.pieces import Share
from dplab.errors import CheckpointError, DplabError, StateError, UsageError, WireError
from dplab.telemetry.recorder import Recorder, now
from dplab.wire.rollcall import RollCall

PATIENCE = 600.0
"""Seconds for which ranks that are in a save or a load wait for each other."""

KINDS: tuple[type[DplabError], ...] = (UsageError, StateError, WireError, CheckpointError)


def agree(calls: RollCall, problem: Exception | None, *, what: str, limit: float = PATIENCE,
          also: Callable[[], None] | None = None, said: Any = None) -> None:
    """Raises on every rank where one has a problem, with the first such rank's words; collective.

    `said` must be the same on every rank. `also` is done by rank 0 once all others are well.
    """
    every = calls.gather((None if problem is None else _described(problem), said), what=what, limit=limit)
    verdict: tuple[str, str, int] | None = None
    if every:
        verdict = next(((*told, rank) for rank, (told, _) in enumerate(every) if told is not None), None)
        odd = next((rank for rank, (_, theirs) in enumerate(every) if theirs != said), None)
        if verdict is None and odd is not None:
            verdict = ("UsageError", f"{what} was called with {said!r} on rank 0 and with {every[odd][1]!r} on rank "
                                     f"{odd}; give the same on every rank", 0)
        if verdict is None and also is not None:
            try:
                also()
            except Exception as error:
                problem, verdict = error, (*_described(error), 0)
    verdict = calls.tell(verdict, what=what, limit=limit)
    if verdict is not None:
        kind, text, rank = verdict
        # the same mistake on every rank needs no rank's name
        where = "" if problem is not None and _described(problem)[1] == text else f" (on rank {rank})"
        made = next((known for known in KINDS if known.__name__ == kind), CheckpointError)
        raise made(f"{text}{where}") from problem


def _described(error: Exception) -> tuple[str, str]:
    if isinstance(error, DplabError):
        return type(error).__name__, str(error)
    return "CheckpointError", f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class Job:
    """What is to be written where. `order` and `aliases` are as `store.finish` takes them."""

    folder: Folder
    rank: int
    share: Share
    order: Sequence[pieces.Path]
    aliases: dict[pieces.Path, pieces.Path]
    recorder: Recorder
    done: Callable[[], None]
    """called by rank 0 once the checkpoint is complete"""

    def run(self, calls: RollCall) -> None:
        """Writes, and completes or abandons; collective. Raises CheckpointError on every rank, with the first cause."""
        began, what = self.recorder.open("checkpoint", "save"), f"engine.save({str(self.folder.path)!r})"
        written, problem = None, None
        from dplab.checkpoint import store  # torch's checkpoint package imports for half as long as torch itself

        try:
            if not self.folder.appears():
                raise CheckpointError(f"the folder {self.folder.new} that rank 0 has made is not there; all ranks must "
                                      f"see the same file system")
            written = store.write(self.folder.new, self.rank, self.share)
        except Exception as error:
            problem = CheckpointError(f"{what} failed, and nothing there has changed: {type(error).__name__}: {error}")
            problem.__cause__ = error
        every = calls.gather(written, what=what, limit=PATIENCE)

        def complete() -> None:
            try:
                store.finish(self.folder.new, every, self.order, self.aliases)
                self.folder.publish()
                self.done()
            except Exception as error:
                raise CheckpointError(f"{what} failed, and nothing there has changed: {type(error).__name__}: "
                                      f"{error}") from error

        try:
            agree(calls, problem, what=what, also=complete)
        except DplabError:
            if self.rank == 0:
                self.folder.abandon()
            raise
        self.recorder.span("checkpoint", "save", began, now(), bytes=self.share.nbytes)


class Snapshot:
    """What a job writes while training goes on. What the optimizer holds (its state, master copies) is copied beside
    the next forward and backward, the rest here and now."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self._job = replace(job, share=job.share.copied(held=False))
        self._taken = threading.Event()
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":      # behind the step that the device may still be at, and beside what follows it
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(device))

    @property
    def nbytes(self) -> int:
        return self._job.share.nbytes

    def run(self, calls: RollCall) -> None:
        """As the job's; in a thread of its own."""
        try:
            with torch.cuda.stream(self._stream):      # no stream: nothing
                job = replace(self._job, share=self._job.share.copied(held=True))
        finally:
            self._taken.set()
        job.run(calls)

    def taken(self) -> None:
        """Returns once what the optimizer holds may change."""
        self._taken.wait()


class Saving:
    """What `engine.save` returns: a save that has ended, or one that goes on beside training (`work`).

    `taken()` returns once what the optimizer holds may change.
    """

    def __init__(self, place: Path, work: Callable[[], None] | None = None,
                 taken: Callable[[], None] = lambda: None) -> None:
        self.place, self.taken = place, taken
        self._work = work
        self._error: Exception | None = None
        self.told = False
        """whether somebody has waited and heard why it failed"""
        self._thread: threading.Thread | None = None
        if work is not None:
            # no daemon: a program that ends waits for its last checkpoint
            self._thread = threading.Thread(target=self._run, name="dplab-checkpoint")
            self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has ended, one way or the other. Not collective."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Returns once the checkpoint is complete. Raises CheckpointError, on every rank alike, if it never will be."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            self.told = True
            raise self._error

    def _run(self) -> None:
        assert self._work is not None
        try:
            self._work()
        except Exception as error:
            self._error = error
            # a program that never calls again would not hear of it
            print(f"dplab: {error}", file=sys.stderr, flush=True)

    def __repr__(self) -> str:
        state = "under way" if not self.done else "complete" if self._error is None else f"failed: {self._error}"
        return f"<checkpoint {self.place}: {state}>"
