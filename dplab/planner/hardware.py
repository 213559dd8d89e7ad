"""GPUs and clusters: peaks, memory and links, in SI units (bytes, bytes a second, FLOP/s), one direction a link."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

from dplab import cards, topology
from dplab.errors import UsageError
from dplab.planner import machine
from dplab.planner.machine import Machine
from dplab.quantities import rate

CONTENTION = 0.126
"""Seconds that compute loses to a second of collective hidden behind it: measured by Hetu-Galvatron on A100."""
HOST_MEMORY = 110e9
"""Bytes a second at which a node's processors step Adam: 10 billion parameters in 2.6 s on the two sockets of a DGX-2,
28 bytes each (Ren et al. 2021, arXiv:2101.06840, table 4)."""
HERE = "this-machine"
ERROR = 0.2
"""Share by which a step predicted from cards may be off: no family of published results is off by more on average (see
data/published/REPORT.md)."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One accelerator. `peak` is dense FLOP/s by dtype; large matrix products reach `sustained` of it in a long run,
    flash attention `flash` (forward, backward); `memory` is the bytes that the driver reports (an "80 GB" part has
    79.15 GiB = 84.99 GB); `host_link` is bytes a second to the host, in one direction. `measured`: this machine's own
    processor, whose figures stand for a card's."""

    name: str
    peak: dict[str, float]
    sustained: float
    flash: tuple[float, float]
    memory: float
    memory_bandwidth: float
    multiprocessors: int
    host_link: float = float("inf")
    measured: Machine | None = None

    def flops(self, dtype: str) -> float:
        """Dense peak of a dtype. Raises UsageError where the GPU has none."""
        if dtype not in self.peak:
            raise UsageError(f"{self.name} has no {dtype} tensor cores; use {' or '.join(sorted(self.peak))}")
        return self.peak[dtype]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`count` equal GPUs, `per_node` in a node; bytes a second in one direction and GPU: `link` inside a node,
    `network` between nodes. `contention`: seconds that compute loses to a second of hidden collective. `backend`: the
    wire of this machine, where that is what is predicted; `topology`: the links that a run here emulates, `hybrid`:
    where it sums inside hosts first."""

    gpu: Gpu
    count: int
    per_node: int
    link: float
    network: float
    contention: float = CONTENTION
    backend: str | None = None
    topology: topology.Topology | None = None
    hybrid: bool = False

    @property
    def host_memory(self) -> float:
        """Bytes a second of a node's memory for each of its GPUs."""
        return HOST_MEMORY / self.per_node

    @property
    def nodes(self) -> int:
        """Nodes, the last one perhaps partly used."""
        return -(-self.count // self.per_node)

    @property
    def precision(self) -> str:
        """What training on it computes in, where nobody says."""
        if self.gpu.measured is not None:
            return "fp32"
        return "bf16" if "bf16" in self.gpu.peak else "fp16"

    @property
    def error(self) -> float:
        """Share by which a predicted step may be off."""
        return ERROR if self.gpu.measured is None else self.gpu.measured.error

    @property
    def recipe(self) -> str:
        """The program that trains on it, where nobody says."""
        return "modern" if self.gpu.measured is None else "dplab"

    def __str__(self) -> str:
        if self.gpu.measured is not None:
            told = "calibrated" if self.gpu.measured.calibrated else "not calibrated, defaults"
            return f"{self.count} ranks of {self.gpu.name} over {self.backend} ({told})"
        nodes = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{self.count} x {self.gpu.name}{nodes}"


def gpu(name: str) -> Gpu:
    """The GPU of a card's name or alias."""
    return _gpu(cards.find("hardware", name, what="GPU"))


def cluster(text: str | Cluster, *, network: str | None = None, per_node: int | None = None) -> Cluster:
    """A cluster from `8xH100-SXM-80GB` (whole nodes as the card says) or `4x8xA100-SXM-80GB` (4 nodes of 8).

    `network` is the speed between nodes for one GPU and direction, with its unit: `50GB/s` or `400Gb/s`.
    Raises UsageError for another form, an unknown GPU, a count that leaves a node partly filled.
    """
    if isinstance(text, Cluster):
        return text
    here = re.fullmatch(rf"(?:(\d+)[xX])?{HERE}(?::(\w+))?", text.strip(), re.IGNORECASE)
    if here:
        if network is not None or per_node is not None:
            raise UsageError(f"cluster {text!r} is one node, whose wire is measured; leave network and per_node out")
        return of_machine(machine.load(), int(here[1]) if here[1] else None, here[2])
    form = re.fullmatch(r"(?:(\d+)[xX])?(\d+)[xX]([A-Za-z].*)", text.strip())
    if not form or not int(form[2]) or form[1] == "0":
        raise UsageError(f"cluster {text!r} is not of the form COUNTxGPU, such as 8xH100-SXM-80GB, or "
                         f"NODESxCOUNTxGPU, such as 4x8xA100-SXM-80GB, or {HERE}")
    if re.search(r"gib$", form[3], re.IGNORECASE):
        raise UsageError(f"cluster {text!r}: a GPU is named by its marketed size in GB, such as "
                         f"{cards.names('hardware')[0]}; {form[3]!r} is in GiB")
    card = cards.find("hardware", form[3], what="GPU")
    if form[1] is not None and per_node is not None and per_node != int(form[2]):
        raise UsageError(f"cluster {text!r} has {form[2]} GPUs a node but per_node={per_node} was given too; "
                         f"leave one out")
    in_node = int(form[2]) if form[1] else per_node or card["per_node"]
    count = int(form[1] or 1) * int(form[2])
    if count > in_node and count % in_node:
        low = count // in_node * in_node
        raise UsageError(f"cluster {text!r}: {count} GPUs do not fill nodes of {in_node}; use {low} or "
                         f"{low + in_node} GPUs, or give another number a node")
    speed = rate(network, what="network") if network is not None else card["network_gb_s"] * 1e9
    return Cluster(gpu=_gpu(card), count=count, per_node=min(in_node, count),
                   link=topology.link(card["link"]).bandwidth, network=speed)


def of_machine(measured: Machine, ranks: int | None = None, backend: str | None = None) -> Cluster:
    """`ranks` ranks of this machine as one node (None: as many as measured it), over `backend` (None: what a run
    takes). Raises UsageError for a wire that was not measured, more ranks than cores."""
    count, wire = measured.ranks if ranks is None else ranks, measured.backend if backend is None else backend.lower()
    if wire not in measured.wire:
        raise UsageError(f"the wire {backend!r} was not measured on {HERE}; use {' or '.join(measured.wire)}, or run "
                         f"dplab calibrate")
    if not 1 <= count <= max(measured.cores, measured.ranks):
        raise UsageError(f"{count} ranks on {HERE} cannot be predicted; it has {os.cpu_count()} cores, and ranks that "
                         f"share one only wait for each other: use 1 to {max(measured.cores, measured.ranks)}")
    size, seconds = measured.wire[wire]["all_reduce"][-1]
    peak = {name: max(flops / taken for flops, taken in curve) for name, curve in measured.gemm.items()}
    part = Gpu(name=HERE, peak=peak, sustained=1.0, flash=(1.0, 1.0), memory=measured.memory / count,
               memory_bandwidth=measured.copy, multiprocessors=1, measured=measured)
    return Cluster(gpu=part, count=count, per_node=count, link=size / seconds, network=size / seconds,
                   contention=measured.contention[wire], backend=wire)


def _gpu(card: dict[str, Any]) -> Gpu:
    return Gpu(name=card["name"], peak={name: value * 1e12 for name, value in card["peak_tflops"].items()},
               sustained=card["sustained"], flash=tuple(card["flash"]), memory=card["usable_gib"] * 2**30,
               memory_bandwidth=card["memory_bandwidth_gb_s"] * 1e9, multiprocessors=card["multiprocessors"],
               host_link=topology.link(card["host_link"]).bandwidth)
