"""H35 and what else goes wrong between ranks and on disk: one sentence on every rank, no hang, nothing lost."""

from __future__ import annotations

import io
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dplab
from dplab.checkpoint import folder, store
from dplab.errors import CheckpointError, StateError, UsageError, WireError
from tests.checkpoint.programs import Odd, listing, odd, same, train, two_groups, wrap
from tests.worlds import ProcessWorld, build, in_shm, in_threads

ROWS = 2
SIZED = [(in_threads, 3), (in_shm, 2)]


def caught(kind: type[Exception], call: Any) -> str:
    with pytest.raises(kind) as info:
        call()
    return str(info.value)


def words(kind: type[Exception], call: Any, size: int = 3) -> list[str]:
    """What each rank is told."""
    return in_threads(size, lambda: caught(kind, call))


def fresh(strategy: str = "zero2", model: nn.Module | None = None) -> dplab.Engine:
    return wrap(model if model is not None else odd(), strategy, two_groups)


def h35(place: Path, alone: int) -> str:
    engine, told = fresh(), place.with_suffix(".told")
    said = ""
    if engine.world.rank == alone:
        said = caught(WireError, lambda: engine.save(place, limit=0.5))
        told.write_text(said)
    deadline = time.monotonic() + 30
    while not told.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    engine.save(place, limit=30)  # whoever missed it comes now, and the meeting is as new
    return said


@pytest.mark.parametrize(("worlds", "size"), SIZED)
@pytest.mark.parametrize("alone", [0, 1])
def test_h35_a_save_on_one_rank_alone_names_the_ranks_that_are_missing(
        worlds: Any, size: int, alone: int, tmp_path: Path) -> None:
    said = worlds(size, h35, tmp_path / "saved", alone)
    missing = ("rank 1 has" if size == 2 else "ranks [1, 2] have") if alone == 0 else "rank 0 has"
    assert said[alone] == (f"engine.save({str(tmp_path / 'saved')!r}) is collective, and {missing} not called it "
                           f"within 0.5 s; call it on every rank at the same step, outside any `if rank == 0`")
    assert (tmp_path / "saved" / ".metadata").is_file()


def full_disk(place: Path, where: str) -> str:
    engine = fresh("zero3")
    engine.save(place)
    before = engine.full_state_dict()
    train(engine, 0, 1, ROWS)
    with pytest.MonkeyPatch.context() as patch:
        if engine.world.rank == 0:
            def full(*_: Any, **__: Any) -> None:
                raise OSError(28, "No space left on device")

            patch.setattr(store, where, full)
        said = caught(CheckpointError, lambda: engine.save(place, limit=20))
    engine.load(place)
    assert same(engine.full_state_dict(), before)
    return said


@pytest.mark.parametrize("where", ["write", "finish"])
def test_h35_a_write_that_fails_on_rank_0_is_told_on_every_rank_with_its_cause(where: str, tmp_path: Path) -> None:
    for rank, said in enumerate(ProcessWorld.of(2).call(full_disk, tmp_path / "saved", where)):
        assert "failed, and nothing there has changed: OSError: [Errno 28] No space left on device" in said
        assert said.endswith(" (on rank 0)") == (rank != 0)
    assert listing(tmp_path) == {"saved"}


class FullDisk(io.BytesIO):
    """Takes what is written up to `room` bytes."""

    room = 1000

    def write(self, data: Any, /) -> int:
        if self.tell() + len(data) > self.room:
            raise OSError(28, "No space left on device")
        return super().write(data)


def test_a_disk_that_fills_up_within_a_tensor_is_named_by_the_system_and_not_by_torch() -> None:
    with pytest.raises(OSError, match="No space left on device"):
        store._save(torch.ones(1000), FullDisk())


def test_h35_a_folder_that_cannot_be_made_is_told_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for said in words(CheckpointError, lambda: fresh().save(tmp_path / "file" / "saved", limit=10)):
        assert "NotADirectoryError" in said or "FileExistsError" in said


def saved(place: Path, strategy: str = "zero2", size: int = 2, model: nn.Module | None = None) -> Path:
    def ranks() -> None:
        engine = fresh(strategy, model)
        train(engine, 0, 1, ROWS)
        engine.save(place)

    in_threads(size, ranks)
    return place


def test_h33_another_shape_is_told_on_every_rank_by_name_with_both(tmp_path: Path) -> None:
    class Wider(Odd):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(3, 8)
            self.down = nn.Linear(8, 3)
            self.extra = nn.Linear(2, 2)
            del self.pair

    place = saved(tmp_path / "saved")
    for said in words(UsageError, lambda: fresh("zero3", build(Wider)).load(place)):
        assert "'up.weight' has shape (7, 3) in the checkpoint and (8, 3) in the model" in said
        assert "missing in the checkpoint: 'extra.weight' (2, 2), 'extra.bias' (2,)" in said
        assert "not in the model: 'pair.weight' (2, 3), 'pair.bias' (2,)" in said


