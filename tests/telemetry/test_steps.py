"""Where the time of a step goes, against sums done by hand and against a count of microseconds."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dplab.telemetry.events import Event
from dplab.telemetry.steps import Step, StepAssembler
from tests.views.synthetic import MS, run_events, step_events


def assembled(events):
    assembler = StepAssembler()
    return [step for event in events if (step := assembler.feed(event)) is not None]


def test_parts_of_the_synthetic_step_are_those_of_its_docstring():
    (step,) = assembled(step_events(0, 3))
    assert [part / MS for part in step.split_ns()] == [78, 16, 6]
    (alone,) = assembled(step_events(0, 3, sync=False))
    assert [part / MS for part in alone.split_ns()] == [90, 0, 10]


def test_steps_of_several_ranks_do_not_mix():
    steps = assembled(run_events(3, 4))
    assert [(step.index, step.rank) for step in steps] == [(index, rank) for index in range(4) for rank in range(3)]
    assert all(span.rank == step.rank and span.step == step.index for step in steps for span in step.spans)


def test_what_happened_before_a_step_is_not_in_it():
    (first, second) = assembled([*step_events(0, 0), *step_events(0, 1)])
    assert not any(span.kind == "data" for step in (first, second) for span in step.spans)


def test_waits_at_initialisation_are_no_synchronisation_of_a_step():
    broadcast = Event("collective", "broadcast", 0, 0, 10, 90, {"purpose": "init", "exposed": 80})
    (step,) = assembled([broadcast, Event("step", "train", 0, 0, 0, 100, {})])
    assert step.split_ns() == (0, 0, 100)
    assert step.sync() == []


def test_a_program_that_never_steps_costs_bounded_memory():
    assembler = StepAssembler()
    for time in range(50_000):
        assembler.feed(Event("forward", "f", 0, 0, time, time + 1, {}))
    step = assembler.feed(Event("step", "train", 0, 0, 0, 50_000, {}))
    assert step is not None
    assert len(step.spans) <= 20_000
    assert step.spans[-1].t0 == 49_999


spans = st.lists(st.tuples(st.sampled_from(["forward", "backward", "collective"]), st.integers(-20, 120),
                           st.integers(1, 60), st.integers(0, 60)), max_size=12)


@given(spans)
def test_parts_equal_a_count_of_every_nanosecond(drawn):
    events = [Event(kind, "x", 0, 0, t0, t0 + length,
                    {"purpose": "grads", "exposed": min(exposed, length)} if kind == "collective" else {})
              for kind, t0, length, exposed in drawn]
    work, wait = np.zeros(300, bool), np.zeros(300, bool)
    for event in events:
        if event.kind == "collective":
            wait[event.t1 - event.attrs["exposed"] + 100:event.t1 + 100] = True
        else:
            work[event.t0 + 100:event.t1 + 100] = True
    inside = slice(100, 200)
    expected = (int((work & ~wait)[inside].sum()), int(wait[inside].sum()), int((~work & ~wait)[inside].sum()))
    assert Step(0, 0, 0, 100, events).split_ns() == expected
