"""The host's memory beside a device's: buffers that the device copies to and from by itself, and copies under way.

All that offloading knows of a device is in here. Copies run on two streams of their own, one a direction, behind what
the current stream has been given so far. Whoever issues one waits on the host (`wait`) before it reads or overwrites
either end there, and puts it before later work of the device (`order`) before that does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from dplab.errors import UsageError
from dplab.telemetry import recorder


class Copy:
    """A copy that is over."""

    def wait(self) -> None:
        """Returns once it is over."""

    def order(self) -> None:
        """What the device is given from here on comes after it."""


COPIED = Copy()


class HostLink(Protocol):
    """The way between one device and the host."""

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor on the host, holding anything, that copies to and from the device need not stop for."""

    def down(self, source: torch.Tensor, into: torch.Tensor) -> Copy:
        """The device's values into the host's memory; same length and dtype."""

    def up(self, source: torch.Tensor, into: torch.Tensor) -> Copy:
        """The host's values into the device's memory; same length and dtype."""

    def ahead(self) -> AbstractContextManager[None]:
        """What the device is given inside runs beside later work of the current stream, upward copies first."""


class CudaLink:
    """Over pinned memory. (Torch's allocator of it rounds every buffer up to a power of two.)"""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, pin_memory=True)

    def down(self, source: torch.Tensor, into: torch.Tensor) -> Copy:
        return self._issue(self._down, source, into)

    def up(self, source: torch.Tensor, into: torch.Tensor) -> Copy:
        return self._issue(self._up, source, into)

    @contextmanager
    def ahead(self) -> Iterator[None]:
        self._up.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._up):
            yield

    def _issue(self, stream: torch.cuda.Stream, source: torch.Tensor, into: torch.Tensor) -> Copy:
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            into.copy_(source, non_blocking=True)
        return _CudaCopy(stream.record_event(), self.device, (source, into))


class _CudaCopy(Copy):
    """Holds both ends until somebody has waited: the allocators know nothing of the stream that uses them."""

    def __init__(self, event: torch.cuda.Event, device: torch.device, ends: Any) -> None:
        self._event, self._device, self._ends = event, device, ends

    def wait(self) -> None:
        self._event.synchronize()
        self._ends = None

    def order(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)
        self._ends = None


def link_to(device: torch.device) -> HostLink | None:
    """The way from `device` to the host; None where the device computes in the host's memory."""
    if device.type == "cuda":
        return CudaLink(device)
    if device.type != "cpu":
        raise UsageError(f"offload moves between a CUDA GPU and the host, and this rank's device is {device}; leave "
                         f"offload out")
    return None


def say_nothing_moves(strategy: object) -> None:
    """One line, to the run's log and to whoever watches: this offload does nothing here."""
    at, text = recorder.now(), f"{strategy}: nothing to offload, the ranks compute in the host's memory already"
    recorder.current().span("log", "offload", at, at, text=text)
    print(f"dplab: {text}", flush=True)
