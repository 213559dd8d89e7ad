"""What a publication leaves open (micro-batch, degrees of parallelism), filled with the fastest split that fits.

Publishers tuned what they did not print, so the planner's own search stands in for them: such a case judges the
search and the prediction together.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from dplab.planner import cost, grid, memory, published
from dplab.planner.published import Case, Setup, Unusable
from dplab.planner.split import RECOMPUTE, Split

LLAMA = {"count": 2048, "tokens": 4 * 2**20}
"""GPUs and tokens a step of Touvron et al. 2023, arXiv:2302.13971, section 2.4 and table 2."""


def setup(case: Case) -> Setup:
    """The case as published, or else with its gaps filled. Raises Unusable where too much is left open."""
    try:
        return published.setup(case)
    except Unusable as reason:
        if case.stem not in ("mcore", "mlm", "llama1"):
            raise
        return _filled(case, reason)


def _filled(case: Case, reason: Unusable) -> Setup:
    profile, program, cluster = published.profile_of(case), published.recipe_of(case), published.cluster_of(case)
    samples = case.config.get("global_batch")
    if case.stem == "llama1":
        cluster = replace(cluster, count=LLAMA["count"], per_node=8)
        samples = LLAMA["tokens"] // profile.sequence
    if not samples:
        raise reason
    split = grid.candidates(cluster, samples, profile, program, grid.Space(hybrid=False))
    legal, _ = grid.sift(split, grid.laws(split, profile, cluster, samples))
    split = split.take(np.flatnonzero(legal & _agrees(split, case.config)))
    total = np.broadcast_to(memory.predict(profile, split, program).total, split.dp.shape)
    split = split.take(np.flatnonzero(total <= cluster.gpu.memory))
    if not len(split.dp):
        raise reason
    steps = np.broadcast_to(cost.predict(profile, split, cluster, program).step, split.dp.shape)
    return Setup(profile=profile, split=split.take(int(np.argmin(steps))), recipe=program, cluster=cluster)


def _agrees(split: Split, config: dict[str, Any]) -> Any:
    """Candidates that keep to what was published."""
    mask = np.ones(len(split.dp), dtype=bool)
    for name in ("dp", "tp", "pp", "zero", "micro_batch"):
        if name in config:
            mask &= getattr(split, name) == config[name]
    if "model_parallel" in config:
        mask &= split.tp * split.pp == config["model_parallel"]
    if config.get("recompute") in RECOMPUTE:
        mask &= split.recompute == RECOMPUTE.index(config["recompute"])
    return mask
