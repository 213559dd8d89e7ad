"""The memory ledger: bytes by category, counted where they are allocated.

Parameters, gradients, optimizer state, buckets and gathered units are known to the byte. Activations are
what autograd saved in the last measured forward, each storage once, parameters and inputs of the model's
own buffers left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dplab.core import saved
from dplab.core.bucket import Bucket
from dplab.core.grads import BufferPool
from dplab.core.optim import OwnedOptimizer
from dplab.telemetry.events import ALLOCATOR_COUNTS


class Ledger:
    """`bytes()` is now; `peak` is the largest sum of the known categories seen so far."""

    def __init__(self, buckets: Sequence[Bucket], pools: Sequence[BufferPool], optimizer: OwnedOptimizer) -> None:
        self.buckets, self.pools, self.optimizer = buckets, pools, optimizer
        self.activations = 0
        self.due = True
        """The next training forward is measured."""
        self.hidden: Callable[[], int] = int
        """Bytes of activations that saved-tensor hooks do not see."""
        self.peak = 0

    def bytes(self) -> dict[str, int]:
        """Bytes on this rank by category; on CUDA also what the allocator says, and what was offloaded as `host`."""
        return self._bytes(self._allocator())

    def gauge(self) -> dict[str, int]:
        """`bytes()`, and on CUDA the allocator's counts (ALLOCATOR_COUNTS): what a run records of its memory."""
        told = self._allocator()
        return self._bytes(told) | {name: told[name] for name in ALLOCATOR_COUNTS if name in told}

    def _allocator(self) -> dict[str, Any]:
        """What CUDA's allocator tells, asked once for all of it, since every question costs; empty elsewhere."""
        device = self.buckets[0].device
        return torch.cuda.memory_stats_as_nested_dict(device) if device.type == "cuda" else {}

    def _bytes(self, allocator: dict[str, Any]) -> dict[str, int]:
        away = sum(bucket.params.host_bytes + (0 if bucket.grads is None else bucket.grads.host_bytes)
                   for bucket in self.buckets)
        states = self.optimizer.state_bytes
        held = {
            "params": sum(bucket.params.held_bytes for bucket in self.buckets),
            "grads": sum(bucket.grads.held_bytes for bucket in self.buckets if bucket.grads is not None),
            "optimizer": 0 if self.optimizer.on_host else states,
            "master": sum(bucket.params.master_bytes for bucket in self.buckets),
            "gathered": sum(bucket.params.gathered_bytes for bucket in self.buckets),
            "buckets": sum(pool.nbytes for pool in self.pools),
            "activations": self.activations + self.hidden() if self.activations else 0,
        }
        known = sum(held.values())
        self.peak = max(self.peak, known)
        if away:
            held["host"] = away + (states if self.optimizer.on_host else 0)
        if allocator:
            allocated, reserved = (int(allocator[f"{name}_bytes"]["all"]["current"]) for name in (
                "allocated", "reserved"))
            held |= {"other": max(0, allocated - known + self.activations), "allocated": allocated,
                     "reserved": reserved, "fragmentation": reserved - allocated}
        return held

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Counts what autograd saves inside; for one forward, since it costs a call a saved tensor."""
        self.due = False
        with self.counting() as seen:
            yield
        self.activations = sum(seen.values())

    @contextmanager
    def counting(self) -> Iterator[dict[int, int]]:
        """Storages that autograd saves inside, address and bytes; weights left out."""
        own = {bucket.params.flat.untyped_storage().data_ptr() for bucket in self.buckets
               if hasattr(bucket.params, "flat")}
        seen: dict[int, int] = {}
        # where a checkpoint drops what it is given, the next tensor would come to lie at the same address
        held: list[torch.UntypedStorage] = []

        def take(tensor: torch.Tensor) -> None:
            if tensor.layout is torch.strided and (storage := tensor.untyped_storage()).data_ptr() not in own:
                seen[storage.data_ptr()] = storage.nbytes()
                held.append(storage)

        with saved.hooks(take):
            yield seen
        held.clear()
