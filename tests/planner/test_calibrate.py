"""Calibration: what the figures of a run become, where they lie, and what a prediction makes of them."""

from __future__ import annotations

import json
import stat
from dataclasses import replace

import numpy as np
import pytest

import dplab
from dplab.errors import UsageError
from dplab.planner import calibrate, compute, configs, cost, machine, search
from dplab.planner.hardware import cluster, of_machine
from dplab.planner.machine import DEFAULT, Machine, Pace, on_curve
from dplab.planner.recipes import RECIPES
from dplab.planner.single import predict
from dplab.planner.split import Split

RATE, COPY, WIRE, LATENCY = 50e9, 10e9, 2e9, 1e-4
"""A machine whose every figure is known: FLOPs, bytes and bytes a second, seconds."""
PACE = {"layer_forward": 2.0, "layer_backward": 1.5, "ends_forward": 1.2, "ends_backward": 3.0}
FIXED = 3e-4


@pytest.fixture(autouse=True)
def data_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "data"


def repeated(seconds):
    """Repetitions of which one in eight was disturbed."""
    return [seconds] * 7 + [9 * seconds]


def figures(backend="gloo", contention=0.25):
    """What the ranks of such a machine would report."""
    gemm = {"fp32": [[flops, flops / RATE] for flops in (1e5, 1e9)]}
    passes = []
    for micro_batch in (1, 4):
        alone = compute.alone(configs.model("bench-gpt"), Split(micro_batch=micro_batch), RECIPES["dplab"], gemm=gemm,
                              copy=COPY)
        taken = {name: FIXED + PACE[name] * float(seconds) for name, seconds in alone.items()}
        passes += [{"micro_batch": micro_batch, "layers": layers, **{
            way: repeated(layers * taken[f"layer_{way}"] + taken[f"ends_{way}"]) for way in ("forward", "backward")}}
            for layers in (1, 3)]
    sizes = (1e4, 1e6, 1e8)
    return {"backend": backend, "ranks": 2, "torch": "2.13", "threads": 1,
            "gemm": {"fp32": [{"flops": flops, "seconds": repeated(taken)} for flops, taken in gemm["fp32"]]},
            "copy": {"bytes": 1e8, "seconds": repeated(1e8 / COPY)}, "units": {"passes": passes, "saved_bytes": 7000},
            "optimizer": [{"parameters": count, "seconds": repeated(1e-3 + 4e-9 * count)} for count in (1e5, 1e6)],
            "wire": {name: [{"bytes": size, "seconds": repeated(LATENCY + size / WIRE)} for size in sizes]
                     for name in ("all_reduce", "reduce_scatter", "all_gather")},
            "overlap": {"compute": repeated(0.1), "wire": repeated(0.02), "both": repeated(0.1 + 0.02 * contention)}}


def known(**changes):
    return replace(calibrate.assemble([figures()], load=2.0, date="2026-01-01"), **changes)


def test_figures_come_back_from_noisy_repetitions():
    made = known()
    assert made.copy == pytest.approx(COPY)
    assert made.optimizer == Pace(fixed=pytest.approx(1e-3), factor=pytest.approx(4e-9))
    assert {name: pace.factor for name, pace in made.paces.items()} == pytest.approx(PACE)
    assert [pace.fixed for pace in made.paces.values()] == pytest.approx([FIXED] * 4)
    assert made.contention == {"gloo": pytest.approx(0.25)}
    assert made.saved == 7000 + 4 * 128 * 256
    assert float(made.collective("gloo", "all_reduce", 1e6, 2)) == pytest.approx(LATENCY + 1e6 / WIRE)
    assert made.spread == pytest.approx(0)
    assert not made.busy
    assert known(load=5.0).busy
    assert str(known(load=5.0)).endswith("the machine was busy: calibrate again when it is quiet")


def test_what_a_hidden_collective_costs_is_between_nothing_and_all_of_it():
    assert machine.share_lost([1.0, 1.0, 9.0], [0.2, 0.2, 0.2], [1.1, 1.1, 1.1]) == pytest.approx(0.5)
    assert machine.share_lost([1.0], [0.1], [0.5]) == 0
    assert machine.share_lost([1.0], [0.1], [2.0]) == 1


def test_curves_are_straight_between_points_and_at_the_last_rate_above():
    curve = [[1e3, 1e-5], [1e6, 1e-3]]
    assert float(on_curve(curve, 1.0)) == pytest.approx(1e-5)
    assert float(on_curve(curve, 10**4.5)) == pytest.approx(1e-4)
    assert on_curve(curve, np.array([1e6, 4e6])) == pytest.approx([1e-3, 4e-3])


def test_a_pace_that_would_cost_less_than_nothing_goes_through_the_origin():
    assert Pace.through([(1.0, 1.0), (2.0, 3.0)]) == Pace(fixed=0.0, factor=1.5)
    assert Pace.through([(1.0, 2.0), (2.0, 1.0)]) == Pace(fixed=0.0, factor=0.5)


