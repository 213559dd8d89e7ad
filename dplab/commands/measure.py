"""Figures of a run in the words of the command line."""

from __future__ import annotations

from typing import Any

from dplab.telemetry.summary import Summary


def figures(summary: Summary) -> dict[str, Any]:
    """The contract's keys that come from events: tokens a second of all ranks, medians over steps and ranks (exposed
    synchronisation is how long collectives blocked a step), peak private bytes of each rank's process."""
    step_ms = summary.step_ms
    return {"tokens_per_s": summary.tokens_per_s, "step_ms_median": step_ms,
            "sync_ms_median": 0.0 if summary.sync_ms is None and step_ms is not None else summary.sync_ms,
            "peak_bytes": [summary.peak_private[rank] for rank in sorted(summary.peak_private)]}


def progress(summary: Summary, steps: int | None = None) -> str:
    """One line: step (of how many, where that is known), loss, tokens/s, sync share, the largest process's peak."""
    told = figures(summary)
    parts = [f"step {summary.steps}" if steps is None else f"step {summary.steps}/{steps}"]
    if summary.loss is not None:
        parts.append(f"loss {summary.loss:.3f}")
    if told["tokens_per_s"] is not None:
        parts.append(f"{told['tokens_per_s']:,.0f} {summary.unit}/s")
    if told["step_ms_median"]:
        parts.append(f"sync {told['sync_ms_median'] / told['step_ms_median']:.0%}")
    if told["peak_bytes"] and summary.steps:
        parts.append(f"process peak {max(told['peak_bytes']) / 1e6:,.0f} MB")
    return " · ".join(parts)
