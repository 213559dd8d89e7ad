"""How gradients travel in fewer bytes: the protocol, and what turns rows of values into bytes and back.

A codec is made for one bucket on one rank, and may remember what it left out (error feedback). Its two methods are
written as a walk through collectives: each `yield` hands over one that has been issued and goes on when it is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch

from dplab.layout import Slot
from dplab.wire.collectives import Collectives, Pending

MEASURED_EVERY = 16
"""Reductions of a bucket from one whose error is measured to the next: measuring costs two passes over the values."""


class Codec(Protocol):
    """Sums gradients over an axis. Implement it, or subclass `Quantised`, and give it to `parallelize(codec=...)`."""

    error: float | None
    """Of the last reduction, if it was measured: |sent - meant| / |meant| of the gradients that this rank sent, in L2
    norms."""

    @property
    def held_bytes(self) -> int:
        """What it remembers from one reduction to the next."""

    def all_reduce(self, flat: torch.Tensor, axis: Collectives) -> Iterator[Pending]:
        """`flat` becomes the sum over the ranks of `axis`, the same bits on each. Its length is a multiple of 128 times
        the ranks. Yields what the methods of `axis` return."""

    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor, axis: Collectives) -> Iterator[Pending]:
        """`out` becomes this rank's segment of that sum; it may be that segment of `flat`, which may be overwritten."""


@runtime_checkable
class Remembering(Protocol):
    """A codec whose memory goes into checkpoints."""

    @property
    def remembers(self) -> bool:
        """Whether it has any, as it was made."""

    @property
    def name(self) -> str:
        """What must be alike where its memory is to go on."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What this rank remembers now, by name; good until the next reduction."""

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Goes on from there; from the start where `state` is empty. Keeps the tensors."""


MakeCodec = Callable[[Sequence[Slot]], Codec]
"""Makes the codec of a bucket from its parameters: names, shapes and where each starts in the flat buffer that it
sums. On a hybrid mesh that is this rank's part of what its host has summed, and of a parameter that its bounds cut a
stretch, (n,)."""


class Quantised:
    """Base of codecs that turn values into bytes, piece by piece. Sums are fp32 (float64 where the values are).

    Reduce-scatter: every rank encodes a piece for each other and sends it; the owner adds what it decodes, in rank
    order, to its own values, which are exact. All-reduce: then it encodes the sums and sends them to all.
    `feedback`: what was lost by encoding is added to the values of the next reduction (Seide et al. 2014; Karimireddy
    et al. 2019, arXiv:1901.09847), by those who send and by those who own. It is kept in fp32.
    """

    def __init__(self, slots: Sequence[Slot], *, feedback: bool = False) -> None:
        self.feedback = feedback
        self.error: float | None = None
        self._calls = 0
        # fp32: what is owed of the whole bucket, and of the owned sums; made when first needed
        self._owed: dict[str, torch.Tensor] = {}

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """(pieces, n) fp32 -> (pieces, bytes of one) uint8. n is a multiple of 128. Values that are not finite must
        not come back finite."""
        raise NotImplementedError

    def decode(self, payload: torch.Tensor, n: int) -> torch.Tensor:
        """(pieces, bytes of one) uint8 -> (pieces, n) fp32."""
        raise NotImplementedError

    @property
    def remembers(self) -> bool:
        return self.feedback

    @property
    def name(self) -> str:
        return type(self).__name__

    def state_dict(self) -> dict[str, torch.Tensor]:
        """fp32: what is owed of the whole bucket (`parts`) and of the owned sums; empty without feedback."""
        return dict(self._owed)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """As `Remembering`."""
        self._owed = dict(state)

    @property
    def held_bytes(self) -> int:
        """What is owed."""
        return sum(each.numel() * each.element_size() for each in self._owed.values())

    def all_reduce(self, flat: torch.Tensor, axis: Collectives) -> Iterator[Pending]:
        own = axis.segment(flat)
        yield from self.reduce_scatter(flat, own, axis)
        sums = self._sent("sums", own.view(1, -1))
        payload = self.encode(sums)
        self._keep("sums", sums, payload, measured=False)
        gathered = payload.new_empty(axis.size, payload.shape[1])
        gathered[axis.rank] = payload[0]
        yield axis.all_gather(gathered.view(-1))
        flat.view(axis.size, -1).copy_(self.decode(gathered, own.numel()))

    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor, axis: Collectives) -> Iterator[Pending]:
        rows = self._sent("parts", flat.view(axis.size, -1))
        payload = self.encode(rows)
        self._calls += 1
        self.error = None
        self._keep("parts", rows, payload, measured=self._calls % MEASURED_EVERY == 1, exact=axis.rank)
        received = torch.empty_like(payload)
        yield axis.all_to_all(payload.view(-1), received.view(-1))
        n = rows.shape[1]
        total = torch.zeros(n, dtype=torch.promote_types(flat.dtype, torch.float32), device=flat.device)
        for rank in range(axis.size):
            total += axis.segment(flat) if rank == axis.rank else self.decode(received[rank:rank + 1], n)[0]
        out.copy_(total)

    def _sent(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """What is to be encoded: the values and what is owed from the last time."""
        rows = values.float()
        owed = self._owed.get(name)
        return rows if owed is None else rows + owed

    def _keep(self, name: str, rows: torch.Tensor, payload: torch.Tensor, *, measured: bool,
              exact: int | None = None) -> None:
        """Notes what encoding lost of what is sent; row `exact` stays here as it is."""
        if not (measured or self.feedback):
            return
        lost = rows - self.decode(payload, rows.shape[1])
        if exact is not None:
            lost[exact].zero_()
        if measured:
            meant = torch.linalg.vector_norm(rows, dtype=torch.float64)
            if exact is not None:
                meant = (meant.square() - torch.linalg.vector_norm(rows[exact], dtype=torch.float64).square()).sqrt()
            self.error = float(torch.linalg.vector_norm(lost, dtype=torch.float64) / meant) if meant > 0 else 0.0
        if self.feedback:
            # an overflow is told by the sums; nothing of it is owed
            self._owed[name] = lost.nan_to_num_(0.0, 0.0, 0.0)
