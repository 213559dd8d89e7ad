"""The limit, the peak, and what the allocator holds beyond tensors."""

from __future__ import annotations

import numpy as np
import pytest

from dplab.telemetry.events import Event
from dplab.views.memory import MemoryPanel
from dplab.views.series import Series
from dplab.views.usage import UtilizationPanel

MB = 10**6


def gauge(time, **values):
    return Event("gauge", "memory", 0, 0, time * 10**9, time * 10**9, {name: v * MB for name, v in values.items()})


def panel(*events, limit=None):
    made = MemoryPanel()
    if limit is not None:
        made.feed(Event("gauge", "layout", 0, 0, 0, 0, {"limit": limit * MB, "limit_of": "GPU 0"}))
    for event in events:
        made.feed(event)
    return made


def lines(chart):
    return {mark.role: (mark.x.tolist(), mark.y.tolist()) for mark in chart.marks[1:]}


def test_the_peak_is_marked_where_it_was_and_survives_thinning():
    made = panel(*(gauge(time, params=10, activations=90 if time == 7 else 1) for time in range(3000)))
    assert lines(made.chart(0))["peak"] == ([7.0], [100.0])
    assert made.chart(0).caption == "dot: peak of 100 MB"
    series = made.series[0]
    assert isinstance(series, Series)
    assert series["total"].max() == 100


def test_a_limit_near_by_is_a_line_and_one_far_away_is_words():
    near = panel(gauge(1, params=50), gauge(2, params=60), limit=100).chart(0)
    assert lines(near)["limit"] == ([1.0, 2.0], [100.0, 100.0])
    assert near.y_range == (0, pytest.approx(110))
    assert near.caption == "dot: peak of 60 MB; limit 100 MB (GPU 0)"
    far = panel(gauge(1, params=50), limit=80_000).chart(0)
    assert "limit" not in lines(far)
    assert far.caption == "dot: peak of 50 MB; limit 80 GB (GPU 0), off the scale"
    assert far.y_range == (0, pytest.approx(55))


def test_reserved_memory_is_a_line_and_fragments_a_share_of_it():
    chart = panel(gauge(1, params=30), gauge(2, params=30, reserved=40)).chart(0)
    assert lines(chart)["reserved"] == ([0.0, 1.0], [pytest.approx(np.nan, nan_ok=True), 40.0])
    assert chart.value == "30 MB in tensors, 25% of what is reserved in fragments"
    assert chart.y_range == (0, pytest.approx(44))


def test_what_else_of_a_gpu_is_measured_stands_in_words():
    made = UtilizationPanel()
    made.feed(Event("gauge", "utilization", 0, 0, 0, 0, {"cpu": 90.0, "gpu": 70.0, "power": 411.6, "gpu_memory": 3e10,
                                                         "pcie_sent": 1.25e9, "pcie_received": 2e9}))
    assert made.chart(0).value == "CPU core 90 %, GPU 70 %, 412 W, 30 GB, PCIe 1.25 GB/s out, 2 in"
    made.feed(Event("gauge", "utilization", 0, 0, 1, 1, {"cpu": 90.0, "gpu": 70.0, "power": 300.0}))
    assert made.chart(0).value == "CPU core 90 %, GPU 70 %, 300 W, 30 GB, PCIe 1.25 GB/s out, 2 in"
