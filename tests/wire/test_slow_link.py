"""The benchmark that holds emulated links against a real slow one runs, and neither is faster than the wire."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from dplab.workloads import models
from tests.benchmarks import bench_emulate as bench

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("ip") or not shutil.which("tc") or os.geteuid() != 0,
                       reason="needs root, iproute2 and tc for a slow link between network namespaces"),
]


def test_both_links_carry_the_job_and_take_at_least_what_its_bytes_need() -> None:
    rate = 100e6 / 8 * bench.PAYLOAD
    try:
        try:
            bench.open_link("100mbit")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no slow link can be made here: {error.stderr.decode().strip()}")
        row = bench.measure("ddp", "tiny-gpt", f"2x1@{rate:.0f}B/s", 1, 2)
    finally:
        bench.close_link()
    sent = 4 * sum(parameter.numel() for parameter in models.build("tiny-gpt").parameters())      # 2 (N-1)/N of it
    assert row["emulated_ms"] >= 1e3 * sent / rate
    assert row["real_ms"] >= 0.9e3 * sent / rate      # its buckets of tokens begin full
    assert row["low"] <= row["ratio"] <= row["high"]
