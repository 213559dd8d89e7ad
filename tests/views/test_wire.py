"""What is sent beside what is predicted: by hand on a run that never happened, and on real ones."""

from __future__ import annotations

import pytest

import dplab
from dplab.telemetry.events import Event
from dplab.views.fold import Fold
from dplab.views.records import Text
from dplab.views.wire import ROLES
from tests.views.synthetic import MB, run_events, step_events

REDUCED, GATHERED = 3 * 4096 / 1e6, 4096 / 1e6      # MB of a synthetic step


def wire(strategy, world_size=2, events=None):
    fold = Fold(world_size, strategy)
    fold.feed(run_events(world_size, 3) if events is None else events)
    return fold.wire


def bars(chart):
    (mark,) = chart.marks
    return [(mark.names[int(lane)], mark.roles[int(kind)], start, end) for lane, kind, start, end in
            zip(mark.lane, mark.kind, mark.start, mark.end, strict=True)]


def test_bars_are_the_bytes_of_a_step_gradients_first():
    chart = wire("zero2").chart(1)
    half = 16 / 2                                    # (N-1)/N of the 16 MB of parameters that the gauge tells
    assert bars(chart) == [
        ("sent", "disagree", 0, pytest.approx(REDUCED)),
        ("sent", "disagree", pytest.approx(REDUCED), pytest.approx(REDUCED + GATHERED)),
        ("theory", "reduce", 0, half), ("theory", "gather", half, 2 * half)]
    assert chart.title == "Wire, rank 1"
    assert chart.value == "0.0164 MB sent, 16 predicted: they differ"
    assert chart.alert
    assert chart.note == ("0.0164 MB sent in a step (reduce_scatter 0.0123, all_gather 0.0041), "
                          "16 predicted (reduce_scatter 8, all_gather 8): all_gather and reduce_scatter not as "
                          "predicted")
    assert chart.marks[0].texts[-1] == "theory, all_gather: 8 MB"


@pytest.mark.parametrize(("strategy", "ranks", "predicted"), [
    ("ddp", 2, {"all_reduce": 16}), ("zero1", 4, {"reduce_scatter": 12, "all_gather": 12}),
    ("zero3", 2, {"reduce_scatter": 16, "all_gather": 32}),          # each rank holds a half of 32 MB
    ("zero2+bf16", 2, {"reduce_scatter": 8, "all_gather": 8}),       # 16 MB of two-byte weights
    ("zero2+accum4", 2, {"reduce_scatter": 32, "all_gather": 8}),
    ("ddp+wire=bf16", 2, {"all_reduce": 8}),
    ("zero2+hybrid+topology=2x2@10gbe", 4, {"reduce_scatter": 8, "all_reduce": 8, "all_gather": 8}),
    ("zero3+hybrid+topology=2x2@10gbe", 4, {"reduce_scatter": 16, "all_reduce": 16, "all_gather": 32})])
def test_theory_is_that_of_the_strategy(strategy, ranks, predicted):
    told = wire(strategy, ranks).predicted(0)
    assert {name: size / 1e6 for name, size in told.items() if size} == predicted


@pytest.mark.parametrize("strategy", [None, "zero9", "ddp+wire=powersgd4", "zero2+hybrid"])
def test_without_a_strategy_that_is_known_there_is_no_theory(strategy):
    chart = wire(strategy).chart(0)
    assert {bar[0] for bar in bars(chart)} == {"sent"}
    assert chart.value == "0.0164 MB sent in a step"


def test_emulated_links_are_named():
    assert wire("zero2+topology=2x1@10gbe").chart(0).title == "Wire, rank 0, emulated links"
    assert wire("zero2+topology=2x1@10gbe", events=[]).chart(0).title == "Wire, rank 0, emulated links"


def test_without_a_gauge_of_the_parameters_there_is_no_theory():
    events = [event for event in run_events(2, 3) if event.name != "memory"]
    assert wire("zero2", events=events).predicted(0) is None


def test_before_the_first_step_and_where_nothing_is_sent():
    (mark,) = wire("zero2", events=[]).chart(0).marks
    assert isinstance(mark, Text)
    assert mark.text == "no finished step on rank 0 yet"
    alone = [Event("gauge", "memory", 0, 0, 1, 1, {"params": MB}), *step_events(0, 0, sync=False)]
    chart = wire("zero2", 1, alone).chart(0)
    assert chart.words == "nothing is sent"


def test_roles_are_those_of_the_timeline_above():
    from dplab.views.sync import ROLES as TIMELINE

    assert set(ROLES) - {"disagree"} < set(TIMELINE)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "least"), [("ddp", 0.999), ("zero2+bf16", 0.999), ("zero3", 0.9),
                                                  ("ddp+wire=int8+topology=2x1@10gbe", 0.999)])
def test_a_real_run_sends_what_is_predicted(strategy, least, tmp_path):
    """ZeRO-3 a little less: its root unit stays gathered after its forward."""
    run = dplab.launch("dplab.workloads.train:train", world_size=2, strategy=strategy, root=tmp_path, detach=False,
                       kwargs={"steps": 3, "batch_size": 1})
    run.wait()
    panel = wire(strategy, events=list(run.events()))
    for rank in range(2):
        sent = sum(end - start for name, _, start, end in bars(panel.chart(rank)) if name == "sent")
        predicted = sum(panel.predicted(rank).values()) / 1e6
        assert least < sent / predicted < 1.000001
        assert (sent / predicted < 0.99) == (strategy == "zero3")


@pytest.mark.parametrize(("strategy", "predicted"), [
    ("ddp", {"all_reduce": 4}), ("zero2", {"reduce_scatter": 2, "all_gather": 2}),
    ("zero3", {"reduce_scatter": 4, "all_gather": 32})])
def test_what_is_frozen_is_not_predicted_to_be_reduced(strategy, predicted):
    """A quarter of 16 MB is trained; ZeRO-3, of 32 MB, gathers the others as well."""
    buckets = [{"slots": [("a", 700), ("b", 50)], "itemsize": 4, "trainable": False},
               {"slots": [("c", 250)], "itemsize": 4, "trainable": True}]
    layout = Event("gauge", "layout", 0, 0, 1, 1, {"shard": (0, 2), "buckets": buckets, "sharding": {}})
    told = wire(strategy, 2, [layout, *run_events(2, 3)]).predicted(1)
    assert {name: size / 1e6 for name, size in told.items() if size} == pytest.approx(predicted)


@pytest.mark.parametrize("buckets", [[{"slots": 3}], [None], 7, []])
def test_a_layout_that_is_not_understood_counts_all_as_trained(buckets):
    layout = Event("gauge", "layout", 0, 0, 1, 1, {"buckets": buckets})
    assert wire("ddp", 2, [layout, *run_events(2, 3)]).predicted(0)["all_reduce"] == 16 * MB


def half_frozen():
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))
    model[0].requires_grad_(False)
    engine = dplab.parallelize(model, torch.optim.AdamW)
    for _ in range(2):
        engine.backward(engine(torch.ones(4, 256)).square().mean())
        engine.step()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_a_real_run_that_trains_half_of_its_model_agrees_with_theory(strategy, tmp_path):
    run = dplab.launch(half_frozen, world_size=2, strategy=strategy, root=tmp_path, detach=False)
    run.wait()
    chart = wire(strategy, events=list(run.events())).chart(0)
    assert not chart.alert, chart.note
