"""Cards of GPUs, clusters from one line of text, and units."""

from __future__ import annotations

import pytest

from dplab import cards
from dplab.errors import UsageError
from dplab.planner.hardware import cluster, gpu
from dplab.quantities import rate, size

DENSE = {"A100-SXM-80GB": 312, "H100-SXM-80GB": 989, "H200-SXM-141GB": 989, "L4-24GB": 121, "V100-SXM-32GB": 125,
         "B200-SXM-180GB": 2250}
"""TFLOP/s without sparsity from another table than the cards' (stas00/ml-engineering, compute/accelerator)."""


@pytest.mark.parametrize("name", DENSE)
def test_peaks_are_dense(name):
    peak = gpu(name).peak
    assert (peak.get("bf16") or peak["fp16"]) == pytest.approx(DENSE[name] * 1e12, rel=0.01)


@pytest.mark.parametrize("name", cards.names("hardware"))
def test_every_card_is_whole(name):
    card, part = cards.find("hardware", name, what="GPU"), gpu(name)
    assert 0.9 * card["memory_gb"] * 1e9 < part.memory < card["memory_gb"] * 2**30
    assert 0.5 < part.sustained < 0.95
    assert part.peak["fp16"] > 1.9 * part.peak["fp32"]
    assert {"peak_tflops", "memory_bandwidth_gb_s", "network_gb_s", "usable_gib", "achievable"
            } <= set(card["source"])


def test_a_cluster_from_text():
    node = cluster("8xH100-SXM-80GB")
    assert (node.count, node.per_node, node.nodes, node.link) == (8, 8, 1, 450e9)
    assert cluster("4x8xa100").count == 32
    assert cluster("4x4xA100-SXM-80GB").per_node == 4
    assert cluster("2xA100").per_node == 2
    assert cluster("16xA100", per_node=4).nodes == 4
    assert str(cluster("64xA100")) == "64 x A100-SXM-80GB on 8 nodes"
    assert cluster("64xA100", network="200Gb/s").network == 25e9
    assert cluster("64xA100", network="12.5GB/s").network == 12.5e9
    assert cluster(node) is node


def test_units_are_kept_apart():
    assert size("80GB", what="memory") == 80e9
    assert size("80GiB", what="memory") == 80 * 2**30
    assert rate("400Gbps", what="network") == rate("50GB/s", what="network") == 50e9


@pytest.mark.parametrize(("text", "options", "message"), [
    ("H100", {}, r"cluster 'H100' is not of the form COUNTxGPU, such as 8xH100-SXM-80GB"),
    ("0xH100", {}, r"not of the form COUNTxGPU"),
    ("8xH1000-SXM", {}, r"GPU 'H1000-SXM' is not known; the nearest are H100"),
    ("12xH100", {}, r"12 GPUs do not fill nodes of 8; use 8 or 16 GPUs, or give another number a node"),
    ("8xH100-SXM-80GiB", {}, r"named by its marketed size in GB, .*'H100-SXM-80GiB' is in GiB"),
    ("2x8xH100", {"per_node": 4}, r"has 8 GPUs a node but per_node=4 was given too; leave one out"),
    ("8xH100", {"network": "400"}, r"network '400' is no number above 0 with its unit; write 50GB/s \(bytes\) or 400"),
    ("8xH100", {"network": "1.2.3GB/s"}, r"network '1.2.3GB/s' is no number above 0 with its unit"),
])
def test_bad_clusters(text, options, message):
    with pytest.raises(UsageError, match=message):
        cluster(text, **options)


def test_bad_sizes_and_dtypes():
    with pytest.raises(UsageError, match=r"memory '80' is no number above 0 with its unit; write 80GB \(1e9"):
        size("80", what="memory")
    with pytest.raises(UsageError, match=r"V100-SXM-32GB has no bf16 tensor cores; use fp16 or fp32"):
        gpu("V100").flops("bf16")
