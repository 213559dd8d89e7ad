"""Random generators of a rank: torch's (and its GPU's), Python's, numpy's where it is in use. As plain numbers."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def generators(device: torch.device) -> dict[str, Any]:
    """Where they stand."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": [version, list(numbers), gauss]}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [name, keys.tolist(), *rest]
    return state


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Makes them go on from there; one that is not in use here is left out."""
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    if "numpy" in sys.modules and "numpy" in state:
        name, keys, *rest = state["numpy"]
        numpy = sys.modules["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
