"""How dplab's engine would lay a model: slots in order of registration, the buckets they are reduced in.

From shapes alone, so without the small slots' exact places; sizes in elements. Units: 0 is what stands before the
blocks, then the blocks, then what stands after them; 0 and the last are ZeRO-3's root.
"""

from __future__ import annotations

from typing import NamedTuple

from dplab.layout import bucket_cap, bucket_plan
from dplab.planner.profile import Block, Profile


class Bucket(NamedTuple):
    """Elements that are reduced together once backward has met their first unit."""

    numel: int
    unit: int


def slots(profile: Profile) -> list[tuple[int, int]]:
    """(unit, elements) in order of registration."""
    embedding = profile.vocabulary * profile.hidden
    last = profile.layers + 1
    found = [(0, embedding), (0, profile.first - embedding)]
    unit = 1
    for block in profile.blocks:
        for _ in range(block.layers):
            found += [(unit, numel) for numel in _block(block)]
            unit += 1
    head = 0 if profile.tied else embedding
    found += [(last, profile.last - head), (last, head), (last, profile.stated_parameters)]
    return [(unit, numel) for unit, numel in found if numel > 0]


def _block(block: Block) -> list[int]:
    matrices = [block.hidden * (block.inner + 2 * block.kv), block.inner * block.hidden]
    matrices += [block.hidden * block.ffn] * (3 if block.gated else 2)
    return [max(block.parameters - sum(matrices), 0), *matrices]


def buckets(profile: Profile, zero: int, element: int, bucket_mb: float | None = None) -> list[Bucket]:
    """In the order in which backward fills them; `element`: bytes of a gradient, `bucket_mb`: a strategy's."""
    found = slots(profile)
    if zero < 3:
        return _by_size(found, element, bucket_mb)
    last = profile.layers + 1
    root = _by_size([slot for slot in found if slot[0] in (0, last)], element, bucket_mb)
    inner = [Bucket(sum(numel for at, numel in found if at == unit), unit) for unit in range(last - 1, 0, -1)]
    return sorted([*root, *inner], key=lambda bucket: -bucket.unit)


def _by_size(found: list[tuple[int, int]], element: int, bucket_mb: float | None) -> list[Bucket]:
    nbytes = [numel * element for _, numel in found]
    plan = bucket_plan(nbytes, bucket_cap(sum(nbytes), bucket_mb))
    return [Bucket(sum(found[index][1] for index in piece), min(found[index][0] for index in piece)) for piece in plan]


def gathered(profile: Profile) -> int:
    """Elements that ZeRO-3 holds whole at most: the root, the unit in use and the one ahead."""
    return profile.first + profile.last + profile.stated_parameters + 2 * max(
        (block.parameters for block in profile.blocks), default=0)


def ready(unit: int, layers: int, head: float) -> float:
    """Share of a backward after which a unit's gradients are there; the head's takes the first `head` of it."""
    if unit > layers:
        return head
    return 1.0 if unit == 0 else head + (1 - head) * (layers - unit + 1) / max(layers, 1)
