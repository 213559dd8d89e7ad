"""The memory ledger: bytes by category, counted where they are allocated.

Parameters, gradients, optimizer state, buckets and gathered units are known to the byte. Activations are
what autograd saved in the last measured forward, each storage once, parameters and inputs of the model's
own buffers left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from dplab.core import saved
from dplab.core.bucket import Bucket
from dplab.core.grads import BufferPool
from dplab.core.optim import OwnedOptimizer


class Ledger:
    """`bytes()` is now; `peak` is the largest sum of the known categories seen so far."""

    def __init__(self, buckets: Sequence[Bucket], pools: Sequence[BufferPool], optimizer: OwnedOptimizer) -> None:
        self.buckets, self.pools, self.optimizer = buckets, pools, optimizer
        self.activations = 0
        self.peak = 0

    def bytes(self) -> dict[str, int]:
        """Bytes on this rank by category; on CUDA also what the allocator says."""
        held = {
            "params": sum(bucket.params.held_bytes for bucket in self.buckets),
            "grads": sum(bucket.grads.held_bytes for bucket in self.buckets if bucket.grads is not None),
            "optimizer": self.optimizer.state_bytes,
            "master": sum(bucket.params.master_bytes for bucket in self.buckets),
            "gathered": sum(bucket.params.gathered_bytes for bucket in self.buckets),
            "buckets": sum(pool.nbytes for pool in self.pools),
            "activations": self.activations,
        }
        known = sum(held.values())
        self.peak = max(self.peak, known)
        device = self.buckets[0].device
        if device.type == "cuda":
            allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
            held |= {"other": max(0, allocated - known + self.activations), "allocated": allocated,
                     "reserved": reserved, "fragmentation": reserved - allocated}
        return held

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Counts what autograd saves inside; for one forward, since it costs a call a saved tensor."""
        own = {bucket.params.flat.untyped_storage().data_ptr() for bucket in self.buckets
               if hasattr(bucket.params, "flat")}
        seen: dict[int, int] = {}

        def take(tensor: torch.Tensor) -> None:
            if tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() not in own:
                seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()

        with saved.hooks(take):
            yield
        self.activations = sum(seen.values())
