"""Memory of setting up and of going on: what Python can see of tensors at every operation, on real ranks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dplab
from dplab.specs import SHARDINGS
from tests import worlds
from tests.worlds import in_processes

LAYERS, WIDTH = 8, 512
UNIT = WIDTH * WIDTH * 4
"""Bytes of one layer, 1 MiB in float32."""


def tensors() -> list[torch.Tensor]:
    """Every tensor with one piece of memory that Python's collector knows."""
    gc.collect()
    return [each for each in gc.get_objects()
            if issubclass(type(each), torch.Tensor) and not each.is_meta and each.layout is torch.strided]


def bytes_of(held: Iterable[torch.Tensor]) -> int:
    """Bytes of their storages, each once."""
    with torch._C.DisableTorchFunctionSubclass():
        storages = [each.untyped_storage() for each in held]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


class Peak(TorchDispatchMode):
    """The most bytes that were alive after any operation inside, of what was there before or came out of one."""

    def __init__(self) -> None:
        super().__init__()
        self._seen = [weakref.ref(each) for each in tensors()]
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self._seen += [weakref.ref(each) for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        alive = [each for ref in self._seen if (each := ref()) is not None]
        self._seen = [weakref.ref(each) for each in alive]
        self.bytes = max(self.bytes, bytes_of(alive))
        return result


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def steps(engine: dplab.Engine, count: int) -> None:
    for _ in range(count):
        engine.backward(engine(torch.ones(1, WIDTH)).float().square().mean())
        engine.step()


@pytest.mark.parametrize("name", SHARDINGS)
def test_h47_setting_up_needs_no_more_than_training_and_a_unit(name: str) -> None:
    def body() -> tuple[int, int, int]:
        before = bytes_of(tensors())
        model = layers()
        with Peak() as setting_up:
            engine = dplab.parallelize(model, worlds.adamw, f"{name}+bf16")
        with Peak() as training:
            steps(engine, 3)
        return setting_up.bytes - before, training.bytes - before, engine.memory()["optimizer"]

    numel = LAYERS * WIDTH * WIDTH
    for setting_up, training, optimizer in in_processes(4, body):
        assert LAYERS * UNIT <= setting_up <= training + UNIT
        assert optimizer == 8 * (numel if name == "ddp" else numel // 4)


@pytest.mark.parametrize("name", SHARDINGS)
def test_h47_neither_fifty_steps_nor_twenty_wraps_leave_anything(name: str) -> None:
    def body() -> tuple[list[int], list[int]]:
        engine = dplab.parallelize(layers(), worlds.adamw, f"{name}+bf16")
        going_on = []
        for count in (3, 50):
            steps(engine, count)
            going_on.append(bytes_of(tensors()))
        del engine
        again = []
        for turn in range(20):
            engine = dplab.parallelize(layers(), worlds.adamw, f"{name}+bf16")
            steps(engine, 1)
            del engine
            if turn in (1, 19):
                again.append(bytes_of(tensors()))
        return going_on, again

    for going_on, again in in_processes(2, body):
        assert going_on[1] <= going_on[0]
        assert again[1] <= again[0]
