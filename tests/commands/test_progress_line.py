"""The line that tells progress, in a log: what came last stands there, whatever the rhythm of the calls."""

from __future__ import annotations

import pytest

from dplab.commands.train import ProgressLine


@pytest.mark.parametrize("calls", range(1, 45))
@pytest.mark.parametrize("changes_at", [0, 1, 19, 20, 21, 40])
def test_the_last_text_is_printed_once(calls, changes_at, capsys):
    line = ProgressLine()
    for call in range(calls):
        line.show("step 0" if call < changes_at else "step 3/3")
    line.end()
    err = capsys.readouterr().err.splitlines()
    assert err[-1] == ("step 3/3" if calls > changes_at else "step 0")
    assert len(err) == len(set(err))


def test_a_line_that_was_never_shown_ends_in_nothing(capsys):
    ProgressLine().end()
    assert capsys.readouterr().err == ""


def test_in_a_terminal_every_text_replaces_the_last(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    line = ProgressLine(log_every=1)
    line.show("block 1")
    line.rewrite("block 1: ddp")
    line.end()
    assert capsys.readouterr().err == "\r\x1b[Kblock 1\r\x1b[Kblock 1: ddp\n"


def test_a_log_keeps_what_is_shown_and_not_what_is_rewritten(capsys):
    line = ProgressLine(log_every=1)
    line.show("block 1")
    line.rewrite("block 1: ddp")
    line.show("block 2")
    line.end()
    assert capsys.readouterr().err == "block 1\nblock 2\n"
