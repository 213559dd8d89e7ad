"""Rules over the numbers themselves: losses that are none, and steps that were skipped because gradients were none."""

from __future__ import annotations

from dataclasses import replace

from dplab.diagnosis.facts import Facts
from dplab.diagnosis.findings import NOT_FINITE, Finding
from dplab.specs import PRECISIONS

SKIPPED = 8
"""Steps in a row: the scale starts at 2^16, and halving it so often leaves 2^8, which most gradients bear."""
_WATCH = ("; to see which gradient breaks first make a dplab.Lens(engine) in the program, and ask "
          "dplab.not_finite(run) afterwards")


def not_finite(facts: Facts) -> Finding | None:
    """The loss is a NaN or infinite, and has been for so long: nothing that the run computes is worth anything."""
    since = {rank: told.since for rank, told in facts.losses.ranks.items() if told.since is not None}
    if not since:
        return None
    first = min(since.values())
    ranks = sorted(rank for rank, step in since.items() if step == first)
    told = facts.losses.ranks[ranks[0]]
    others = [rank for rank, told in facts.losses.ranks.items() if rank not in ranks and told.step >= first]
    where = f" on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if others else ""
    if told.last is None:
        remedy = ("look at the inputs, the targets and the initial weights: the very first forward made no number of "
                  "them")
    elif where:
        remedy = (f"look at the batch of step {first + 1}{where}: all ranks have the same weights, so that it comes "
                  f"from inputs or targets there, or from a mean over nothing")
    else:
        remedy = _steady(facts)
    return Finding(kind=NOT_FINITE, cost=1.0, remedy=remedy + ("" if facts.losses.broken else _WATCH),
                   what=f"the loss is {told.what} since step {first + 1}{where}", evidence=_seen(facts, ranks[0]))


def _seen(facts: Facts, rank: int) -> str:
    """What a rank's loss was before, and which gradient broke first where that is known."""
    told, broken = facts.losses.ranks[rank], facts.losses.broken
    if told.last is None:
        parts = ["no step had a finite loss"]
    else:
        first = "" if told.first in (None, told.last) else f"{told.first[1]:.4g} in step {told.first[0] + 1} and "
        parts = [f"it was {first}{told.last[1]:.4g} in step {told.last[0] + 1}, the last finite one",
                 f"{told.step - told.last[0]} of {told.step + 1} steps are lost"]
    if broken is not None:
        parts.append(f"the first gradient that broke is that of {broken.attrs.get('parameter')!r}, "
                     f"{broken.attrs.get('what')} on rank {broken.rank} in step {broken.step + 1}")
    return "; ".join(parts)


def _steady(facts: Facts) -> str:
    """What keeps a loss a number that was one."""
    strategy = facts.parsed
    ways = ["a lower learning rate or a warm-up"]
    if strategy is not None and strategy.clip_grad_norm is None:
        ways.append(f"clipped gradients ('{facts.plus('clip_grad_norm=1')}')")
    if (wider := _in_bf16(facts)) is not None:
        ways.append(f"'{wider}', since bf16 has the range of fp32")
    return f"train again from before that step with {', or '.join(ways)}"


def skipped(facts: Facts) -> Finding | None:
    """The loss scale was halved many times in a row, and each time all ranks threw their step away."""
    losses = facts.losses
    if losses.in_a_row < SKIPPED:
        return None
    share, wider = losses.skipped / losses.counted, _in_bf16(facts)
    instead = "bf16, which needs no loss scale" if wider is None else f"'{wider}': bf16 needs no loss scale"
    scale = "" if losses.scale is None else f"; the loss scale is {losses.scale:g} now, of 65536 at the start"
    return Finding(kind="skipped-steps", cost=share, gain=share, remedy=f"{instead}; or a lower learning rate",
                   what=f"{losses.in_a_row} steps in a row were skipped: their gradients overflow fp16",
                   evidence=f"{losses.skipped} of the newest {losses.counted} steps moved no weight{scale}")


def _in_bf16(facts: Facts) -> str | None:
    """The strategy with bf16 for its fp16; None where it has none."""
    strategy = facts.parsed
    if strategy is None or "fp16" not in (strategy.precision.param, strategy.precision.autocast):
        return None
    return str(replace(strategy, precision=PRECISIONS["bf16" if strategy.precision.param else "amp-bf16"]))
