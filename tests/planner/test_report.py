"""The report: up to date, honest about what it used, and within what the planner promises."""

from __future__ import annotations

import json

import pytest

from dplab.cli import main
from dplab.planner import published, report
from dplab.planner.scoring import Family, Row, score
from dplab.resources import DATA, folder


@pytest.fixture(scope="module")
def told():
    return score()


def test_the_page_is_up_to_date(told):
    """Made anew with `dplab plan --report > data/published/REPORT.md`."""
    assert (folder(DATA) / "published" / "REPORT.md").read_text() == report.markdown(told)


def test_the_command_prints_it(capsys, told):
    assert main(["plan", "--report"]) == 0
    assert capsys.readouterr().out == report.markdown(told)
    assert main(["plan", "--report", "--json"]) == 0
    assert {"families", "regrets", "verdicts", "unused"} == set(json.loads(capsys.readouterr().out))


def test_every_case_is_used_once_or_left_out_with_a_reason(told):
    used = [row.case.id for family in told.families for row in family.rows]
    left = [name for ids in told.unused.values() for name in ids]
    verdicts = [verdict.case.id for verdict in told.verdicts if verdict.case.unit == "feasibility"]
    assert sorted(used + left + verdicts) == sorted(case.id for case in published.cases())
    assert len(used) > 280
    assert all(case.source for case in published.cases())
    readme = (folder(DATA).parent / "README.md").read_text()
    assert f"measured against {len(used)} published results" in readme


def test_formulas_come_out_as_printed(told):
    assert told.family("formulas of papers").mape < 0.005


def test_memory_of_measured_peaks(told):
    for family in told.families:
        if family.kind == "memory":
            assert family.mape < 0.10, family.name
    peaks = [abs(row.error) for family in told.families if family.kind == "memory" for row in family.rows]
    assert sum(peaks) / len(peaks) < 0.06


def test_step_times(told):
    times = [family for family in told.families if family.kind == "time"]
    assert len(times) == 18
    for family in times:
        assert family.mape < 0.20, family.name
        assert family.calibrated < 0.15, family.name
        assert family.left_out is None or family.left_out < 0.16, family.name


def test_advice(told):
    for regret in told.regrets:
        assert regret.first < 0.10, regret.name
        assert regret.third < 0.05, regret.name
    assert sum(regret.layouts for regret in told.regrets) > 40


def test_what_fits(told):
    wrong = [verdict for verdict in told.verdicts if not verdict.right]
    assert not [verdict.case.id for verdict in wrong if not verdict.fits], "said to fit, and did not"
    assert len(wrong) < 0.02 * len(told.verdicts)


def test_errors_are_worked_out_by_hand():
    case = published.case("zb-thr-1.5B-m24-1F1B")
    rows = [Row(case=published.case(name), measured=1.0, predicted=predicted) for name, predicted in (
        ("zb-thr-1.5B-m24-1F1B", 1.2), ("zb-thr-1.5B-m32-1F1B", 1.2), ("zb-thr-28.3B-m96-1F1B", 0.9))]
    family = Family(name="x", kind="time", rows=tuple(rows))
    assert family.mape == pytest.approx((0.2 + 0.2 + 0.1) / 3)
    assert family.bias == 1.2
    assert family.calibrated == pytest.approx((0 + 0 + 0.25) / 3)
    assert family.left_out == pytest.approx((2 * (1.2 / 0.9 - 1) + 0.25) / 3)
    assert case.stem == "zb"