def test_not_strict_loads_what_fits_and_leaves_the_rest(tmp_path: Path) -> None:
    class More(Odd):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Linear(2, 2)

    place, model = saved(tmp_path / "saved"), build(More, seed=8)

    def ranks() -> dict[str, torch.Tensor]:
        engine = fresh("zero3", model)
        engine.load(place, strict=False, optimizer=False)
        return engine.full_state_dict()

    found = in_threads(2, ranks)[0]
    assert torch.equal(found["extra.weight"], model.state_dict()["extra.weight"])
    assert not torch.equal(found["up.weight"], model.state_dict()["up.weight"])


def test_h33_a_missing_shard_file_is_named_on_every_rank_and_nothing_is_touched(tmp_path: Path) -> None:
    place = saved(tmp_path / "saved")
    gone = sorted(name for name in listing(place) if name.startswith("__1_"))[0]
    (place / gone).unlink()

    def ranks() -> str:
        engine = fresh("ddp")
        before = engine.full_state_dict()
        said = caught(CheckpointError, lambda: engine.load(place))
        assert same(engine.full_state_dict(), before)
        return said

    for said in in_threads(3, ranks):
        assert f"checkpoint {place} cannot be used: file {gone} is missing, and" in said


def test_a_torn_file_is_named(tmp_path: Path) -> None:
    place = saved(tmp_path / "saved")
    torn = place / sorted(name for name in listing(place) if name.startswith("__0_"))[0]
    os.truncate(torn, torn.stat().st_size - 100)
    assert f"file {torn.name} has" in words(CheckpointError, lambda: fresh().load(place))[1]
    assert "the file is torn" in words(CheckpointError, lambda: fresh().load(place))[2]


def test_a_save_that_died_is_no_checkpoint_and_the_old_one_stays(tmp_path: Path) -> None:
    place = saved(tmp_path / "saved")
    shutil.copytree(place, tmp_path / ".saved.saving")
    (tmp_path / ".saved.saving" / ".metadata").unlink()
    in_threads(2, lambda: fresh().load(place))
    saved(place)  # clears what was left
    assert listing(tmp_path) == {"saved"}
    shutil.move(place, tmp_path / ".saved.saving")
    (tmp_path / ".saved.saving" / ".metadata").unlink()
    assert words(CheckpointError, lambda: fresh().load(place))[0] == (
        f"there is no checkpoint {place}; a save into it was torn off (.saved.saving beside it is not complete)")


def test_dying_between_the_two_renames_loses_nothing(tmp_path: Path) -> None:
    place = saved(tmp_path / "saved")
    shutil.move(place, tmp_path / ".saved.old")
    in_threads(2, lambda: fresh().load(place))
    saved(place)
    assert listing(tmp_path) == {"saved"}


def test_a_rename_that_fails_puts_the_old_one_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = saved(tmp_path / "saved")
    before = (place / ".metadata").read_bytes()
    real = Path.rename

    def fails(self: Path, target: Any) -> Any:
        if self.name == ".saved.saving":
            raise OSError(5, "Input/output error")
        return real(self, target)

    monkeypatch.setattr(folder.Path, "rename", fails)
    assert "Input/output error" in words(CheckpointError, lambda: fresh().save(place))[2]
    assert (place / ".metadata").read_bytes() == before
    assert listing(tmp_path) == {"saved"}


@pytest.mark.parametrize(("kind", "prepare", "call", "said"), [
    (UsageError, lambda place: place.write_text(""), lambda e, p: e.save(p), "is a file; give engine.save() a folder"),
    (UsageError, lambda place: (place.mkdir(), (place / "thesis.txt").write_text("")), lambda e, p: e.save(p),
     "is not empty and is no checkpoint; give engine.save() a folder of its own"),
    (UsageError, lambda place: None, lambda e, p: e.save(p, loader=3), "loader=int has no state to save"),
    (CheckpointError, lambda place: None, lambda e, p: e.load(p), "there is no checkpoint"),
    (CheckpointError, lambda place: place.mkdir(), lambda e, p: e.load(p), "it has no .metadata file"),
    (UsageError, lambda place: None, lambda e, p: e.save("/"), "'/' is no place for a checkpoint"),
])
def test_refusals_are_one_sentence_on_every_rank(kind: type[Exception], prepare: Any, call: Any, said: str,
                                                 tmp_path: Path) -> None:
    prepare(tmp_path / "place")
    for told in words(kind, lambda: call(fresh(), tmp_path / "place"), size=2):
        assert said in told


def test_moments_at_which_nothing_can_be_saved(tmp_path: Path) -> None:
    def window() -> None:
        engine = wrap(odd(), "zero2+accum2", two_groups)
        engine.backward(engine(torch.zeros(2, 2, dtype=torch.long), torch.zeros(2, 2, dtype=torch.long)))
        engine.save(tmp_path / "saved")

    def inside() -> None:
        engine = fresh("zero3")
        with engine.gathered():
            engine.save(tmp_path / "saved")

    assert "between a backward and engine.step()" in words(StateError, window)[1]
    assert "called inside engine.gathered(); leave its `with` block first" in words(StateError, inside)[1]


