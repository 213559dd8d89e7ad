"""Any transport, as if between its ranks lay the links of a topology."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dplab.telemetry.recorder import now
from dplab.wire.collectives import Housing, Labelled, Op, Transport, Work
from dplab.wire.emulate.clocks import Clocks, Ticket


class Emulated:
    """Data move at once; `wait()` returns no earlier than the links say. `ranks`: the world's numbers of the members.

    What is gathered as objects (checks, never in a step) costs nothing on the links.
    """

    def __init__(self, inner: Transport, clocks: Clocks, ranks: list[int]) -> None:
        self.inner, self.clocks, self.ranks = inner, clocks, ranks
        self.rank, self.size, self.modelled = inner.rank, inner.size, inner.modelled
        self._group = clocks.group(ranks)
        self._housing = inner if isinstance(inner, Housing) else None
        self._labelled = inner if isinstance(inner, Labelled) else None
        self._work: dict[tuple[str, int, int], dict[int, float]] = {}

    @property
    def label(self) -> str:
        """What the next call carries, for a transport that holds calls against each other."""
        return self._labelled.label if self._labelled is not None else ""

    @label.setter
    def label(self, label: str) -> None:
        if self._labelled is not None:
            self._labelled.label = label

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory from which collectives need not copy, where there is such memory."""
        if self._housing is None:
            return torch.empty(numel, dtype=dtype, device=device)
        return self._housing.empty(numel, dtype, device)

    def all_reduce(self, flat: torch.Tensor, op: Op) -> Work:
        return self._carried("all_reduce", flat, lambda: self.inner.all_reduce(flat, op))

    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor) -> Work:
        return self._carried("reduce_scatter", flat, lambda: self.inner.reduce_scatter(flat, out))

    def all_gather(self, flat: torch.Tensor, own: torch.Tensor | None = None) -> Work:
        housing = self._housing
        if own is not None and housing is not None:
            return self._carried("all_gather", flat, lambda: housing.all_gather(flat, own))
        if own is not None:
            flat.view(self.size, -1)[self.rank].copy_(own)
        return self._carried("all_gather", flat, lambda: self.inner.all_gather(flat))

    def all_to_all(self, flat: torch.Tensor, out: torch.Tensor) -> Work:
        return self._carried("all_to_all", flat, lambda: self.inner.all_to_all(flat, out))

    def broadcast(self, flat: torch.Tensor, source: int) -> Work:
        return self._carried("broadcast", flat, lambda: self.inner.broadcast(flat, source), source)

    def gather_objects(self, value: Any) -> list[Any]:
        return self.inner.gather_objects(value)

    def _carried(self, name: str, flat: torch.Tensor, start: Callable[[], Work], source: int = 0) -> Work:
        nbytes = flat.numel() * flat.element_size()
        work = self._work.get((name, nbytes, source))
        if work is None:
            loads = self.clocks.topology.loads(name, nbytes, self.ranks, source=source)
            work = self._work[name, nbytes, source] = {wire: load.seconds for wire, load in loads.items()}
        ticket = self.clocks.issue(self._group, self.size, work, at=now())
        return EmulatedWork(start(), self.clocks, ticket)


class EmulatedWork:
    """A collective whose data are there, or will be, before its links have carried them."""

    def __init__(self, work: Work, clocks: Clocks, ticket: Ticket) -> None:
        self._work, self._clocks, self._ticket = work, clocks, ticket
        self._end: int | None = None

    @property
    def done_at(self) -> int | None:
        """When the links have carried it and the data are there, once both is past."""
        end, moved = self._end or self._clocks.end(self._ticket), self._work.done_at
        if end is None or moved is None:
            return None
        later = max(end, moved)      # data that are only moved by who waits for them come after the links' time
        return later if later <= now() else None

    def wait(self) -> None:
        if self._end is None:
            self._work.wait()      # the work that is left of moving the data goes on while the links carry them
            self._end = self._clocks.finish(self._ticket)
