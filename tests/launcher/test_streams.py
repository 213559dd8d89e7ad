"""What Python prints is in the rank's file as ever, and line by line in its events."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import rank_programs

import dplab
from dplab.launcher import streams
from dplab.telemetry import recorder
from dplab.telemetry.recorder import Recorder


class Kept(Recorder):
    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def span(self, kind: str, name: str, t0: int, t1: int, **attrs: object) -> None:
        assert (kind, t0) == ("log", t1)
        self.lines.append((name, str(attrs["text"])))


@pytest.fixture
def kept() -> Iterator[Kept]:
    before = recorder._of_thread.set(made := Kept())
    yield made
    recorder._of_thread.reset(before)


def stream(path: Path, name: str = "stdout") -> streams.Printed:
    return streams.Printed(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), name)


def test_whole_lines_become_events_and_everything_is_in_the_file(tmp_path: Path, kept: Kept) -> None:
    out = stream(tmp_path / "out")
    print("one", file=out)
    out.write("two, ")
    out.write("still two\nthree\nopen")
    assert kept.lines == [("stdout", "one"), ("stdout", "two, still two"), ("stdout", "three")]
    out.flush()
    assert (tmp_path / "out").read_text() == "one\ntwo, still two\nthree\nopen"


def test_a_program_that_prints_without_end_has_its_last_word_that_says_where(tmp_path: Path, kept: Kept,
                                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "LINES", 3)
    out = stream(tmp_path / "out", "stderr")
    for number in range(10):
        print(number, file=out)
    assert [text for _, text in kept.lines] == ["0", "1", "(line 3; from here on see stderr.log)"]
    assert (tmp_path / "out").read_text().count("\n") == 10


def test_a_line_without_end_costs_no_memory(tmp_path: Path, kept: Kept) -> None:
    out = stream(tmp_path / "out")
    for _ in range(100):
        out.write("x" * 1000)
    out.write("\n")
    assert [len(text) for _, text in kept.lines] == [streams.LETTERS]


def test_lines_of_real_ranks_are_in_the_events_of_the_run() -> None:
    run = dplab.launch(rank_programs.speak, world_size=2, detach=False)
    run.wait(60)
    told = {(event.rank, event.name, event.attrs["text"]) for event in run.events() if event.kind == "log"}
    for rank in range(2):
        printed = run.logs(rank)
        lines = {text for of, name, text in told if of == rank and name in ("stdout", "stderr")}
        assert lines
        assert all(line in printed for line in lines)
