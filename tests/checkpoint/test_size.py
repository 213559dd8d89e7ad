"""What saving and loading need of memory and disk: a piece more than the shard, and every byte once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dplab
from tests.checkpoint.programs import odd, run, same, train, two_groups, wrap
from tests.core.test_peak import LAYERS, UNIT, Peak, bytes_of, layers, steps, tensors
from tests.worlds import ProcessWorld, Uneven, adamw, build, in_threads


def peaks(strategy: str, place: Path) -> tuple[int, int, int]:
    """Bytes above what training holds, at most, while saving, loading and exporting."""
    engine = dplab.parallelize(layers(), adamw, strategy)
    steps(engine, 1)
    found = []
    for call in (lambda: engine.save(place), lambda: engine.load(place),
                 lambda: engine.save(place.with_suffix(".safetensors"))):
        held = bytes_of(tensors())
        with Peak() as peak:
            call()
        found.append(peak.bytes - held)
    return found[0], found[1], found[2]


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_a_save_or_a_load_holds_one_unit_above_the_shard(strategy: str, tmp_path: Path) -> None:
    for saving, loading, exporting in ProcessWorld.of(2).call(peaks, strategy, tmp_path / "saved"):
        assert 0 < saving <= UNIT  # a chunk that lies in several runs, and small values
        assert loading <= UNIT  # new state before the old is gone, or a part that is cut or cast
        assert exporting <= 1.01 * UNIT  # a bucket, whole; small values


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_ranks_write_their_equal_part_and_nothing_twice(strategy: str, tmp_path: Path) -> None:
    def body() -> int:
        engine = dplab.parallelize(layers(), adamw, strategy)
        steps(engine, 1)
        engine.save(tmp_path / "saved")
        return engine.world.rank

    in_threads(4, body)
    numel = LAYERS * UNIT // 4
    by_rank = [sum(file.stat().st_size for file in (tmp_path / "saved").glob(f"__{rank}_*")) for rank in range(4)]
    for nbytes in by_rank:
        assert 3 * numel <= nbytes <= 3 * numel * 1.02 + 30_000  # weights and two moments, 4 bytes, a quarter each


def test_a_tied_weight_lies_on_disk_once_under_both_names(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False)
            self.two.weight = self.one.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(self.one(x)).sum()

    def body() -> dict[str, torch.Tensor]:
        engine = dplab.parallelize(Tied(), lambda ps: torch.optim.SGD(ps, lr=0.1), "zero2")
        engine.save(tmp_path / "saved")
        return engine.full_state_dict()

    values = in_threads(2, body)[0]
    assert sum(file.stat().st_size for file in (tmp_path / "saved").iterdir()) < 1.2 * 256 * 256 * 4
    import torch.distributed.checkpoint as dcp

    plain: dict[str, Any] = {"model": Tied().state_dict()}
    dcp.load(plain, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert same(plain["model"], values)
    assert list(values) == ["one.weight", "two.weight"]


@pytest.mark.parametrize(("backend", "size", "strategy"), [
    ("gloo", 2, "zero3"), ("shm", 2, "zero2"), ("shm", 3, "ddp")])
def test_processes_go_on_to_the_bit(backend: str, size: int, strategy: str, tmp_path: Path) -> None:
    world, model = ProcessWorld.of(size, backend), build(Uneven, torch.float32)
    rows = size
    whole = world.call(run, model, strategy, (0, 4), rows=rows)[0]
    world.call(run, model, strategy, (0, 2), rows=rows, save=tmp_path / "saved", wait=False)
    # an engine waits for its own saves, and the next one is another
    world.call(finished, tmp_path / "saved")
    assert same(world.call(run, model, strategy, (2, 4), rows=rows, load=tmp_path / "saved")[0], whole)


def finished(place: Path) -> None:
    import threading

    for thread in threading.enumerate():
        if thread.name == "dplab-checkpoint":
            thread.join(30)
    assert (place / ".metadata").is_file()


@pytest.mark.parametrize(("before", "after"), [((2, 2), (4, 1)), ((4, 1), (1, 4)), ((1, 4), (2, 2)), ((2, 2), None)])
def test_hybrid_meshes_load_each_others(before: tuple[int, int], after: tuple[int, int] | None, tmp_path: Path) -> None:
    model = odd()

    def body(mesh: Any, load: bool) -> dict[str, torch.Tensor]:
        import copy

        engine = dplab.parallelize(copy.deepcopy(model), two_groups, "zero3" if mesh else "zero1", mesh=mesh)
        if load:
            engine.load(tmp_path / "saved")
        train(engine, int(load), int(load) + 1)
        if not load:
            engine.save(tmp_path / "saved")
        return engine.full_state_dict()

    in_threads(4, body, before, False)
    found = in_threads(4 if after else 3, body, after, True)[0]
    expected = in_threads(1, lambda: (engine := wrap(model, "ddp", two_groups), train(engine, 0, 2),
                                      engine.full_state_dict())[-1])[0]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10, msg=name)
