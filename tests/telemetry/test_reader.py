"""Reading a run while it is written: cursors, torn lines, ranks that appear, and files that are damaged."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dplab.errors import RunError
from dplab.specs import RunSpec
from dplab.telemetry import reader as reading
from dplab.telemetry.event_file import EventFile
from dplab.telemetry.events import Event
from dplab.telemetry.files import RESERVED_BYTES, write_json, write_reserved
from dplab.telemetry.process import Identity
from dplab.telemetry.reader import RunReader
from dplab.telemetry.rundir import RunDirectory


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create({"spec": RunSpec(function="m:f", world_size=2).to_dict(), "created": 0, "versions": {}}, 2)
    return directory


def append(directory: RunDirectory, rank: int, text: str) -> None:
    with open(directory.rank(rank) / "events.jsonl", "a", encoding="utf-8") as file:
        file.write(text)


def step(number: int, t1: int) -> Event:
    return Event("step", "train", 0, number, t1 - 1, t1, {})


def header(rank: int, monotonic: int = 0, wall: int = 0) -> str:
    return json.dumps({"schema": 1, "rank": rank, "monotonic": monotonic, "wall": wall}) + "\n"


def test_events_come_once_in_order_of_their_ends(directory: RunDirectory) -> None:
    reader = RunReader(directory.path)
    assert reader.poll() == []
    append(directory, 0, header(0) + step(0, 10).to_line() + "\n" + step(1, 30).to_line() + "\n")
    append(directory, 1, header(1) + step(0, 20).to_line() + "\n")
    assert [(event.rank, event.t1) for event in reader.poll()] == [(0, 10), (1, 20), (0, 30)]
    assert reader.poll() == []
    append(directory, 1, step(1, 40).to_line() + "\n")
    assert reader.poll() == [step(1, 40)._replace(rank=1)]
    assert [event.t1 for event in RunReader(directory.path).poll()] == [10, 20, 30, 40]


def test_a_torn_last_line_waits_until_it_is_whole(directory: RunDirectory) -> None:
    reader = RunReader(directory.path)
    whole = header(0) + step(0, 10).to_line() + "\n" + step(1, 20).to_line() + "\n"
    seen = []
    for character in whole:
        append(directory, 0, character)
        seen += reader.poll()
    assert seen == [step(0, 10), step(1, 20)]
    append(directory, 0, step(2, 30).to_line()[:9])  # its writer was killed here
    assert reader.poll() == []


def test_a_rank_that_joins_later(directory: RunDirectory) -> None:
    reader = RunReader(directory.path)
    assert reader.ranks == [0, 1]
    directory.rank(10).mkdir()
    append(directory, 10, header(10) + step(0, 10).to_line() + "\n")
    assert reader.ranks == [0, 1, 10]
    assert [event.rank for event in reader.poll()] == [10]


def test_supervisor_s_gauges_are_read_beside_the_rank_s_own(directory: RunDirectory) -> None:
    EventFile(directory.rank(1) / "utilization.jsonl", 1, sources={"cpu": {}}).write(
        [("gauge", "utilization", 4, 9, 9, {"cpu": 50.0})])
    reader = RunReader(directory.path)
    assert reader.poll() == [Event("gauge", "utilization", 1, 4, 9, 9, {"cpu": 50.0})]
    found = reader.header(1, file="utilization.jsonl")
    assert found is not None
    assert found["sources"] == {"cpu": {}}
    assert reader.header(1) is None


def test_spec_and_clock(directory: RunDirectory) -> None:
    append(directory, 0, header(0, monotonic=1_000, wall=5_000_001_000))
    reader = RunReader(directory.path)
    assert reader.spec == RunSpec(function="m:f", world_size=2)
    assert reader.wall_clock(step(0, 2_000_001_000)) == 7.000001
    with pytest.raises(RunError, match=r"rank 1 of .* has no header yet, so its clock has no anchor"):
        reader.wall_clock(step(0, 1)._replace(rank=1))
    assert reader.standing(0) is None


def test_a_damaged_line_is_named_and_cut_there_the_file_is_good(directory: RunDirectory) -> None:
    good = header(0) + step(0, 10).to_line() + "\n"
    append(directory, 0, good + "[1,2\n" + step(1, 20).to_line() + "\n")
    with pytest.raises(RunError, match=rf"events\.jsonl is damaged behind byte {len(good)}: b'\[1,2' is not an event; "
                                       rf"the lines before it are good, cut the file there to read them"):
        RunReader(directory.path).poll()
    os.truncate(directory.rank(0) / "events.jsonl", len(good))
    assert RunReader(directory.path).poll() == [step(0, 10)]


def test_a_line_that_is_damaged_behind_what_was_read_before_is_named_by_its_place_too(directory: RunDirectory) -> None:
    good = header(0) + step(0, 10).to_line() + "\n"
    append(directory, 0, good)
    reader = RunReader(directory.path, partial=True)
    assert reader.poll() == [step(0, 10)]
    append(directory, 0, step(1, 20).to_line() + "\n\r{\n")
    assert reader.poll() == [step(1, 20)]
    place = len(good) + len(step(1, 20).to_line()) + 1
    assert f"damaged behind byte {place}: b'\\r{{' is not an event" in str(reader.problem)


def test_a_file_without_a_header_and_a_newer_one(directory: RunDirectory) -> None:
    append(directory, 0, step(0, 10).to_line() + "\n")
    with pytest.raises(RunError, match="does not start with a header; it is not an event file of a run"):
        RunReader(directory.path).poll()
    (directory.rank(0) / "events.jsonl").write_text(header(0).replace('"schema": 1', '"schema": 99'))
    with pytest.raises(RunError, match="was written with schema 99, this dplab reads schema 1"):
        RunReader(directory.path).poll()


def test_a_newer_run_is_refused(directory: RunDirectory) -> None:
    write_json(directory.path / "run.json", {**directory.info(), "schema": 99, "versions": {"dplab": "9.9"}})
    with pytest.raises(RunError, match=r"was written with schema 99, this dplab reads schema 1; read it with the dplab "
                                       r"that wrote it \(9.9\)"):
        RunReader(directory.path)


def test_many_lines_are_parsed_like_single_ones(directory: RunDirectory) -> None:
    texts = ['a"],["b', "line\\n", "\u2028", "é"]
    events = [Event("log", "note", 0, 0, 1, 1, {"text": text, "nested": [["x"], ["y"]]}) for text in texts]
    append(directory, 0, header(0) + "".join(event.to_line() + "\n" for event in events))
    assert RunReader(directory.path).poll() == events
    assert reading.EVENT_FILES == ("events.jsonl", "utilization.jsonl")


def test_state_from_files_and_processes(directory: RunDirectory) -> None:
    me, gone = Identity.of(os.getpid()), Identity(os.getpid(), 1.0, "")
    assert me is not None
    write_json(directory.path / "starter.json", me)
    assert directory.state() == "starting"
    write_json(directory.path / "pids.json", {"supervisor": me, "ranks": []})
    assert directory.state() == "starting"
    write_json(directory.path / "pids.json", {"supervisor": me, "ranks": [me, me]})
    assert directory.state() == "running"
    directory.request_stop(5.0)
    directory.request_stop(9.0)  # a longer wait does not take back a shorter one
    assert directory.stop_request() == 5.0
    assert directory.state() == "stopping"
    write_json(directory.path / "pids.json", {"supervisor": gone, "ranks": [me]})  # the pid lives, in another process
    assert directory.state() == "failed"
    write_json(directory.path / "exit.json", {"state": "finished"})
    assert directory.state() == "finished"
    assert directory.vanished() is None


def test_texts_of_an_end_lose_their_middle_not_their_ends(directory: RunDirectory) -> None:
    path = directory.rank(0) / "error.json"
    text = "first line\n" + "é\n" * RESERVED_BYTES + "last line"
    write_reserved(path, {"type": "ValueError", "traceback": text, "message": "x" * RESERVED_BYTES})
    assert path.stat().st_size <= RESERVED_BYTES
    told = json.loads(path.read_text())
    assert told["type"] == "ValueError"
    assert told["traceback"].startswith("first line\n")
    assert told["traceback"].endswith("last line")
    assert "[...]" in told["traceback"]
    assert not list(directory.rank(0).glob(".*"))
    write_reserved(path, {"type": "second"})  # the space is used up: an ordinary file
    assert json.loads(path.read_text()) == {"type": "second"}


def test_identity_tells_a_process_from_its_successor() -> None:
    me = Identity.of(os.getpid())
    assert me is not None
    assert me.lives()
    assert Identity.from_list(json.loads(json.dumps(me))) == me
    assert not me._replace(created=me.created + 1).lives()
    assert not me._replace(boot="another").lives()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert Identity.of(pid) is None  # a zombie is not alive
    os.waitpid(pid, 0)
    assert Identity.of(pid) is None


@pytest.mark.parametrize("limit", [1, 100, 1000, 10**6])
def test_read_in_pieces_it_is_the_same_run(limit: int, directory: RunDirectory) -> None:
    """Ranks that say more than others (longer files) do not run ahead of them."""
    for rank, said in ((0, 1), (1, 4)):
        append(directory, rank, header(rank) + "".join(
            Event("log", "x", rank, at, 10 * at, 10 * at, {"text": "x" * said * 20}).to_line() + "\n"
            for at in range(200) for _ in range(said)))
    whole, reader, pieces = RunReader(directory.path).poll(), RunReader(directory.path), []
    while True:
        pieces.append(reader.poll(limit))
        if not reader.more:
            break
    events = [event for piece in pieces for event in piece]
    assert events == whole
    assert [event.t1 for event in events] == sorted(event.t1 for event in events)
    assert len(pieces) == 1 or max(map(len, pieces)) <= max(10, limit / 20)
