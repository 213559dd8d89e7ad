"""Where the run's time and memory go, in words: what was found, what was seen, what would help."""

from __future__ import annotations

from dplab.diagnosis.diagnose import judged
from dplab.diagnosis.facts import Gathering
from dplab.diagnosis.findings import HANG, NOT_FINITE, NOTHING, Diagnosis, Finding
from dplab.telemetry.events import Event
from dplab.telemetry.steps import Step
from dplab.views.records import Chart, Log
from dplab.views.words import counted

SHOWN = 3
"""Findings that are told in full; the others are counted."""


class FindingsPanel:
    """The findings of a run so far. The rules are applied whenever it is drawn, or shows what was `told` last."""

    def __init__(self, world_size: int, strategy: str | None = None, cores: int | None = None) -> None:
        self._gathering = Gathering(world_size, strategy, cores)
        self.told: Diagnosis | None = None

    def feed(self, event: Event) -> None:
        """Takes gauges, logs and restarts."""
        self._gathering.feed(event)

    def feed_step(self, step: Step) -> None:
        """Takes a finished step."""
        self._gathering.feed_step(step)

    def judged(self, stuck: Finding | None = None) -> Diagnosis:
        """The rules over what is known by now; `stuck`: where the ranks stand, if they do not move."""
        return judged(self._gathering.facts(), "", stuck)

    def chart(self) -> Chart:
        """The most expensive findings."""
        return chart(self.told or self.judged())


def chart(diagnosis: Diagnosis) -> Chart:
    """A diagnosis as a panel."""
    lines: list[tuple[int | str, str, str]] = []
    for number, finding in enumerate(diagnosis.findings[:SHOWN], 1):
        loss = f"; lost: {finding.cost:.0%} of a step" if 0 < finding.cost < 1 else ""
        lines += [(number, "what", finding.what), ("seen", "seen", finding.evidence + loss),
                  ("try", "try", finding.advice)]
    found = len(diagnosis.findings)
    said = "; ".join(finding.what for finding in diagnosis.findings)
    if not found:
        said = NOTHING if diagnosis.steps else diagnosis.summary
        lines.append(("", "seen", said))
    if found > SHOWN:
        lines.append((f"+{found - SHOWN}", "seen", "; ".join(one.what for one in diagnosis.findings[SHOWN:])))
    marks = (Log(lines=tuple(lines), prose=True),)
    return Chart(key="findings", title="Diagnosis", x_label="", y_label="", marks=marks,
                 value=counted(found, "finding") if found else "", note=said,
                 caption=diagnosis.summary if found or diagnosis.steps else "",
                 alert=any(finding.kind in (HANG, NOT_FINITE) for finding in diagnosis.findings))
