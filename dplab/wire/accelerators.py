"""Which GPUs of this host NVLink joins, as NVML tells."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch


def identity(device: torch.device) -> str | None:
    """What NVML knows a rank's GPU by; None on a CPU, and where torch does not tell."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None) if device.type == "cuda" else None
    return None if uuid is None else f"GPU-{uuid}"


def joined(mine: str | None, others: Sequence[str]) -> list[str]:
    """Those of the `others` that NVLink joins to `mine` directly, or that are the same GPU; none where NVML is missing
    or does not tell."""
    if mine is None:
        return []
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return [other for other in others if other == mine]
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(mine)
        return [other for other in others if other == mine or nvml.nvmlDeviceGetP2PStatus(
            handle, nvml.nvmlDeviceGetHandleByUUID(other), nvml.NVML_P2P_CAPS_INDEX_NVLINK) == nvml.NVML_P2P_STATUS_OK]
    except nvml.NVMLError:      # a virtual GPU, a container that hides the others, an old driver
        return [other for other in others if other == mine]
