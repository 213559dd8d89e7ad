"""GPUs and clusters: peaks, memory and links, in SI units (bytes, bytes a second, FLOP/s), one direction a link."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from dplab.errors import UsageError
from dplab.planner import cards


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One accelerator. `peak` is dense FLOP/s by dtype; large matrix products reach `sustained` of it in a long run,
    flash attention `flash` (forward, backward); `memory` is the bytes that the driver reports (an "80 GB" part has
    79.15 GiB = 84.99 GB)."""

    name: str
    peak: dict[str, float]
    sustained: float
    flash: tuple[float, float]
    memory: float
    memory_bandwidth: float
    multiprocessors: int

    def flops(self, dtype: str) -> float:
        """Dense peak of a dtype. Raises UsageError where the GPU has none."""
        if dtype not in self.peak:
            raise UsageError(f"{self.name} has no {dtype} tensor cores; use {' or '.join(sorted(self.peak))}")
        return self.peak[dtype]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`count` equal GPUs, `per_node` in a node; bytes a second in one direction and GPU: `link` inside a node,
    `network` between nodes."""

    gpu: Gpu
    count: int
    per_node: int
    link: float
    network: float

    @property
    def nodes(self) -> int:
        """Nodes, the last one perhaps partly used."""
        return -(-self.count // self.per_node)

    def __str__(self) -> str:
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
    form = re.fullmatch(r"(?:(\d+)[xX])?(\d+)[xX]([A-Za-z].*)", text.strip())
    if not form or not int(form[2]) or form[1] == "0":
        raise UsageError(f"cluster {text!r} is not of the form COUNTxGPU, such as 8xH100-SXM-80GB, or "
                         f"NODESxCOUNTxGPU, such as 4x8xA100-SXM-80GB")
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
    return Cluster(gpu=_gpu(card), count=count, per_node=min(in_node, count), link=card["link_gb_s"] * 1e9,
                   network=speed)


def _gpu(card: dict[str, Any]) -> Gpu:
    return Gpu(name=card["name"], peak={name: value * 1e12 for name, value in card["peak_tflops"].items()},
               sustained=card["sustained"], flash=tuple(card["flash"]), memory=card["usable_gib"] * 2**30,
               memory_bandwidth=card["memory_bandwidth_gb_s"] * 1e9, multiprocessors=card["multiprocessors"])


_SCALES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30,
           "Ti": 2.0**40}


def rate(text: str, *, what: str) -> float:
    """Bytes a second from `50GB/s` or `400Gb/s` (a capital B is bytes, a small b bits)."""
    form = re.fullmatch(r"([\d.]+)\s*([kMGT]i?|)([bB])(?:/s|ps)", text.strip())
    value = _value(form)
    if form is None or value is None:
        raise UsageError(f"{what} {text!r} is no number above 0 with its unit; write 50GB/s (bytes) or 400Gb/s (bits), "
                         f"one direction and GPU")
    return value * _SCALES[form[2]] / (8 if form[3] == "b" else 1)


def size(text: str, *, what: str) -> float:
    """Bytes from `80GB` (1e9) or `79GiB` (2^30)."""
    form = re.fullmatch(r"([\d.]+)\s*([kMGT]i?|)B", text.strip())
    value = _value(form)
    if form is None or value is None:
        raise UsageError(f"{what} {text!r} is no number above 0 with its unit; write 80GB (1e9 bytes) or 75GiB (2^30 "
                         f"bytes)")
    return value * _SCALES[form[2]]


def _value(form: re.Match[str] | None) -> float | None:
    """The number of a match, None where there is none above 0."""
    try:
        value = float(form[1]) if form else 0.0
    except ValueError:
        return None
    return value if value > 0 else None
