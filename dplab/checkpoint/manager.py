"""Checkpoints of one run in one folder: the latest, and the last few of them."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from dplab.checkpoint.folder import METADATA
from dplab.errors import UsageError

if TYPE_CHECKING:
    from dplab.checkpoint.checkpoints import Stateful
    from dplab.checkpoint.saving import Saving
    from dplab.engine import Engine


class CheckpointManager:
    """Keeps the last `keep` complete checkpoints of a run in `folder`, one a step: `folder/step-00000120`.

        manager = dplab.CheckpointManager("runs/mine", keep=3)
        start = manager.load(engine, loader=loader)      # 0 where there is none yet
        ...
        manager.save(engine, loader=loader)

    What is in the folder besides is left alone. Raises UsageError for a `keep` below 1.
    """

    NAME = re.compile(r"step-(\d+)")

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 3) -> None:
        if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
            raise UsageError(f"keep={keep!r} is not allowed; it is the number of checkpoints to keep, an integer >= 1")
        self.folder, self.keep = Path(folder), keep

    def steps(self) -> list[int]:
        """Steps of which a complete checkpoint is there, in order. Not collective."""
        found = [match for match in map(self.NAME.fullmatch, os.listdir(self.folder) if self.folder.is_dir() else ())
                 if match and (self.folder / match[0] / METADATA).is_file()]
        return sorted(int(match[1]) for match in found)

    def latest(self) -> Path | None:
        """The checkpoint of the largest step; None where there is none. Not collective."""
        steps = self.steps()
        return self.place(steps[-1]) if steps else None

    def place(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self.folder / f"step-{step:08d}"

    def save(self, engine: Engine, *, wait: bool = True, limit: float = 60.0, **parts: Stateful) -> Saving:
        """As `engine.save`, into the folder of the engine's step; older ones go once it is complete. Collective."""
        return engine.checkpoints.save(self.place(engine.steps), wait=wait, limit=limit, steps=engine.steps,
                                       parts=parts, done=self._forget_old)

    def load(self, engine: Engine, *, limit: float = 60.0, **parts: Stateful) -> int:
        """As `engine.load`, from the latest checkpoint that rank 0 sees; returns its step, or 0 where there is none.

        Collective.
        """
        place = engine.checkpoints.of_rank_0(self.latest(), limit=limit)
        return 0 if place is None else engine.load(place, limit=limit, **parts)  # type: ignore[arg-type]

    def _forget_old(self) -> None:
        for step in self.steps()[:-self.keep]:
            # without it the rest is no checkpoint, however far the removal comes
            (self.place(step) / METADATA).unlink()
            shutil.rmtree(self.place(step), ignore_errors=True)
