"""The ownership map against a count, element by element, of what each strategy says that a rank holds."""

from __future__ import annotations

import numpy as np
import pytest

import dplab
from dplab.layout import FlatLayout
from dplab.telemetry.events import Event
from dplab.views.fold import Fold
from dplab.views.ownership import ROLES, ROWS, SHOWN, OwnershipPanel

TENSORS = [[("a.weight", 300), ("a.bias", 20)], [("b.weight", 1000)]]
PLACED = {"ddp": ("replicated",) * 3, "zero1": ("replicated", "replicated", "sharded"),
          "zero2": ("replicated", "sharded", "sharded"), "zero3": ("sharded",) * 3}


def panel(strategy, ranks=2):
    shards = 1 if strategy == "ddp" else ranks
    made = OwnershipPanel()
    for rank in range(ranks):
        told = {"shard": [rank % shards, shards], "replicate": [0, 1], "limit": 10**9, "limit_of": "host, all ranks"}
        if rank == 0:
            told |= {"sharding": dict(zip(("params", "grads", "optim"), PLACED[strategy], strict=True)),
                     "buckets": [{"slots": slots, "itemsize": 4, "trainable": True} for slots in TENSORS]}
        made.feed(Event("gauge", "layout", rank, 0, 1, 1, told))
    return made


def drawn(chart, rank, after, row):
    """By element of the whole flat buffer: which role covers it, '' for none."""
    (mark,) = chart.marks
    total = round(1e6 * chart.x_range[1])
    found = np.full(total, "", dtype=object)
    for lane, of, start, end, kind in zip(mark.lane, mark.row, mark.start, mark.end, mark.kind, strict=True):
        if (lane, of) == (2 * rank + after, ROWS.index(row)):
            found[round(1e6 * start):round(1e6 * end)] = ROLES[int(kind)]
    return found


def own(strategy, rank, ranks=2):
    """By element: whether it lies in this rank's slice of its bucket."""
    shards = 1 if strategy == "ddp" else ranks
    masks = []
    for slots in TENSORS:
        layout = FlatLayout.of([(name, (numel,)) for name, numel in slots], shards)
        masks.append((np.arange(layout.numel) // (layout.numel // shards)) == rank % shards)
    return np.concatenate(masks)


@pytest.mark.parametrize("strategy", PLACED)
@pytest.mark.parametrize("rank", [0, 1])
def test_optimizer_state_and_averaged_gradients_lie_with_their_owner(strategy, rank):
    made, mine = panel(strategy), own(strategy, rank)
    cut = strategy != "ddp"
    for row in ("optimizer", "grads"):
        held = drawn(made.chart("reduce"), rank, 1, row)
        assert set(held[mine]) == {"owned" if cut else "full"}
        assert set(held[~mine]) <= {""}
    assert set(drawn(made.chart("reduce"), rank, 0, "grads")) == {"partial"}
    assert set(drawn(made.chart("step"), rank, 1, "grads")) == {""}


@pytest.mark.parametrize(("strategy", "verb", "before", "after"), [
    ("ddp", "step", ("full", None), ("full", None)), ("zero1", "step", ("full", "full"), ("owned", "stale")),
    ("zero2", "publish", ("owned", "stale"), ("full", "full")), ("zero3", "unshard", ("owned", ""), ("full", "full")),
    ("zero3", "reshard", ("full", "full"), ("owned", "")), ("zero3", "step", ("owned", ""), ("owned", ""))])
def test_parameters_before_and_after_a_verb(strategy, verb, before, after):
    chart, mine = panel(strategy).chart(verb), own(strategy, 1)
    for moment, (inside, outside) in enumerate((before, after)):
        held = drawn(chart, 1, moment, "params")
        assert set(held[mine]) == {inside}
        assert set(held[~mine]) <= {outside}


def test_verbs_are_those_of_the_strategy():
    assert panel("ddp").verbs == ("reduce", "step")
    assert panel("zero1").verbs == ("reduce", "step", "publish")
    assert panel("zero3").verbs == ("unshard", "reshard", "reduce", "step")
    assert [chart.name for chart in panel("zero2").charts()] == [
        "ownership/reduce", "ownership/step", "ownership/publish"]


def test_slices_are_named_by_their_tensors():
    (mark,) = panel("zero2").chart("reduce").marks
    texts = [text for text in mark.texts if text.startswith("rank 1 after, grads")]
    assert texts == ["rank 1 after, grads, own slice: a.weight[256:300], a.bias",
                     "rank 1 after, grads, own slice: b.weight[512:1000]"]


def test_many_ranks_are_the_first_few():
    chart = panel("zero2", ranks=8).chart("step")
    assert len(chart.marks[0].names) == 2 * SHOWN
    assert chart.caption.endswith(f"{SHOWN} of 8 ranks")


@pytest.mark.parametrize("attrs", [{}, {"shard": "x"}, {"shard": [0, 2], "buckets": [{"slots": 3}]}])
def test_a_layout_that_is_not_understood_is_left_out(attrs):
    made = OwnershipPanel()
    made.feed(Event("gauge", "layout", 0, 0, 1, 1, attrs))
    (chart,) = made.charts()
    assert chart.words == "the layout is not recorded (yet): dplab.parallelize does it"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_a_real_run_records_the_layout_that_it_has(strategy, tmp_path):
    run = dplab.launch("dplab.workloads.train:train", world_size=2, strategy=strategy, root=tmp_path, detach=False,
                       kwargs={"steps": 2, "batch_size": 1})
    run.wait()
    fold = Fold(2, strategy)
    fold.feed(run.events())
    chart = fold.ownership.chart("step")
    elements = fold.memory.latest(0)["params"] / 4 * (2 if strategy == "zero3" else 1)
    assert chart.x_range[1] == pytest.approx(elements)
    assert fold.memory.limit[0][1] in ("host, all ranks", "container, all ranks")
    for rank in range(2):
        held = drawn(chart, rank, 1, "optimizer")
        assert (held == "owned").mean() == pytest.approx(0.5)


def test_one_is_not_many():
    assert panel("ddp").chart("reduce").note.startswith("3 tensors in 2 buckets over 1 shard; ")
    assert panel("zero2").chart("reduce").note.startswith("3 tensors in 2 buckets over 2 shards; ")
