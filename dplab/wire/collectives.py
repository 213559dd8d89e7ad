"""All collectives, along one axis of the mesh: named, counted, timed.

Every call works in place on a flat tensor that is the same length on every rank. For `reduce_scatter` and
`all_gather` rank r's segment is the r-th equal slice; the others are the wire's to overwrite. A call issues
and returns a `Pending`; its `wait()` makes the result visible. Along an axis of one rank nothing is sent.

`bytes` are those that this rank sends. Below stands a `Transport`: gloo, nccl, shm or threads, or links that are
emulated over one of these.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

import torch

from dplab.telemetry.recorder import Recorder, now
from dplab.topology import LinkClass
from dplab.wire.calls import words

if TYPE_CHECKING:
    from dplab.wire.codec import Codec

Purpose = Literal["grads", "params", "buffers", "control", "init"]
Op = Literal["sum", "max"]


class Work(Protocol):
    """What a transport hands back for a collective under way."""

    @property
    def done_at(self) -> int | None:
        """ns at which the last byte had come, as far as the transport can tell; None until then."""


    def wait(self) -> None:
        """Returns when the result is in place; raises WireError if it never will be."""


def summable(part: torch.Tensor) -> torch.Tensor:
    """A copy that sums can be added to: fp32 at least."""
    return part.float() if part.is_floating_point() and part.element_size() < 4 else part.clone()


def reduced(parts: Sequence[torch.Tensor], op: Op) -> torch.Tensor:
    """The sum, in rank order and in fp32 at least, or the maximum."""
    total = summable(parts[0])
    for part in parts[1:]:
        total = total.add_(part) if op == "sum" else torch.maximum(total, part)
    return total


class Transport(Protocol):
    """One group of ranks and the way between them. Calls are issued in the same order on every rank."""

    rank: int
    size: int
    modelled: frozenset[str]
    """Collectives whose algorithm is somebody else's: their bytes are by its documentation, not by our sends."""

    def all_reduce(self, flat: torch.Tensor, op: Op) -> Work: ...
    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor) -> Work: ...
    def all_gather(self, flat: torch.Tensor) -> Work: ...
    def all_to_all(self, flat: torch.Tensor, out: torch.Tensor) -> Work: ...
    def broadcast(self, flat: torch.Tensor, source: int) -> Work: ...
    def gather_objects(self, value: Any) -> list[Any]: ...


@runtime_checkable
class Labelled(Protocol):
    """A transport that holds the ranks' calls against each other."""

    label: str
    """What the next call carries, in words: calls that meet must have it in common."""


@runtime_checkable
class Housing(Protocol):
    """A transport with memory of its own, from which its collectives need not copy."""

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor: ...
    def all_gather(self, flat: torch.Tensor, own: torch.Tensor | None = None) -> Work: ...


class Pending:
    """A collective under way. `wait()` may be called more than once; only the first blocks."""

    def __init__(self, work: Work | None = None, ended: Callable[[Work, int], None] | None = None) -> None:
        self._work, self._ended, self._blocked = work, ended, 0

    def look(self) -> None:
        """Notes when the last byte has come, for transports that only tell when asked."""
        if self._work is not None:
            _ = self._work.done_at

    def push(self) -> bool:
        """Ends the collective under way, of several that follow each other, and issues the next; False if none is."""
        return False

    def nudge(self) -> None:
        """The program has come so far that the next one may be due: called at the same points on every rank."""
        # few works can go on before they are waited for; to ask a protocol would take a hundred times as long
        nudge = getattr(self._work, "nudge", None)
        if nudge is not None:
            asked = now()
            nudge()
            self._blocked += now() - asked

    def wait(self) -> None:
        """Blocks until the result is in place, and records the collective."""
        if self._work is None:
            return
        self.look()
        work, self._work = self._work, None
        asked = now()
        work.wait()
        if self._ended is not None:
            self._ended(work, now() - asked + self._blocked)


DONE = Pending()
"""What an axis of one rank returns."""


