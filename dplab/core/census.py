"""What the model was made of when it was wrapped, and what has become of it since.

Every trained parameter needs a place in a bucket, the ranks must agree on which are trained, and on what is
written to them outside the optimizer. No hook tells of `requires_grad_`, of a layer that was added or of
`p.clamp_()`, so all of it is read off the model when a window closes. What was found travels in the control
message: a refusal comes on all ranks, before any weight moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from dplab.core.bucket import Bucket
from dplab.core.params import REPLACED
from dplab.errors import StateError
from dplab.wire.collectives import Collectives

THAWED = "was frozen when the model was wrapped and requires a gradient now"
ADDED = "was added after the model was wrapped"
REMEDY = "make the model what it shall be before dplab.parallelize, on every rank"


class Census:
    """Parameters by name, as they were laid out. Freezing one of them and thawing it again is free."""

    def __init__(self, model: nn.Module, buckets: Sequence[Bucket]) -> None:
        self.model, self._buckets = model, buckets
        self._wrote: dict[str, int] = {}
        named = [(name, parameter, bucket.trainable) for bucket in buckets
                 for name, parameter in zip(bucket.names, bucket.parameters, strict=True)]
        self._trained = [(name, parameter) for name, parameter, trainable in named if trainable]
        self._frozen = [(name, parameter) for name, parameter, trainable in named if not trainable]
        self._known = {parameter for _, parameter, _ in named}
        # every table of parameters and submodules, with what was in it (kept, so that no id is given away again):
        # comparing identities is far cheaper than a walk through the model
        tables: list[dict[str, Any]] = [table for module in model.modules()
                                        for table in (module._parameters, module._modules)]
        self._tables = [(table, list(table.values()), _identities(table)) for table in tables]

    def changes(self) -> dict[str, str]:
        """What has become of parameters here, by name: those that no bucket has a place for, or not any more."""
        found = {name: THAWED for name, parameter in self._frozen if parameter.requires_grad}
        found |= {name: REPLACED for bucket in self._buckets for name in bucket.params.replaced()}
        if any(_identities(table) != identities for table, _, identities in self._tables):
            found |= {name: ADDED for name, parameter in self.model.named_parameters()
                      if parameter not in self._known}
        return found

    def trained(self) -> bytes:
        """One byte a parameter that has a place: whether it requires a gradient now."""
        return bytes(parameter.requires_grad for _, parameter in self._trained)

    def wrote(self) -> bool:
        """Whether parameters were written to here, past the optimizer and `engine.gathered()`, since the last call."""
        self._wrote = {name: value for bucket in self._buckets for name, value in bucket.params.written().items()}
        return bool(self._wrote)

    def refuse_uneven_writes(self, world: Collectives) -> None:
        """Raises on every rank where a parameter was written to on some ranks only, or to other values; collective."""
        every = world.gather_objects(self._wrote)
        for name in sorted({name for wrote in every for name in wrote}):
            ranks = [rank for rank, wrote in enumerate(every) if name in wrote]
            if len(ranks) < world.size or len({wrote[name] for wrote in every}) > 1:
                raise StateError(f"parameter {name!r} was written to outside the optimizer (load_state_dict, an "
                                 f"in-place operation, Embedding(max_norm=...)) on {_ranks(ranks, world.size)}, and "
                                 f"the ranks do not hold the same values now; write the same on every rank, or inside "
                                 f"engine.gathered(), where rank 0's values win")

    def refuse_here(self, rank: int) -> None:
        """Raises for what has changed on this rank, where the next collective could not be the same on all."""
        for name, what in self.changes().items():
            raise StateError(f"parameter {name!r} {what}, on rank {rank}; {REMEDY}")

    def refuse(self, world: Collectives) -> None:
        """Raises on every rank for what has changed on any; collective."""
        every = world.gather_objects(self.changes())
        for name, what in sorted({item for changed in every for item in changed.items()}):
            ranks = [rank for rank, changed in enumerate(every) if name in changed]
            raise StateError(f"parameter {name!r} {what}, on {_ranks(ranks, world.size)}; {REMEDY}")

    def refuse_disagreement(self, world: Collectives) -> None:
        """Raises on every rank where a parameter is trained on some ranks only; collective."""
        every = world.gather_objects(self.trained())
        for slot, (name, _) in enumerate(self._trained):
            frozen = [rank for rank, trained in enumerate(every) if not trained[slot]]
            if 0 < len(frozen) < world.size:
                others = sorted(set(range(world.size)) - set(frozen))
                raise StateError(f"parameter {name!r} is frozen on ranks {frozen} and requires a gradient on ranks "
                                 f"{others}; freeze it on every rank at the same step, or on none")


def _identities(table: dict[str, Any]) -> list[int]:
    return list(map(id, table.values()))


def _ranks(ranks: list[int], size: int) -> str:
    return "every rank" if len(ranks) == size else f"ranks {ranks} and not on the others"
