"""`run.diagnose()`: the facts of a run, the rules over them, and where its ranks stand if it does not move."""

from __future__ import annotations

import statistics
from pathlib import Path

from dplab.diagnosis.facts import ENOUGH, Facts, gather
from dplab.diagnosis.findings import Diagnosis, Finding
from dplab.diagnosis.hang import hang
from dplab.diagnosis.rules import LATE, RULES, TIMED
from dplab.telemetry.reader import RunReader
from dplab.telemetry.rundir import RunDirectory


def diagnose(path: Path, *, cores: int | None) -> Diagnosis:
    """Reads a run's directory; works while it runs and afterwards. `cores`: of the machine it ran on, if known.

    Raises RunError where the directory cannot be read.
    """
    directory = RunDirectory(path)
    spec = directory.spec
    facts = gather(RunReader(path).poll(), world_size=directory.world_size, strategy=str(spec.strategy or "") or None,
                   cores=cores)
    return judged(facts, path.name, hang(directory, directory.world_size, directory.state()))


def judged(facts: Facts, run: str, stuck: Finding | None = None) -> Diagnosis:
    """What the facts of a run amount to; `stuck`: where its ranks stand, if they do not move."""
    return Diagnosis(run=run, summary=_summary(facts), steps=facts.steps if facts.enough else 0,
                     findings=(*([stuck] if stuck is not None else []), *findings(facts)))


def findings(facts: Facts) -> list[Finding]:
    """What the rules find, the most expensive first; of what costs the same, where a remedy gains the most."""
    if not facts.steps:
        return []
    rules = (*RULES, *TIMED) if facts.enough else RULES
    found = [finding for rule in rules if (finding := rule(facts)) is not None]
    return sorted(found, key=lambda finding: (-min(finding.cost, 1.0), -(finding.gain or 0.0)))


def _summary(facts: Facts) -> str:
    if not facts.steps:
        silent = [rank for rank in range(facts.world_size) if rank not in facts.ranks]
        seen = "has ended yet on every rank" if not facts.ranks else f"that rank {silent[0]} ended is recorded"
        return f"no step {seen}, so there is nothing to judge"
    # parts as medians do not add up to the median step
    whole = facts.compute + facts.exposed + statistics.median(rank.other for rank in facts.ranks.values())
    busy = f"{facts.compute / whole:.0%} computing, {min(facts.wire, facts.exposed) / whole:.0%} waiting for the wire"
    if (late := (facts.exposed - facts.wire) / whole) >= LATE:
        busy += f", {late:.0%} for a late rank"
    steps, ranks = (f"{count} {what}{'' if count == 1 else 's'}" for count, what in (
        (facts.steps, "step"), (facts.world_size, "rank")))
    few = "" if facts.enough else f"; too short to judge where its time goes, which takes {ENOUGH} steps"
    return f"{steps} on {ranks}, {facts.step:.1f} ms{' each' if facts.steps > 1 else ''}: {busy}{few}"
