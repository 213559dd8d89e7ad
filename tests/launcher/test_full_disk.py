"""A disk that is full at the launch, and one that fills up under way: one clear sentence, nothing left running."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import rank_programs

import dplab
from dplab.errors import RankFailed, RunError

pytestmark = pytest.mark.root


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of two megabytes."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m,mode=0700", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small file system can only be mounted as root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    handle = os.open(folder / "filler", os.O_WRONLY | os.O_CREAT)
    with contextlib.suppress(OSError):
        while os.write(handle, bytes(4096)):
            pass
    os.close(handle)


def test_launch_on_a_full_disk(small_disk: Path) -> None:
    fill(small_disk)
    with pytest.raises(RunError) as caught:
        dplab.launch(rank_programs.place, root=small_disk / "runs", detach=False)
    assert "cannot be made: No space left on device; free space or allow writing there" in str(caught.value)
    assert not list(small_disk.glob("runs/*"))


def test_arguments_larger_than_the_disk(small_disk: Path) -> None:
    with pytest.raises(RunError, match=r"the function and its arguments \(\d+ bytes\) cannot be written to \S+: No "
                                       r"space left on device; free space there, pass less"):
        dplab.launch(print, args=(os.urandom(4_000_000),), root=small_disk / "runs", detach=False)
    assert not list(small_disk.glob("runs/*"))


def test_disk_fills_up_under_way(small_disk: Path) -> None:
    run = dplab.launch(rank_programs.record_megabytes, root=small_disk / "runs", detach=False)
    with pytest.raises(RankFailed) as caught:
        run.wait(60)
    message = str(caught.value)
    assert message.startswith("rank 0 of 1 failed before its first step was done: dplab.errors.RunError: "
                              "rank 0 cannot write its events to ")
    assert "events.jsonl: the disk is full; free space there, or set DPLAB_RUNS to a folder on another disk" in message
    assert len(run.events()) > 500  # every whole line that fitted
    assert run.state == "failed"


def test_result_larger_than_the_disk(small_disk: Path) -> None:
    run = dplab.launch(os.urandom, args=(3_000_000,), root=small_disk / "runs", detach=False)
    with pytest.raises(RankFailed, match=r"rank 0 cannot write its result of \d+ bytes to \S+: No space left on"):
        run.wait(60)
    assert not list(run.path.glob("rank-0/result.*"))