@dataclass
class Part:
    """What a collective serves. `row`: under which name it counts, where it is a part of a larger one."""

    purpose: Purpose = "grads"
    bucket: int | None = None
    filled: int | None = None
    row: str | None = None
    counted: bool = False


@dataclass
class Counters:
    """What this rank has sent, by collective: `count`, `bytes`, and `modelled` where the bytes are a formula's.

    Where the hosts are known, `inside` and `across` tell to where: what a ring over the group sends from this rank
    to the next. A collective made of others counts once, with the bytes of all its parts. Gradients and parameters
    count under the collective's name; control messages and the broadcasts at wrap are rows of their own (`control`,
    `init`), so that the rest compares with theory.
    """

    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    digest: int = 0
    """Rolling checksum of everything issued for gradients and parameters; equal on ranks that agree."""
    issued: list[str] = field(default_factory=list)
    """What went into it since the ranks last compared theirs, the first `LONGEST` of it."""
    labels: dict[int, str] = field(default_factory=dict)
    """What buckets hold, in words."""

    LONGEST: ClassVar = 4096

    def add(self, name: str, part: Part, nbytes: int, *, modelled: bool, link: LinkClass | None) -> None:
        row = self.row(part.row or name, part.purpose)
        row["count"] += not part.counted
        row["bytes"] += nbytes
        part.counted = part.row is not None
        if modelled:
            row["modelled"] = True
        if link is not None:
            row[link] = row.get(link, 0) + nbytes

    def row(self, name: str, purpose: Purpose) -> dict[str, Any]:
        return self.rows.setdefault(name if purpose in ("grads", "params") else purpose, {"count": 0, "bytes": 0})

    def note(self, name: str, flat: torch.Tensor, label: str) -> None:
        call = words(name, flat, label or "nobody")
        self.digest = zlib.crc32(call.encode(), self.digest)
        if len(self.issued) < self.LONGEST:
            self.issued.append(call)


