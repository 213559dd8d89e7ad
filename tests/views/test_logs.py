"""What ranks printed, in one order whatever the order in which their files are read."""

from __future__ import annotations

import random

from dplab.telemetry.events import Event
from dplab.views.logs import KEPT_LINES, LogPanel
from dplab.views.records import Log


def line(rank, time, text, stream="stdout"):
    return Event("log", stream, rank, 0, time, time, {"text": text})


def shown(panel):
    (mark,) = panel.chart().marks
    assert isinstance(mark, Log)
    return mark.lines


def test_lines_stand_in_the_order_in_which_they_were_printed():
    events = [line(time % 3, time, f"line {time}") for time in range(40)]
    for seed in range(20):
        polls = list(events)
        panel = LogPanel()
        rank_by_rank = sorted(polls, key=lambda event: (event.t0 // 10, random.Random(seed + event.rank).random()))
        for event in rank_by_rank:
            panel.feed(event)
        assert [text for _, _, text in shown(panel)] == [f"line {time}" for time in range(40)]


def test_the_newest_lines_are_kept_and_the_others_counted():
    panel = LogPanel()
    for time in range(KEPT_LINES + 50):
        panel.feed(line(0, time, str(time)))
    assert len(shown(panel)) == KEPT_LINES
    assert shown(panel)[-1] == (0, "stdout", str(KEPT_LINES + 49))
    assert panel.chart().value == f"the last {KEPT_LINES} of {KEPT_LINES + 50} lines"


def test_colours_and_progress_bars_and_control_characters():
    panel = LogPanel()
    for time, text in enumerate(["\x1b[31mred\x1b[0m", " 10 %\r 20 %\r 30 %", "a\tb\x07", "windows\r"]):
        panel.feed(line(0, time, text, "stderr"))
    assert [text for _, _, text in shown(panel)] == ["red", " 30 %", "a   b?", "windows"]


def test_logs_of_dplab_itself_are_not_the_program_s():
    panel = LogPanel()
    panel.feed(Event("log", "backend", 0, 0, 1, 1, {"text": "gloo"}))
    assert panel.chart().words == "nothing printed yet"
