"""The global norm of the averaged gradients, and clipping by it.

Every rank sums over the slots it owns in float64; the sums meet in rank order and are rounded once, so the
norm is the same number on every rank and under every strategy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dplab.core.bucket import Bucket
from dplab.errors import UsageError
from dplab.wire.world import Mesh


def check(max_norm: float, norm_type: float) -> None:
    """Raises UsageError for what is no bound or no norm."""
    if not isinstance(max_norm, int | float) or not max_norm >= 0:
        raise UsageError(f"clip_grad_norm_(max_norm={max_norm!r}) is not allowed; it is a number >= 0")
    if not isinstance(norm_type, int | float) or not norm_type > 0:
        raise UsageError(f"clip_grad_norm_(norm_type={norm_type!r}) is not allowed; it is a number > 0, or inf")


def global_norm(buckets: Sequence[Bucket], mesh: Mesh, norm_type: float) -> torch.Tensor:
    """Norm over every element that moved, as a float32 (float64 for float64 gradients) scalar tensor."""
    parts = []
    for bucket in buckets:
        assert bucket.grads is not None
        for slot, start, stop in bucket.owned_slots():
            if bucket.moved[slot]:
                part = bucket.grads.owned[start:stop]
                parts.append(torch.linalg.vector_norm(part, norm_type, dtype=torch.float64) / bucket.divisor)
    device = buckets[0].device
    own = torch.stack(parts) if parts else torch.zeros(1, dtype=torch.float64, device=device)
    every = torch.zeros(mesh.shard.size, dtype=torch.float64, device=device)
    every[mesh.shard.rank] = own.max() if math.isinf(norm_type) else (own**norm_type).sum()
    mesh.shard.all_gather(every, purpose="control").wait()
    total = every.max() if math.isinf(norm_type) else every.sum() ** (1.0 / norm_type)
    return total.to(torch.float64 if buckets[0].dtypes.grad == torch.float64 else torch.float32)


def clip(buckets: Sequence[Bucket], norm: torch.Tensor, max_norm: float) -> None:
    """Scales the owned gradients so that their global norm is at most `max_norm` (torch's formula)."""
    # as a number: a 0-dim tensor would be rounded to the gradients' dtype first
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0).item()
    for bucket in buckets:
        assert bucket.grads is not None
        if bucket.divisor == 1.0:
            bucket.grads.owned.mul_(scale)
        else:
            bucket.divisor /= scale