class Collectives:
    """The collectives along one axis. Several axes of a rank share `counters`. `link`: where what it sends goes;
    `ranks`: on the axis, where these are not all."""

    pieces = 1
    """Into how many equal pieces a tensor must divide that it all-reduces."""

    before: Collectives | None = None
    """The axis along which it sums gradients first, and no codec does, where there is one."""

    def __init__(self, transport: Transport, counters: Counters, recorder: Recorder, *,
                 link: LinkClass | None = None, ranks: Sequence[int] | None = None) -> None:
        self.transport, self.counters, self.recorder, self.link = transport, counters, recorder, link
        self.ranks = ranks
        self._part: Part | None = None
        self.rank, self.size = transport.rank, transport.size
        self._labelled = transport if isinstance(transport, Labelled) else None
        self._housing = transport if isinstance(transport, Housing) else None

    def all_reduce(self, flat: torch.Tensor, *, op: Op = "sum", purpose: Purpose = "grads",
                   bucket: int | None = None, filled: int | None = None) -> Pending:
        """Every rank ends with the sum (or maximum) over ranks. Sends 2 (N-1)/N of the tensor."""
        return self._issue("all_reduce", lambda: self.transport.all_reduce(flat, op), flat, 2,
                           Part(purpose, bucket, filled))

    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor | None = None, *, bucket: int | None = None,
                       filled: int | None = None) -> Pending:
        """`out` (this rank's own segment, unless given) ends as the sum over ranks. Sends (N-1)/N of the tensor.

        2-byte values are added in fp32 and rounded once, to the dtype of `out`.
        """
        own = self.segment(flat)
        target = own if out is None else out
        if self.size == 1 and target.data_ptr() != own.data_ptr():
            target.copy_(own)
        return self._issue("reduce_scatter", lambda: self.transport.reduce_scatter(flat, target), flat, 1,
                           Part("grads", bucket, filled))

    def all_gather(self, flat: torch.Tensor, own: torch.Tensor | None = None, *, purpose: Purpose = "params",
                   bucket: int | None = None) -> Pending:
        """Every rank's own segment (`own`, where it is not in `flat` yet) reaches every rank. Sends (N-1)/N of `flat`.

        `own` must not be written before the pending has been waited for.
        """
        housing, part = self._housing, Part(purpose, bucket)
        if own is None or housing is None or housing is not self.transport or self.size == 1:
            if own is not None:
                self.segment(flat).copy_(own)
            return self._issue("all_gather", lambda: self.transport.all_gather(flat), flat, 1, part)
        return self._issue("all_gather", lambda: housing.all_gather(flat, own), flat, 1, part)

    def all_to_all(self, flat: torch.Tensor, out: torch.Tensor) -> Pending:
        """Rank r's s-th equal slice of `flat` becomes rank s's r-th of `out`. Sends (N-1)/N of `flat`."""
        if self.size == 1:
            out.copy_(flat)
        return self._issue("all_to_all", lambda: self.transport.all_to_all(flat, out), flat, 1, Part())

    def broadcast(self, flat: torch.Tensor, *, source: int = 0, purpose: Purpose = "init") -> Pending:
        """Every rank ends with rank `source`'s values."""
        return self._issue("broadcast", lambda: self.transport.broadcast(flat, source), flat, 1, Part(purpose))

    def coded(self, codec: Codec, flat: torch.Tensor, part: Part) -> Iterator[Pending]:
        """An all-reduce of gradients as `codec` does it."""
        return codec.all_reduce(flat, self.of(part))

    def of(self, part: Part) -> Collectives:
        """The same axis for the collectives that a larger one is made of: all count as `part`."""
        axis = copy.copy(self)
        axis._part = part
        return axis

    def gather_objects(self, value: Any) -> list[Any]:
        """One value of every rank, in rank order, on every rank; for checks, never on the path of a step."""
        return [value] if self.size == 1 else self.transport.gather_objects(value)

    def barrier(self) -> None:
        """Returns once every rank has called it."""
        self.gather_objects(None)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor from which this axis' collectives need not copy, if there is such memory."""
        if self._housing is None:
            return torch.empty(numel, dtype=dtype, device=device)
        return self._housing.empty(numel, dtype, device)

    def housed(self, flat: torch.Tensor) -> torch.Tensor:
        """The same values in such memory; the tensor itself where there is none."""
        if self._housing is None:
            return flat
        return self._housing.empty(flat.numel(), flat.dtype, flat.device).copy_(flat)

    def segment(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's own segment of `flat`."""
        return flat.view(self.size, -1)[self.rank] if flat.numel() else flat

    def _issue(self, name: str, start: Callable[[], Work], flat: torch.Tensor, passes: int, part: Part) -> Pending:
        if self.size == 1 or not flat.numel():
            return DONE
        part = self._part or part
        purpose, bucket = part.purpose, part.bucket
        nbytes = passes * (self.size - 1) * flat.numel() * flat.element_size() // self.size
        self.counters.add(name, part, nbytes, modelled=name in self.transport.modelled, link=self.link)
        label = "" if bucket is None else self.counters.labels.get(bucket, f"bucket {bucket}")
        if self._labelled is not None:
            self._labelled.label = label
        if purpose in ("grads", "params"):
            self.counters.note(name, flat, label)
        self.recorder.phase(name, bucket=-1 if bucket is None else bucket)
        issued = self.recorder.open("collective", f"{name} {label}" if label else name)
        work = start()

        def ended(work: Work, exposed: int) -> None:
            free = now()
            attrs: dict[str, Any] = {"purpose": purpose, "bucket": bucket, "bytes": nbytes, "exposed": exposed}
            if part.filled is not None:
                attrs["filled"] = part.filled
            if self.link is not None:
                attrs["link"] = self.link
            if self.ranks is not None:
                attrs["ranks"] = self.ranks
            if part.row is not None:
                attrs["of"] = part.row
            self.recorder.span("collective", name, issued, min(free, work.done_at or free), **attrs)

        return Pending(work, ended)