def test_the_simulated_step_adds_up():
    """DDP on a wire that hides nothing: passes, all collectives, AdamW."""
    made = known(contention={"gloo": 1.0})
    place = of_machine(made)
    plan = predict("bench-gpt", place, "ddp", micro_batch=4)
    profile, split = configs.model("bench-gpt"), Split(dp=2, micro_batch=4)
    passes = cost.pieces(profile, split, place, RECIPES["dplab"])
    compute_s = float(passes.layers.total + passes.head.total)
    bare = compute_s + float(made.optimizer.at(profile.parameters))
    sent = sum(event.t1 - event.t0 for event in plan.timeline().events if event.kind == "collective") / 1e9
    assert bare + 4 * profile.parameters / WIRE <= plan.step <= bare + sent + 1e-9
    alone = compute.alone(profile, split, RECIPES["dplab"], gemm=made.gemm, copy=made.copy)
    told = sum(FIXED + PACE[name] * float(seconds) * 1 for name, seconds in alone.items() if name.startswith("ends"))
    told += 4 * sum(FIXED + PACE[name] * float(alone[name]) for name in alone if name.startswith("layer"))
    assert compute_s == pytest.approx(told)


def test_it_is_stored_for_its_user_alone_and_found_again(data_folder):
    assert machine.load() is DEFAULT
    target = machine.store(known())
    assert target.is_relative_to(data_folder)
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert stat.S_IMODE(target.parent.stat().st_mode) == 0o700
    back = machine.load()
    assert (back.calibrated, back.paces, back.wire) == (True, known().paces, known().wire)
    assert "calibrated" in str(cluster("this-machine"))
    assert cluster("this-machine").contention == pytest.approx(0.25)


def test_without_a_calibration_defaults_stand_with_wider_bars():
    plans = search.plan("tiny-gpt", "this-machine", 2048)
    assert "not calibrated" in str(plans.cluster)
    assert plans.cluster.gpu.measured.error == 1.0 > known().error == 0.15
    assert "a step may be off by 100%; run dplab calibrate" in str(DEFAULT)


@pytest.mark.parametrize("damage", [
    lambda values: values.update(schema=9), lambda values: values.pop("paces"), lambda values: values.update(copy=-1.0),
    lambda values: values["gemm"].update(fp32=[[1, 2], [0, 3]]), lambda values: values.update(wire=3)])
def test_a_damaged_calibration_is_refused_in_one_sentence(damage):
    target = machine.store(known())
    values = json.loads(target.read_text())
    damage(values)
    target.write_text(json.dumps(values))
    with pytest.raises(UsageError, match=r"^the calibration '.*' cannot be used: .*; delete it or run dplab calib"):
        machine.load()


def test_a_calibration_that_is_no_json_is_refused():
    target = machine.store(known())
    target.write_text("{")
    with pytest.raises(UsageError, match=r"cannot be used: .*is not JSON.*; delete it or run dplab calibrate$"):
        machine.load()


def test_it_says_where_it_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    with pytest.raises(UsageError, match=r"cannot be written to .*; set XDG_DATA_HOME to a folder that you may write"):
        machine.store(known())


@pytest.mark.parametrize(("call", "message"), [
    (lambda: dplab.calibrate(quick=3), r"calibrate\(quick=3\) is not allowed; quick is True or False"),
    (lambda: dplab.calibrate(backends=["nccl"]), r"calibrate\(backends=\['nccl'\]\) is not allowed; it measures"),
    (lambda: dplab.calibrate(backends=[]), r"calibrate\(backends=\[\]\) is not allowed"),
    (lambda: cluster("this-machine:shm"), r"the wire 'shm' was not measured on this-machine; use gloo, or run"),
    (lambda: cluster("9999xthis-machine"), r"9999 ranks on this-machine cannot be predicted; it has \d+ cores"),
    (lambda: cluster("this-machine", network="1GB/s"), r"is one node, whose wire is measured; leave network"),
    (lambda: predict("tiny-gpt", "this-machine", "ddp", micro_batch=0), r"predict\(micro_batch=0\) is not allowed"),
])
def test_bad_input(call, message):
    with pytest.raises(UsageError, match=message):
        call()


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_predicted_categories_are_those_of_the_ledger(strategy):
    """bench-gpt, 4 samples, against what engine.memory() and the unshard events of a run said (MB)."""
    plan = predict("bench-gpt", of_machine(known()), strategy, micro_batch=4)
    sizes = {name: value / 1e6 for name, value in plan.memory.to_dict().items()}
    cut = ["ddp", "zero1", "zero2", "zero3"].index(strategy)
    assert sizes["optimizer"] == pytest.approx(59.09 / (2 if cut >= 1 else 1), rel=0.01)
    assert sizes["grads"] == pytest.approx(29.55 / (2 if cut >= 2 else 1), rel=0.01)
    assert sizes["params"] == pytest.approx(29.55 / (2 if cut >= 3 else 1), rel=0.01)
    assert sizes["buckets"] == pytest.approx(16.78 if cut >= 2 else 0, rel=0.01)


@pytest.mark.slow
def test_two_ranks_measure_this_machine(data_folder):
    made = dplab.calibrate(quick=True, backends=["gloo"])
    assert made == machine.load() or made.to_dict() == machine.load().to_dict()
    assert isinstance(made, Machine)
    assert made.ranks == 2
    assert set(made.gemm) == {"fp32", "bf16"}
    assert set(made.wire["gloo"]) == {"all_reduce", "reduce_scatter", "all_gather"}
    assert 0 <= made.contention["gloo"] <= 1
    # a layer of the benchmark GPT keeps 16 fp32 copies of its tokens and 4 bytes a head and token
    assert made.saved == pytest.approx(4 * 128 * (16 * 256 + 8), rel=0.05)
    plan = dplab.plan("bench-gpt", "this-machine", 2048)
    assert {(item.split.dp, item.split.tp, item.precision) for item in plan.plans} == {(2, 1, "fp32")}
