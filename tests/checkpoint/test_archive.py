"""Where a tensor's bytes are in an archive of torch.save's: found in what is plain, and in nothing else."""

from __future__ import annotations

import io
import pickle
import zipfile
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dplab.checkpoint.archive import STORAGES, Raw, find

BEFORE, AFTER = b"what stands before", b"and behind"


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def found(archive: bytes) -> Raw | None:
    return find(io.BytesIO(BEFORE + archive + AFTER), SimpleNamespace(offset=len(BEFORE), length=len(archive)))


@pytest.mark.parametrize("dtype", STORAGES.values(), ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4), (1, 4, 2), (2, 1, 3)])
def test_every_box_of_a_tensor_is_read(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 100).to(dtype)
    raw = found(saved(tensor))
    assert raw is not None
    assert (raw.dtype, raw.shape) == (dtype, shape)
    for low, high in ((0, None), (0, 1), (-1, None)):
        part = tensor[tuple(slice(low, high) for _ in shape)]
        offsets = tuple(size - 1 if low else 0 for size in shape)
        for into in (torch.empty(part.shape, dtype=dtype), torch.empty(part.shape, dtype=torch.float64),
                     torch.empty(part.shape[::-1], dtype=dtype).permute(tuple(range(part.dim()))[::-1])):
            raw.copy(into, offsets)
            assert torch.equal(into, part.to(into.dtype))


@pytest.mark.parametrize("value", [
    torch.ones(2, 3).T, torch.ones(6)[2:].clone().as_strided((2,), (2,)), torch.arange(9)[3:], torch.ones(2).cfloat(),
    [torch.ones(2)], {"a": torch.ones(2)}, torch.nn.Parameter(torch.ones(2)), torch.ones(2).to_sparse(), 3, "text"],
    ids=lambda value: type(value).__name__)
def test_what_is_not_plain_is_left_to_torch(value: Any) -> None:
    assert found(saved(value)) is None


class Callable_:
    """Would run code where it is unpickled."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("a pickle was executed",)


def rewritten(archive: bytes, **members: bytes) -> bytes:
    buffer = io.BytesIO()
    old = zipfile.ZipFile(io.BytesIO(archive))
    with zipfile.ZipFile(buffer, "w") as new:
        for name in old.namelist():
            new.writestr(name, members.get(name.rpartition("/")[2].replace(".pkl", ""), old.read(name)))
    return buffer.getvalue()


def test_a_pickle_is_not_executed_and_sizes_are_not_believed() -> None:
    archive = saved(torch.ones(4, 4))
    assert found(rewritten(archive)) is not None
    assert found(rewritten(archive, data=pickle.dumps(Callable_(), protocol=2))) is None
    assert found(rewritten(archive, **{"0": b"short"})) is None
    assert found(rewritten(archive, byteorder=b"big")) is None
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for name in zipfile.ZipFile(io.BytesIO(archive)).namelist():
            new.writestr(name, zipfile.ZipFile(io.BytesIO(archive)).read(name))
    assert found(packed.getvalue()) is None


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_whatever_is_broken_is_refused_or_lies_inside(data: st.DataObject) -> None:
    archive = bytearray(saved(torch.arange(64, dtype=torch.int32).view(8, 8)))
    for _ in range(data.draw(st.integers(1, 4))):
        archive[data.draw(st.integers(0, len(archive) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(archive)))
    raw = found(bytes(archive[:cut] if data.draw(st.booleans()) else archive))
    if raw is not None:
        end = raw.start + torch.Size(raw.shape).numel() * raw.dtype.itemsize
        assert len(BEFORE) <= raw.start <= end <= len(BEFORE) + len(archive)
