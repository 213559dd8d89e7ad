"""Every exception dplab raises on purpose.

A message says what was given, what is allowed and what to do, in one sentence. The classes that a caller
may already catch for such a mistake (ValueError, RuntimeError) are their second base.
"""

from __future__ import annotations


class DplabError(Exception):
    """Base of all errors raised by dplab on purpose."""


class UsageError(DplabError, ValueError):
    """A value given by the user is not allowed; the command line exits with 2."""


class StateError(DplabError, RuntimeError):
    """A call came at a moment at which it means nothing."""


class RunError(DplabError, RuntimeError):
    """A run cannot be read, reached or controlled."""


class RunFailed(RunError):
    """A run did not come to its end, and no single rank is why; the command line exits with 1."""


class WireError(DplabError, RuntimeError):
    """A collective failed, timed out or met a different one on another rank."""


class CheckpointError(DplabError, RuntimeError):
    """A checkpoint could not be written, or what lies on disk is none, or is damaged."""


class RunStopped(DplabError):
    """Raised by `engine.step()` on all ranks at the same step after somebody asked the run to stop."""


class RankFailed(DplabError, RuntimeError):
    """A rank of a run ended with an exception or a signal.

    `rank` is the first rank that failed, `traceback` its own traceback as text, `collateral` the ranks
    that were stopped because of it.
    """

    def __init__(self, message: str, *, rank: int, traceback: str = "", collateral: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback
        self.collateral = collateral
