"""The diagnosis as a panel: the same findings live, still and in words, from chosen records and from real events."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from dplab.diagnosis.diagnose import findings
from dplab.diagnosis.facts import NEWEST, Gathering, gather
from dplab.diagnosis.findings import Diagnosis, Finding
from dplab.telemetry.events import Event
from dplab.telemetry.steps import StepAssembler
from dplab.views.figures import figure
from dplab.views.findings import SHOWN, FindingsPanel, chart
from dplab.views.fold import Fold
from dplab.views.svg import WIDTH, svg
from tests.views.synthetic import run_events, step_events

LONG = "of 100.0 ms a step, 40.0 ms are exposed synchronisation and 55.0 ms computing (medians over steps & ranks) " * 3


def finding(kind="communication", **changed):
    told = {"what": f"{kind} takes 40% of a step", "evidence": "of 100 ms a step 40 are <exposed>",
            "remedy": "'ddp+wire=bf16': half the bytes travel", "cost": 0.4, "gain": 0.2}
    return Finding(kind=kind, **{**told, **changed})


def diagnosis(*found, steps=12):
    return Diagnosis(run="r", summary=f"{steps} steps on 2 ranks, 100.0 ms each", findings=found, steps=steps)


def said(drawn):
    root = ElementTree.fromstring(drawn)
    return ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]


def test_a_finding_says_what_was_seen_and_what_the_remedy_is_predicted_to_gain():
    made = chart(diagnosis(finding()))
    (log,) = made.marks
    assert log.lines == (
        (1, "what", "communication takes 40% of a step"),
        ("seen", "seen", "of 100 ms a step 40 are <exposed>; lost: 40% of a step"),
        ("try", "try", "'ddp+wire=bf16': half the bytes travel (predicted: 20% of a step)"))
    assert (made.value, made.alert, made.note) == ("1 finding", False, "communication takes 40% of a step")
    assert made.caption == "12 steps on 2 ranks, 100.0 ms each"


def test_what_costs_memory_or_the_whole_run_names_no_share_of_a_step():
    for cost in (0.0, 1.0):
        assert chart(diagnosis(finding(cost=cost))).marks[0].lines[1][2] == "of 100 ms a step 40 are <exposed>"


def test_a_gain_that_nobody_can_predict_is_not_told():
    assert chart(diagnosis(finding(gain=None))).marks[0].lines[-1][2] == "'ddp+wire=bf16': half the bytes travel"


def test_a_hang_is_red_and_more_findings_than_fit_are_named():
    kinds = ["hang", *(f"kind{number}" for number in range(SHOWN + 1))]
    made = chart(diagnosis(*(finding(kind) for kind in kinds)))
    assert (made.value, made.alert) == (f"{SHOWN + 2} findings", True)
    assert made.marks[0].lines[-1] == ("+2", "seen", "; ".join(f"{kind} takes 40% of a step" for kind in kinds[SHOWN:]))
    assert all(f"{kind} takes" in made.note for kind in kinds)


@pytest.mark.parametrize(("steps", "words"), [
    (12, "nothing to complain of: no rule found a loss worth a remedy"), (0, "0 steps on 2 ranks, 100.0 ms each")])
def test_nothing_found_and_nothing_to_judge_are_told_apart(steps, words):
    made = chart(diagnosis(steps=steps))
    assert (made.marks[0].lines, made.value, made.note) == ((("", "seen", words),), "", words)


def test_the_still_picture_goes_over_the_whole_width_and_loses_no_word():
    others = Fold(2).charts()[:3]
    stack = "rank 1 is at\n      File a.py\n   File b.py"
    made = chart(diagnosis(finding(evidence=LONG), finding("hang", evidence=stack)))
    drawn = svg([*others, made], title="t")
    assert f"viewBox='0 0 {2 * WIDTH} " in drawn
    texts = said(drawn)
    assert " ".join(LONG.split()) in re.sub(r"\s+", " ", " ".join(texts))
    assert texts.index("File a.py") > texts.index("rank 1 is at")
    assert max(map(len, texts)) < 2 * WIDTH / 6
    below = [float(node.get("y")) for node in ElementTree.fromstring(drawn).iter() if node.get("y")]
    whole = float(drawn.split("viewBox='0 0 ", 1)[1].split("'")[0].split()[1])
    assert max(below) < whole
    assert "communication takes" in figure(made).layout.annotations[0].text


def test_the_panel_of_a_fold_finds_what_the_rules_find():
    events = run_events(2, 12)
    fold, facts = Fold(2, "ddp", 8), gather(events, world_size=2, strategy="ddp", cores=8)
    fold.feed(events)
    assert list(fold.findings.judged().findings) == findings(facts)
    assert fold.findings.chart().caption == ("12 steps on 2 ranks, 100.0 ms each: 78% computing, 16% waiting for the "
                                             "wire")
    assert fold.charts()[-1].key == "findings"


def test_a_run_that_went_on_with_fewer_ranks_is_judged_by_those():
    """Rank 1 failed in the third step, before it had ended one."""
    before = [event for step in range(2) for event in step_events(0, step)]
    again = Event("restart", "run", 1, 2, before[-1].t1, before[-1].t1, {"number": 1, "world_size": 1, "why": "-"})
    after = [event for step in range(2, 12) for event in step_events(0, step)]
    fold = Fold(2, "ddp", 8)
    fold.feed(before)
    assert fold.findings.chart().note == "no step that rank 1 ended is recorded, so there is nothing to judge"
    fold.feed([again, *after])
    assert fold.findings.chart().caption.startswith("12 steps on 1 rank, ")
    assert (fold.findings.judged().steps, fold.findings.judged().findings) == (12, ())


def test_of_a_long_run_the_newest_steps_count_and_no_more_are_kept():
    """The first half of it has no synchronisation, the second has."""
    gathering, assembler = Gathering(1, "ddp", 8), StepAssembler()
    for step in range(2 * NEWEST):
        for event in step_events(0, step, sync=step >= NEWEST):
            gathering.feed(event)
            if (ended := assembler.feed(event)) is not None:
                gathering.feed_step(ended)
        if step == NEWEST - 1:
            assert gathering.facts().exposed == 0
    facts = gathering.facts()
    assert (facts.steps, facts.exposed, facts.reductions_a_step) == (2 * NEWEST, 16, 3)
    assert len(facts.reductions) == 3 * NEWEST


def test_what_was_told_last_stands_until_it_is_told_anew():
    panel = FindingsPanel(2)
    panel.told = diagnosis(finding())
    assert panel.chart().value == "1 finding"
    panel.told = None
    assert panel.chart().note == "no step has ended yet on every rank, so there is nothing to judge"


@pytest.mark.parametrize("common", [0, 1, 2, 3])
def test_ranks_that_have_few_steps_in_common_are_judged_by_what_there_is(common):
    """A rank died, or its file is behind: rank 0 has left its warm-up, and the steps that both ended are all of it."""
    events = [event for step in range(12) for rank in range(2 if step < common else 1)
              for event in step_events(rank, step)]
    assert gather(events, world_size=2, strategy="ddp", cores=8).wire == pytest.approx(16.0 if common else 0.0)


def test_just_after_a_restart_the_steps_before_it_are_judged_too():
    again = Event("restart", "run", 1, 10, 0, 0, {"number": 1, "world_size": 2, "why": "-"})
    for after in range(4):
        events = [*run_events(2, 10), again, *(event for step in range(10, 10 + after) for rank in range(2)
                                               for event in step_events(rank, step))]
        assert gather(events, world_size=2, strategy="ddp", cores=8).wire == pytest.approx(16.0)
