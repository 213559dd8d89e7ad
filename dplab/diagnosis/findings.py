"""A finding, and all of a run's: one sentence each for what was seen, what it costs and what would help."""

from __future__ import annotations

import html
from dataclasses import asdict, dataclass
from typing import Any

HANG, NOT_FINITE = "hang", "not-finite"
"""Kinds of findings of which each makes all others idle."""
NOTHING = "nothing to complain of: no rule found a loss worth a remedy"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """`cost`: share (0 to 1) of the median step that it takes, or of all steps where it takes whole ones: 1 where the
    run hangs or computes no numbers; 0 where no time is lost, or nobody can say how much, as with memory. `gain`: share
    that the remedy is predicted to save; None where nothing can be said."""

    kind: str
    what: str
    evidence: str
    remedy: str
    cost: float = 0.0
    gain: float | None = None

    @property
    def advice(self) -> str:
        """The remedy with its predicted gain."""
        return self.remedy if self.gain is None else f"{self.remedy} (predicted: {self.gain:.0%} of a step)"

    def __str__(self) -> str:
        return f"{self.what}\n    seen: {self.evidence}\n    try:  {self.advice}"


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What `run.diagnose()` returns: the findings, the most expensive first."""

    run: str
    summary: str
    findings: tuple[Finding, ...]
    steps: int = 0
    """steps whose times were judged, of every rank; 0 where there are too few to do so, which the summary says"""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"run": self.run, "summary": self.summary, "findings": [asdict(finding) for finding in self.findings]}

    def __str__(self) -> str:
        lines = [f"run {self.run}: {self.summary}"]
        lines += [f"{place}. {finding}" for place, finding in enumerate(self.findings, 1)]
        if self.steps and not self.findings:
            lines.append(NOTHING)
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td style='text-align:left'><b>{html.escape(f.what)}</b><br>{html.escape(f.evidence)}</td>"
            f"<td style='text-align:left'>{html.escape(f.remedy)}</td>"
            f"<td>{'' if f.gain is None else f'{f.gain:.0%}'}</td></tr>" for f in self.findings)
        head = "<tr><th>finding</th><th>try</th><th>predicted gain, of a step</th></tr>"
        table = f"<table>{head}{rows}</table>" if rows else f"<p>{NOTHING if self.steps else ''}</p>"
        return f"<div><b>Run {html.escape(self.run)}</b>: {html.escape(self.summary)}{table}</div>"
