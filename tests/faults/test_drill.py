"""The fault drill: whatever happens to a rank, its run ends in a right result or a named error, and leaves nothing."""

from __future__ import annotations

import json
from contextvars import ContextVar
from pathlib import Path

import pytest

from dplab.cli import main
from dplab.errors import UsageError
from dplab.wire import world
from dplab.workloads.drill import KINDS, Trial, drill
from dplab.workloads.faults import POINTS


def test_seeds_reach_every_kind_every_moment_and_every_rank() -> None:
    trials = [Trial.of(seed) for seed in range(100)]
    assert {trial.kind for trial in trials[:10]} == set(KINDS)
    assert {trial.point for trial in trials} == set(POINTS)
    assert {trial.rank for trial in trials} == {0, 1}
    assert {trial.restarts for trial in trials} == {0, 1}
    assert trials[0] == Trial.of(0)
    assert all(f"in the {trial.point} of step {trial.step + 1}, " in str(trial) for trial in trials)


@pytest.mark.parametrize("seed", range(10))
def test_a_trial_ends_as_it_must(seed: int, tmp_path: Path) -> None:
    outcome = next(drill([seed], root=tmp_path))
    if outcome.skipped:
        pytest.skip(outcome.skipped)
    assert outcome.problems == (), f"{outcome.trial}: {outcome.told}"


@pytest.mark.parametrize("seconds", ["soon", "0", "-1", "inf", "nan"])
def test_a_limit_that_is_none_is_refused(seconds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "_world", ContextVar("world", default=None))      # of no test before this one
    monkeypatch.setenv("DPLAB_TIMEOUT", seconds)
    with pytest.raises(UsageError, match=f"DPLAB_TIMEOUT='{seconds}' is not allowed; it is the seconds that a "
                                         f"collective waits for a rank, a number above 0"):
        world.init()


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPLAB_RUNS", str(tmp_path))
    assert main(["doctor", "--drill", "--races"]) == 2
    assert "doctor --drill lets runs of its own fail; leave RUN and --races out" in capsys.readouterr().err
    assert main(["doctor", "--drill", "--seeds", "1", "--json"]) == 0
    (trial,) = json.loads(capsys.readouterr().out)["trials"]
    assert trial["trial"]["kind"] == "kill"
    assert trial["problems"] == []


def test_a_seed_below_zero_is_refused() -> None:
    with pytest.raises(UsageError, match=r"drill\(seeds=\[-1, ...\]\) is not allowed; a seed is an integer >= 0"):
        next(drill([-1]))
