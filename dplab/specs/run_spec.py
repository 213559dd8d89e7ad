"""What `launch` was asked for."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from dplab.specs.checks import check, is_int

BACKENDS = ("nccl", "gloo", "shm")
"""What collectives may run over."""


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """What `launch` was asked for; the first thing written into a run directory.

    `strategy` is a one-line form or None where the program chooses; `function` says what every rank runs. After a
    failure the run starts again, `max_restarts` times at most, without the ranks that died as long as `min_ranks` are
    left; None: with as many as before.
    """

    function: str
    world_size: int
    strategy: str | None = None
    backend: str | None = None
    detach: bool = True
    label: str | None = None
    max_restarts: int = 0
    min_ranks: int | None = None

    def __post_init__(self) -> None:
        check("world_size", self.world_size, is_int(self.world_size) and self.world_size >= 1,
               "an integer >= 1", what="launch")
        check("max_restarts", self.max_restarts, is_int(self.max_restarts) and self.max_restarts >= 0,
               "an integer >= 0", what="launch")
        few = self.min_ranks is None or (is_int(self.min_ranks) and 1 <= self.min_ranks <= self.world_size)
        check("min_ranks", self.min_ranks, few, "an integer from 1 to world_size, or None", what="launch")
        for name in ("strategy", "backend", "label"):
            check(name, getattr(self, name), isinstance(getattr(self, name), str | None), "a string", what="launch")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunSpec:
        """From `to_dict`'s values; names that a later version added are left out."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})
