"""The statistics and the table of `compare`, against answers that are known."""

from __future__ import annotations

import random
import re

import pytest

from dplab.commands.compare import _table, paired_ratio

ROW = {"strategy": "ddp", "ratio": {"median": 1.2, "low": 1.1, "high": 1.3}, "sync_ms_median": None, "steps": 8,
       "warm_up_steps": 2, "wire": {"init": {"bytes": 5}, "all_reduce": {"bytes": 20_000_000}}, "loss_last": 2.0,
       "step_ms_median": 100.0, "tokens_per_s": 5.0, "peak_total_bytes": 3e8}


def test_a_systems_ratio_to_itself_is_one():
    times = [random.Random(0).uniform(50, 150) for _ in range(10)]
    assert paired_ratio(times, times) == {"median": 1, "low": 1, "high": 1}


def test_pairing_takes_out_a_drifting_machine():
    drift = [50 + 20 * index for index in range(12)]
    noise = random.Random(1)
    ratio = paired_ratio([1.3 * base * noise.uniform(0.98, 1.02) for base in drift], [float(base) for base in drift])
    assert ratio["low"] <= ratio["median"] <= ratio["high"]
    assert ratio["low"] < 1.3 < ratio["high"] < 1.35
    assert ratio["low"] > 1.25


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    noise, hits, trials = random.Random(2), 0, 200
    for _ in range(trials):
        base = [noise.gauss(100, 3) for _ in range(15)]
        ratio = paired_ratio([1.1 * noise.gauss(100, 3) for _ in base], base, draws=400)
        hits += ratio["low"] <= 1.1 <= ratio["high"]
    assert 0.88 <= hits / trials <= 1.0


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_too_few_blocks_have_no_interval(blocks):
    ratio = paired_ratio([120.0] * blocks, [100.0] * blocks)
    assert ratio == {"median": pytest.approx(1.2), "low": None, "high": None}
    text = _table([{**ROW, "ratio": ratio}], "tokens")
    assert "paired ratio to ddp  " in text.splitlines()[0]
    assert text.splitlines()[1].split()[:4] == ["ddp", "100.0", "1.200", "-"]
    assert text.splitlines()[2].startswith("too few blocks for an interval: give at least 6")


def test_six_blocks_have_one():
    assert paired_ratio([120.0] * 6, [100.0] * 6) == pytest.approx({"median": 1.2, "low": 1.2, "high": 1.2})


def test_every_column_is_explained_by_its_name():
    head, *rest = _table([ROW], "tokens").splitlines()
    columns = [name for name in re.split(r"  +", head.replace(" to ddp [95 %]", "")) if name]
    explained = [re.split(r"  +", line.strip())[0] for line in rest if re.match(r"  \S", line)]
    assert explained == columns[1:]


def test_the_table_says_how_it_is_to_be_read():
    head, line, _, *notes = _table([ROW], "samples").splitlines()
    assert head.split("  ")[0] == "system"
    assert "paired ratio to ddp [95 %]" in head
    assert "MB, all ranks" in head
    assert "samples/s" in head
    assert line.split() == ["ddp", "100.0", "1.200", "[1.100,", "1.300]", "-", "5", "2.0000", "300", "2.00"]
    told = " ".join(" ".join(notes).split())
    assert "median of the ratios of paired blocks, with the 95 % interval of that median" in told
    assert "may differ from the ratio of the two step times beside it" in told
    assert "mean over ranks; 6 steps to warm up come before those that count" in told