def test_ranks_that_do_not_share_a_file_system_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = store.finish

    def elsewhere(place: Path, *rest: Any) -> Any:
        (place / "__1_0.distcp").unlink()
        return real(place, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(store, "finish", elsewhere)
        assert "__1_0.distcp, which another rank has written; all ranks must see the same" in words(
            CheckpointError, lambda: fresh().save(tmp_path / "saved"), size=2)[1]
    with monkeypatch.context() as patch:
        patch.setattr(folder.Folder, "appears", lambda self: self.new.is_dir() and dplab.init().rank == 0)
        said = words(CheckpointError, lambda: fresh().save(tmp_path / "saved"), size=2)[0]
    assert "that rank 0 has made is not there; all ranks must see the same file system (on rank 1)" in said
    assert not folder.Folder(tmp_path / "nowhere").appears(limit=0.01)
    assert not list(tmp_path.iterdir())


def test_one_rank_that_cannot_tells_the_others_which(tmp_path: Path) -> None:
    def ranks() -> str:
        engine = fresh()
        parts = {"loader": object()} if engine.world.rank == 0 else {}
        return caught(UsageError, lambda: engine.save(tmp_path / "saved", **parts))

    said = in_threads(2, ranks)
    assert said[1] == f"{said[0]} (on rank 0)"


def test_two_saves_into_one_place_come_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is being written to is no save that died: it is waited for, then the second is refused by name."""
    place, engine = tmp_path / "saved", fresh("ddp")
    other = folder.Folder(place)
    other.begin()
    (other.new / "half").write_text("of another's")
    monkeypatch.setattr(folder, "_BUSY_S", 0.1)
    said = caught(CheckpointError, lambda: engine.save(place))
    assert f"another save into {place} is under way, of another engine or program; wait until it has ended" in said
    assert (other.new / "half").read_text() == "of another's"
    other.abandon()
    engine.save(place)
    assert listing(place)

    left = folder.Folder(place)      # one that died: nobody holds it
    left.begin()
    (left.new / "half").write_text("of a save that died")
    del left
    engine.save(place)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved"]


def test_saves_of_two_threads_into_one_place_all_leave_a_whole_one(tmp_path: Path) -> None:
    place = tmp_path / "saved"

    def save(number: int) -> None:
        for turn in range(20):
            one = folder.Folder(place)
            one.begin()
            (one.new / folder.METADATA).write_text(f"{number} {turn}")
            (one.new / "data").write_text(f"{number} {turn}")
            one.publish()

    threads = [threading.Thread(target=save, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (place / folder.METADATA).read_text() == (place / "data").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@pytest.mark.parametrize("there", [True, False])
def test_a_place_that_is_a_link_stays_one_and_what_it_stands_for_is_saved_into(there: bool, tmp_path: Path) -> None:
    real, link, engine = tmp_path / "disk" / "real", tmp_path / "saved", fresh("ddp")
    real.parent.mkdir()
    if there:
        real.mkdir()
    link.symlink_to(real)
    for _ in range(3):
        engine.save(link)
        assert link.is_symlink()
        assert (real / ".metadata").is_file()
        assert (listing(tmp_path), listing(real.parent)) == ({"saved", "disk"}, {"real"})
    fresh("ddp").load(link)


def test_a_save_that_cannot_begin_holds_up_no_later_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, engine = saved(tmp_path / "saved"), fresh("ddp")
    shutil.copytree(place, tmp_path / ".saved.old")

    def fails(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(folder.shutil, "rmtree", fails)
        assert "Permission denied" in caught(CheckpointError, lambda: engine.save(place))
    monkeypatch.setattr(folder, "_BUSY_S", 0.0)
    engine.save(place)
    assert listing(tmp_path) == {"saved"}


def test_two_places_in_one_call_are_told(tmp_path: Path) -> None:
    def ranks() -> str:
        engine = fresh()
        return caught(UsageError, lambda: engine.save(tmp_path / str(engine.world.rank)))

    assert "on rank 0 and with" in in_threads(2, ranks)[1]


def test_another_optimizer_or_other_groups_are_told(tmp_path: Path) -> None:
    place = saved(tmp_path / "saved")

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    def one_group(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters)

    def other_groups(parameters: Any) -> torch.optim.Optimizer:
        listed = list(parameters)
        return torch.optim.AdamW([{"params": listed[:1]}, {"params": listed[1:]}])

    assert "holds the state of AdamW, and the optimizer is SGD" in words(
        UsageError, lambda: wrap(odd(), "zero2", sgd).load(place))[1]
    assert "has 2 parameter groups and the optimizer has 1" in words(
        UsageError, lambda: wrap(odd(), "zero2", one_group).load(place))[1]
    assert "parameter group 0 of checkpoint" in words(
        UsageError, lambda: wrap(odd(), "zero2", other_groups).load(place))[1]
    assert "holds 'embed.weight', which it does not hold here; group parameters as" in words(
        UsageError, lambda: wrap(odd(), "zero2", other_groups).load(place))[1]
    assert "holds no state of 'loader'; it holds none" in words(
        UsageError, lambda: fresh().load(place, loader=torch.optim.lr_scheduler))[1]
