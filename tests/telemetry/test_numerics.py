"""The numerics lens: units in the last place, first differences, first broken gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from torch import nn

import dplab
from dplab.errors import RunError, UsageError
from dplab.telemetry.numerics import FARTHEST, ulps
from tests.worlds import in_threads


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_ulps_count_the_numbers_between(dtype: Any) -> None:
    one = dtype(1)
    above = np.nextafter(one, dtype(2))
    a = np.array([1, 1, 0.0, -0.0, -1, np.nan, np.nan, np.inf, 0], dtype=dtype)
    b = np.array([1, above, -0.0, 0.0, -above, np.nan, 1, np.finfo(dtype).max, np.finfo(dtype).smallest_subnormal],
                 dtype=dtype)
    assert ulps(a, b).tolist() == [0, 1, 0, 0, 1, 0, FARTHEST, 1, 1]
    tiny = np.finfo(dtype).smallest_subnormal
    assert ulps(np.array([-tiny]), np.array([tiny])).tolist() == [2]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.sum()


def recorded(folder: Path, nudge: int | None) -> None:
    engine = dplab.parallelize(Net(), lambda ps: torch.optim.SGD(ps, lr=0.1), "zero3")
    lens = dplab.Lens(engine, folder)
    for step in range(4):
        engine.backward(engine(torch.full((1, 5), step + 1.0)))
        engine.step()
        if step == nudge:
            with engine.gathered() as module, torch.no_grad():
                weight = module.layers[1].bias
                weight[2] = torch.nextafter(weight[2], torch.tensor(9.0))
        lens.record()


def test_the_first_difference_has_a_step_a_name_and_a_size(tmp_path: Path) -> None:
    for name, nudge in (("a", None), ("b", None), ("c", 2)):
        in_threads(1, recorded, tmp_path / name, nudge)
    same = dplab.compare_runs(tmp_path / "a", tmp_path / "b")
    assert same.identical
    assert same.first is None
    assert str(same) == "4 steps, 4 parameters: equal to the bit"
    other = dplab.compare_runs(tmp_path / "a", tmp_path / "c")
    assert not other.identical
    assert other.first is not None
    assert other.first[:3] == (3, "layers.1.bias", 1)
    assert other.largest is not None
    assert other.largest.step == 4
    assert str(other).startswith("they differ from step 3 on, there most in layers.1.bias: 1 ulp (")


def test_a_heat_map_leaves_equal_weights_blank(tmp_path: Path) -> None:
    from dplab.views.numerics import heat_map, shade

    for name, nudge in (("a", None), ("b", 2)):
        in_threads(1, recorded, tmp_path / name, nudge)
    root = ElementTree.fromstring(heat_map(dplab.compare_runs(tmp_path / "a", tmp_path / "b"), "a < b"))
    space = "{http://www.w3.org/2000/svg}"
    cells = {rect[0].text: rect.get("fill") for rect in root.iter(f"{space}rect") if len(rect)}
    assert len(cells) == 4 * 4
    assert {text for text, fill in cells.items() if fill != "none" and "step 3" in text} == {
        "layers.1.bias, step 3: 1 ulp"}
    assert all(fill == "none" for text, fill in cells.items() if "step 1" in text or "step 2" in text)
    assert "a < b" in [text.text for text in root.iter(f"{space}text")]
    assert [text.text + text[0].text for text in root.iter(f"{space}text") if len(text)] == [
        "20", "26", "212", "218", "224", "230"]      # powers of two, the exponent raised
    assert len({shade(64**power) for power in range(6)}) == 6
    assert shade(0) is None
    assert shade(FARTHEST) == shade(64**5)


def test_what_was_not_recorded_is_told(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"holds no recorded weights; make a dplab.Lens\(engine\) in the program"):
        dplab.compare_runs(tmp_path, tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    np.savez(tmp_path / "a" / "step-0.npz", w=np.zeros(2))
    np.savez(tmp_path / "b" / "step-1.npz", w=np.zeros(2))
    with pytest.raises(RunError, match="have no recorded step in common; run both for as many steps"):
        dplab.compare_runs(tmp_path / "a", tmp_path / "b")
    np.savez(tmp_path / "b" / "step-0.npz", w=np.zeros(3))
    with pytest.raises(RunError, match="have no parameter of one name and shape in common"):
        dplab.compare_runs(tmp_path / "a", tmp_path / "b")


def stepping(lens: bool, folder: str | None = None) -> None:
    """What a launched rank runs: one step, watched or not."""
    engine = dplab.parallelize(Net(), lambda ps: torch.optim.SGD(ps, lr=0.1))
    watching = dplab.Lens(engine, folder) if lens else None
    engine.backward(engine(torch.ones(1, 5)))
    engine.step()
    if watching is not None:
        watching.record()


def test_runs_are_found_as_attach_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPLAB_RUNS", str(tmp_path / "runs"))
    run = dplab.launch(stepping, args=(True,), detach=False)
    run.wait(60)
    assert dplab.not_finite(run.id) == dplab.not_finite(run.id[:8]) == dplab.not_finite(run.path) == []
    assert dplab.compare_runs(run.id, run.id[:8]).identical
    for call in (lambda: dplab.not_finite("2001"), lambda: dplab.compare_runs("2001", run)):
        with pytest.raises(RunError, match="have an id that starts with '2001'; `dplab runs` lists them") as told:
            call()
        with pytest.raises(RunError) as attached:
            dplab.attach("2001")
        assert str(told.value) == str(attached.value)
    with pytest.raises(UsageError, match="not_finite was given a int; give a run's directory or id"):
        dplab.not_finite(3)


def test_gradients_that_nothing_watched_are_not_called_finite(tmp_path: Path) -> None:
    blind = dplab.launch(stepping, args=(False,), detach=False)
    blind.wait(60)
    with pytest.raises(RunError, match=r"no gradient of run .* was watched.*; make a dplab.Lens\(engine\)"):
        dplab.not_finite(blind)
    elsewhere = dplab.launch(stepping, args=(True, str(tmp_path)), detach=False)
    elsewhere.wait(60)
    assert dplab.not_finite(elsewhere) == []


def test_a_lens_outside_a_run_needs_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DPLAB_RUN_DIR", raising=False)
    engine = dplab.parallelize(nn.Linear(2, 2), torch.optim.SGD)
    with pytest.raises(UsageError, match=r"Lens needs a place to keep the weights: launch the program with"):
        dplab.Lens(engine)


def breaking(steps: int) -> None:
    """What a launched rank runs: on rank 1 a gradient breaks in the third step, in the first layer."""
    world = dplab.init()
    engine = dplab.parallelize(Net(), lambda ps: torch.optim.SGD(ps, lr=0.1), "zero2+amp-fp16")
    lens = dplab.Lens(engine)
    for step in range(steps):
        x = torch.ones(1, 5)
        if step == 2 and world.rank == 1:
            x[0, 3] = float("inf")
        engine.backward(engine(x).float() * 0.01)  # or the first scale of 65536 overflows fp16 by itself
        if engine.step():
            lens.record()


def test_the_first_broken_gradient_is_found_by_rank_step_and_name() -> None:
    run = dplab.launch(breaking, world_size=2, args=(4,), detach=False)
    run.wait(timeout=60)
    broken = dplab.not_finite(run)
    assert {(found.step, found.rank) for found in broken} == {(3, 1)}
    assert broken[0].parameter.startswith("layers.")
    assert broken[0].what in ("NaN", "infinite")
    scales = [(e.step, e.attrs["value"]) for e in run.events() if e.name == "loss_scale" and e.rank == 0]
    assert scales == [(0, 65536.0), (1, 65536.0), (2, 32768.0), (3, 32768.0)]
    assert dplab.compare_runs(run, run).identical
    assert dplab.compare_runs(run, run).steps == [1, 2, 4]
