"""`engine.save` and `engine.load`: what is collected, what is agreed on, in which order it is put back."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from dplab.checkpoint import chance, pieces
from dplab.checkpoint.feedback import Feedback
from dplab.checkpoint.folder import Folder
from dplab.checkpoint.model import ModelState
from dplab.checkpoint.optimizer import OptimizerState
from dplab.checkpoint.pieces import Leaf, Share
from dplab.checkpoint.saving import Job, Saving, Snapshot, agree
from dplab.checkpoint.tensorfile import Export, Import, is_tensor_file
from dplab.checkpoint.trained import Trained
from dplab.errors import CheckpointError, StateError, UsageError
from dplab.telemetry.recorder import now
from dplab.wire.rollcall import RollCall

if TYPE_CHECKING:
    from dplab.checkpoint.reading import Stored

FORMAT = 1
GENERAL: pieces.Path = ("dplab", "general")
Place = str | os.PathLike[str]


class Stateful(Protocol):
    """A scheduler, a loader: what has a state that can be taken and given back."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...


class Checkpoints:
    """Saves and loads one engine. Made on all ranks together; its verbs are collective."""

    def __init__(self, trained: Trained) -> None:
        self.trained = trained
        self._calls = RollCall(trained.world, "checkpoints")
        self._beside = RollCall(trained.world, "checkpoints beside training")
        self._last: Saving | None = None

    def save(self, place: Place, *, wait: bool, limit: float, steps: int, parts: Mapping[str, Stateful],
             done: Callable[[], None] = lambda: None) -> Saving:
        """As `Engine.save`; `done` is called by rank 0 when the checkpoint is complete."""
        what = f"engine.save({str(place)!r})"
        self._end_last()
        if is_tensor_file(place):
            return self._export(Path(place), what, wait=wait, limit=limit, parts=parts)
        problem, job = None, None
        try:
            folder = Folder(place)
            self._refuse_moment(what)
            # whoever goes on from here finds what the run has told up to here
            self.trained.recorder.flush()
            folder.refuse_other_content()
            model, optimizer = ModelState(self.trained), OptimizerState(self.trained)
            for bucket in self.trained.buckets:
                bucket.params.refresh_master()
            share = Share.of([*model.items(), *optimizer.items(), *Feedback(self.trained).items(),
                              *self._general(steps, parts)])
            order: list[pieces.Path] = [("model", name) for name in model.entries]
            aliases: dict[pieces.Path, pieces.Path] = {
                ("model", name): ("model", first) for name, first in model.tied.items()}
            job = Job(folder, self.trained.world.rank, share, order, aliases, self.trained.recorder, done)
        except Exception as error:
            problem = error
        agree(self._calls, problem, what=what, limit=limit, said=str(place),
              also=None if job is None else job.folder.begin)
        assert job is not None
        if wait:
            job.run(self._calls)
            return Saving(job.folder.path)
        began = self.trained.recorder.open("checkpoint", "snapshot")
        snapshot = Snapshot(job, self.trained.world.device)
        self._last = Saving(job.folder.path, lambda: snapshot.run(self._beside), snapshot.taken)
        self.trained.recorder.span("checkpoint", "snapshot", began, now(), bytes=snapshot.nbytes)
        return self._last

    def settle(self) -> None:
        """What the optimizer holds is about to change: waits for a snapshot of it that is still being taken."""
        if self._last is not None:
            self._last.taken()

    def load(self, place: Place, *, strict: bool, optimizer: bool, limit: float, parts: Mapping[str, Stateful]) -> int:
        """As `Engine.load`."""
        what, began = f"engine.load({str(place)!r})", self.trained.recorder.open("checkpoint", "load")
        self._end_last()
        if is_tensor_file(place):
            return self._import(Path(place), what, strict=strict, limit=limit, parts=parts)
        problem = None
        try:
            from dplab.checkpoint.reading import Stored  # imports for half as long as torch itself

            self._refuse_inside(what)
            stored = Stored(Folder(place).readable())
            model, state = ModelState(self.trained), OptimizerState(self.trained)
            paths = model.check(stored, strict=strict)
            general = self._read_general(stored, parts, optimizer=optimizer)
            if optimizer:
                state.check(stored, strict=strict)
        except Exception as error:
            problem = error
        agree(self._calls, problem, what=what, limit=limit, said=str(place))
        self._let_go()
        nbytes = 0
        try:
            nbytes = model.read(stored, paths) + (state.read(stored) if optimizer else 0)
            nbytes += Feedback(self.trained).read(stored, general.get("feedback", {}) if optimizer else {})
            self._restore(stored, general, parts)
        except Exception as error:
            problem = CheckpointError(f"{what} failed halfway, so that weights and state are not to be used: "
                                      f"{error if isinstance(error, CheckpointError) else repr(error)}")
            problem.__cause__ = error
        agree(self._calls, problem, what=what)
        self._publish()
        self.trained.recorder.span("checkpoint", "load", began, now(), bytes=nbytes)
        return int(general.get("steps", 0))

    def _export(self, file: Path, what: str, *, wait: bool, limit: float, parts: Mapping[str, Stateful]) -> Saving:
        problem, began = None, self.trained.recorder.open("checkpoint", "save")
        try:
            self._refuse_inside(what)
            if parts or not wait:
                raise UsageError(f"{what} writes the weights alone and at once; leave wait=False and "
                                 f"{', '.join(parts) or 'parts'} out, or give it a folder")
            export = Export(ModelState(self.trained), file)
        except Exception as error:
            problem = error
        agree(self._calls, problem, what=what, limit=limit, said=str(file),
              also=lambda: file.parent.mkdir(parents=True, exist_ok=True))
        nbytes = 0
        try:
            nbytes = export.write()
        except OSError as error:
            problem = CheckpointError(f"{what} failed, and nothing there has changed: {type(error).__name__}: {error}")
        agree(self._calls, problem, what=what)
        self.trained.recorder.span("checkpoint", "save", began, now(), bytes=nbytes)
        return Saving(file)

    def _import(self, file: Path, what: str, *, strict: bool, limit: float, parts: Mapping[str, Stateful]) -> int:
        problem, began = None, self.trained.recorder.open("checkpoint", "load")
        try:
            self._refuse_inside(what)
            if parts:
                raise UsageError(f"{what} has the weights alone; leave {', '.join(parts)} out")
            weights = Import(ModelState(self.trained), file, strict=strict)
        except Exception as error:
            problem = error
        agree(self._calls, problem, what=what, limit=limit, said=str(file))
        self._let_go()
        nbytes = weights.read()
        self._publish()
        self.trained.recorder.span("checkpoint", "load", began, now(), bytes=nbytes)
        return 0

    def _let_go(self) -> None:
        """Nothing stays gathered: the shards are about to be written."""
        if self.trained.full.gathers is not None:
            self.trained.full.gathers.release()

    def _publish(self) -> None:
        """What was read into the owned parts becomes everybody's; collective."""
        for pending in [bucket.params.publish(bucket.index, "init") for bucket in self.trained.buckets]:
            pending.wait()
        self.trained.buffers.settle()

    def of_rank_0(self, value: Any, *, limit: float) -> Any:
        """Rank 0's value on every rank; collective."""
        self._calls.gather(None, what="manager.load()", limit=limit)
        return self._calls.tell(value, what="manager.load()", limit=limit)

    def _end_last(self) -> None:
        """The save under way comes first; one that failed is told now, unless its own `wait()` has told."""
        last, self._last = self._last, None
        if last is not None and not last.told:
            last.wait()

    def _refuse_inside(self, what: str) -> None:
        self.trained.full.refuse_inside(what)

    def _refuse_moment(self, what: str) -> None:
        self._refuse_inside(what)
        if self.trained.reduction.window.backwards:
            raise StateError(f"{what} was called between a backward and engine.step(), where there are gradients that "
                             f"a checkpoint does not hold; call it after engine.step()")

    def _general(self, steps: int, parts: Mapping[str, Stateful]) -> list[Leaf]:
        """What is neither model nor optimizer; the generators of every rank, the rest rank 0's."""
        trained = self.trained
        local = trained.buffers.rule == "local"
        leaves = [Leaf.of(("dplab", "ranks", str(trained.world.rank)), {
            "generators": chance.generators(trained.world.device),
            "buffers": {name: value.detach().clone() for name, value in ModelState(trained).others.items()
                        if local and isinstance(value, torch.Tensor)}})]
        if trained.world.rank == 0:
            scaler = trained.reduction.scaler
            leaves.append(Leaf.of(GENERAL, {
                "format": FORMAT, "steps": steps, "world_size": trained.world.size, "strategy": trained.strategy,
                "optimizer": type(trained.optimizer.optimizer).__name__,
                "feedback": Feedback(trained).described(),
                "scaler": None if scaler is None else {"scale": scaler.scale, "good": scaler.good}}))
            for name, part in parts.items():
                if not hasattr(part, "state_dict") or not hasattr(part, "load_state_dict"):
                    raise UsageError(f"{name}={type(part).__name__} has no state to save; give what has state_dict() "
                                     f"and load_state_dict() (a loader, a scheduler)")
                leaves.append(Leaf.of(("dplab", "parts", name), part.state_dict()))
        return leaves

    def _read_general(self, stored: Stored, parts: Mapping[str, Stateful], *, optimizer: bool) -> dict[str, Any]:
        """The same, as far as a checkpoint has it; another tool's has none. Raises UsageError for what cannot be."""
        general = stored.value(GENERAL) if GENERAL in stored.paths else {}
        if not isinstance(general, dict) or general.get("format", FORMAT) != FORMAT:
            raise UsageError(f"checkpoint {stored.folder} was written by a newer dplab; load it with that")
        mine = type(self.trained.optimizer.optimizer).__name__
        if optimizer and general.get("optimizer", mine) != mine:
            raise UsageError(f"checkpoint {stored.folder} holds the state of {general['optimizer']}, and the optimizer "
                             f"is {mine}; use the one that was saved, or load the weights alone with optimizer=False")
        for name in parts:
            if ("dplab", "parts", name) not in stored.paths:
                has = ", ".join(str(path[2]) for path in stored.under("dplab", "parts")) or "none"
                raise UsageError(f"checkpoint {stored.folder} holds no state of {name!r}; it holds {has}")
        return general

    def _restore(self, stored: Stored, general: dict[str, Any], parts: Mapping[str, Stateful]) -> None:
        trained = self.trained
        scaler, saved = trained.reduction.scaler, general.get("scaler")
        if scaler is not None and saved is not None:
            scaler.scale, scaler.good = float(saved["scale"]), int(saved["good"])
        for name, part in parts.items():
            part.load_state_dict(stored.value(("dplab", "parts", name)))
        path: pieces.Path = ("dplab", "ranks", str(trained.world.rank))
        # generators, and buffers that each rank has for itself, of another number of ranks belong to other data
        if general.get("world_size") == trained.world.size and path in stored.paths:
            mine = stored.value(path)
            chance.restore(mine["generators"], trained.world.device)
            for name, value in ModelState(trained).others.items():
                if trained.buffers.rule == "local" and name in mine["buffers"]:
                    value.detach().copy_(mine["buffers"][name])
