"""Rules over memory: what it is full of, what of it no tensor uses, and what is computed again for its sake."""

from __future__ import annotations

import statistics

from dplab.diagnosis.facts import Facts, RankFacts
from dplab.diagnosis.findings import Finding
from dplab.specs import Placement
from dplab.telemetry.events import CATEGORIES
from dplab.telemetry.restarts import times

FRAGMENTATION = 0.20
NEAR = 0.90
"""Share of a memory from which on it is nearly full."""
ROOM = 0.80
"""Share of a memory that may be taken without anything to fear."""
AGAIN = 0.02
JOIN = "PYTORCH_ALLOC_CONF=expandable_segments:True"


def retries(facts: Facts) -> Finding | None:
    """CUDA's allocator ran out, gave back all that it had cached, and began again: each time the GPU stands still."""
    rank, of = max(facts.ranks.items(), key=lambda each: each[1].counts.get("num_alloc_retries", 0))
    retried, failed = (of.counts.get(name, 0) for name in ("num_alloc_retries", "num_ooms"))
    if not retried:
        return None
    share = f", {_full(facts, of):.0%} of the GPU's" if of.limit else ""
    return Finding(kind="allocator-retries",
                   what=f"rank {rank}'s GPU ran out of memory {times(retried)} and went on",
                   evidence=f"cudaMalloc failed {times(retried)} within {of.counted} steps; each time every cached "
                            f"block was freed, which waits for all kernels, and it was asked again"
                            + (f" (in vain {times(failed)})" if failed else "")
                            + f"; {of.memory.get('reserved', 0) / 1e9:.2f} GB are reserved{share}",
                   remedy=f"{_less(facts, of)}; where much of it is fragments, {JOIN}, set before the start")


def fragmentation(facts: Facts) -> Finding | None:
    """The allocator holds memory that no tensor uses, neither at a step's end nor, as activations, before."""
    for rank, of in facts.ranks.items():
        reserved = of.memory.get("reserved", 0.0)
        unused = of.memory.get("fragmentation", 0.0) - of.memory.get("activations", 0.0)
        if reserved and unused / reserved > FRAGMENTATION:
            return Finding(kind="fragmentation",
                           what=f"{unused / reserved:.0%} of rank {rank}'s GPU memory is fragments",
                           evidence=f"{reserved / 1e9:.2f} GB reserved, {unused / 1e9:.2f} GB of it in no tensor",
                           remedy=f"set {JOIN} before the start")
    return None


def nearly_full(facts: Facts) -> Finding | None:
    """Little is left of what there is."""
    rank, share = max(((rank, _full(facts, of)) for rank, of in facts.ranks.items()), key=lambda each: each[1])
    if share <= NEAR:
        return None
    of = facts.ranks[rank]
    most, held = _most(of)
    whose, limit = f"rank {rank}'s GPU" if "reserved" in of.memory else "the host", of.limit or 0.0
    return Finding(kind="memory", what=f"the memory of {whose} is {share:.0%} full", remedy=_less(facts, of),
                   evidence=f"{share * limit / 1e9:.2f} of {limit / 1e9:.2f} GB; of what rank {rank} holds "
                            f"{most} are the most, {held / 1e9:.2f} GB")


def recompute(facts: Facts) -> Finding | None:
    """Activations are computed again although they would fit."""
    share = statistics.median(of.recompute for of in facts.ranks.values()) / facts.step
    if share <= AGAIN:
        return None
    fuller = [_full(facts, of, more=True) for of in facts.ranks.values()]
    if any(of.limit is None for of in facts.ranks.values()) or max(fuller) > ROOM:
        return None
    of = max(facts.ranks.values(), key=lambda of: of.dropped)
    return Finding(kind="recompute", cost=share, gain=share,
                   what=f"{share:.0%} of a step computes activations again that would fit",
                   evidence=f"{of.dropped / 1e6:.1f} MB a rank are not kept; with them the memory would be "
                            f"{max(fuller):.0%} full, of {(of.limit or 0) / 1e9:.2f} GB",
                   remedy="leave recompute out of the strategy, or keep what is dear: recompute=keep:attention")


def _less(facts: Facts, of: RankFacts) -> str:
    """What takes away from what a rank holds most of."""
    strategy, (most, _) = facts.parsed, _most(of)
    smaller = "a smaller micro-batch, and as many more of them a window (accumulate)"
    if most == "activations" and strategy is not None and strategy.recompute == "none":
        return f"'{facts.plus('recompute')}' computes activations again in place of keeping them; or {smaller}"
    if most != "activations" and facts.world_size > 1 and strategy is not None and (
            strategy.sharding.params is not Placement.SHARDED):
        return "the next stage of ZeRO: zero1 cuts the optimizer's state into pieces, zero2 gradients, zero3 weights"
    return smaller


def _most(of: RankFacts) -> tuple[str, float]:
    """The category of which a rank holds the most, and its bytes."""
    parts = {name: held for name, held in of.memory.items() if name in CATEGORIES}
    most = max(parts, key=lambda name: parts[name], default="other")
    return most, parts.get(most, 0.0)


def _full(facts: Facts, of: RankFacts, *, more: bool = False) -> float:
    """The share of its memory that is taken, 0 where that is not known; `more`: with what recompute does not keep.

    A GPU is one rank's, by what its allocator has reserved; the host's memory is all ranks'.
    """
    if not of.limit:
        return 0.0
    ranks = [of] if "reserved" in of.memory else list(facts.ranks.values())
    return sum(each.memory.get("reserved", each.memory.get("process", 0.0)) + more * each.dropped
               for each in ranks) / of.limit

