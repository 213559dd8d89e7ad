"""The optimizer's part of a checkpoint: state by parameter name, groups by number, as torch's own tools lay it out.

What lies along a parameter (moments) is a tensor of its shape; the rest (step counters) is stored with its first
element. Loading cuts the runs where parameters that share one have another state, so that each gets its own.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from dplab.checkpoint.manifest import Shape, differences
from dplab.checkpoint.pieces import Leaf, Path, Piece
from dplab.checkpoint.trained import Trained
from dplab.core.bucket import Bucket
from dplab.core.optim import Run
from dplab.errors import UsageError

if TYPE_CHECKING:
    from dplab.checkpoint.reading import Stored

STATE, GROUPS = ("optim", "state"), ("optim", "param_groups")
NUMBERS = frozenset({"mu_product", "eta", "mu"})
"""What torch's NAdam and ASGD keep as one number a parameter: among 0-dim parameters alone, moments look the same."""


class OptimizerState:
    """The state of `trained`'s optimizer."""

    def __init__(self, trained: Trained) -> None:
        self.trained, self.optimizer = trained, trained.optimizer.optimizer
        self.names = [[trained.name(parameter) for parameter in members if parameter in trained.slots]
                      for members in trained.optimizer.members]

    def items(self) -> Iterator[Piece | Leaf]:
        """What this rank writes."""
        for run in self._runs():
            state = self.optimizer.state.get(run.parameter, {})
            within, begin = self.trained.written(run.bucket), self._begin(run)
            here = max(within[0], begin), min(within[1], begin + run.parameter.numel())
            for slot in run.slots:
                name = self._name(run.bucket, slot)
                for what, value in state.items():
                    path: Path = (*STATE, name, what)
                    if _along(what, value, run):
                        for piece in self.trained.pieces(run.bucket, slot, path, (begin, value.view(-1)), within):
                            yield replace(piece, held=True)
                    elif self.trained.holds_first(run.bucket, slot, here):
                        yield Piece.whole(path, value) if isinstance(value, torch.Tensor) else Leaf.of(path, value)
        if self.trained.world.rank == 0:
            for number, group in enumerate(self.optimizer.param_groups):
                for option, value in {**group, "params": self.names[number]}.items():
                    path = (*GROUPS, number, option)
                    yield Piece.whole(path, value) if isinstance(value, torch.Tensor) else Leaf.of(path, value)

    def check(self, stored: Stored, *, strict: bool) -> None:
        """Raises UsageError where the checkpoint's state or groups are not of this optimizer."""
        trained, place = self.trained, f"checkpoint {stored.folder}"
        if not stored.under("optim"):
            raise UsageError(f"{place} has no optimizer state; load the weights alone with "
                             f"engine.load(..., optimizer=False)")
        count = len({path[2] for path in stored.under(*GROUPS)})
        if count != len(self.names):
            raise UsageError(f"{place} has {count} parameter groups and the optimizer has {len(self.names)}; build it "
                             f"with the groups that were saved")
        for number, names in enumerate(self.names):
            path = (*GROUPS, number, "params")
            saved = stored.value(path) if path in stored.paths else names
            if not isinstance(saved, list) or (strict and set(map(str, saved)) != set(names)):
                raise UsageError(f"parameter group {number} of {place} holds {_odd(saved, names)}; group parameters as "
                                 f"they were when it was saved")
        states = [(str(path[2]), path) for path in stored.under(*STATE) if len(path) == 4]
        shapes, along = self._shapes(), self._along(stored)
        if trained.optimizer.element_wise:
            # what is no moment can only be a number
            found = {f"{name}: {path[3]}": (stored.shape(path), shapes[name]) for name, path in states
                     if str(path[3]) not in along and name in shapes and stored.shape(path) not in (None, (), (1,))}
            if said := differences({name: wanted for name, (_, wanted) in found.items()},
                                   {name: saved for name, (saved, _) in found.items()}):
                raise UsageError(f"the optimizer state of {place} is of another model: {'; '.join(said)}")
        if strict and (strange := [name for name, _ in states if name not in shapes]):
            raise UsageError(f"the optimizer state of {place} is of another model: it holds state of {strange[0]!r}, "
                             f"which is not in this one; load the weights alone with optimizer=False")

    def read(self, stored: Stored) -> int:
        """Replaces state and group options; returns bytes read."""
        known, along = self._shapes(), self._along(stored)
        paths: dict[str, dict[str, Path]] = {}
        for path in stored.under(*STATE):
            if len(path) == 4 and str(path[2]) in known:
                paths.setdefault(str(path[2]), {})[str(path[3])] = path
        single: dict[tuple[Bucket, int], dict[str, Any]] = {
            (bucket, slot): {what: stored.value(path) for what, path in paths.get(
                self._name(bucket, slot), {}).items() if what not in along}
            for bucket, slot in {(run.bucket, slot): None for run in self._runs() for slot in run.slots}}

        def fate(bucket: Bucket, slot: int) -> Hashable:
            of = paths.get(self._name(bucket, slot), {})
            kinds = tuple((what, str(stored.dtype(of[what]))) for what in sorted(of) if what in along)
            return kinds, tuple((what, repr(_plain(value))) for what, value in sorted(single[bucket, slot].items()))

        self.optimizer.state.clear()
        self.trained.optimizer.split(fate)
        pieces: list[Piece] = []
        for number, runs in enumerate(self.trained.optimizer.runs):
            self._read_group(stored, number)
            for run in runs:
                pieces += self._fresh(stored, run, number, {what for what in paths.get(
                    self._name(run.bucket, run.slots[0]), {}) if what in along}, single[run.bucket, run.slots[0]])
        return stored.read_into(pieces)

    def _fresh(self, stored: Stored, run: Run, number: int, along: set[str],
               single: dict[str, Any]) -> Iterator[Piece]:
        """Gives a run its state, with room for what lies along it; yields what is to be read into that."""
        if not along and not single:
            return
        group = self.optimizer.param_groups[number]
        counts_on_device = bool(group.get("capturable") or group.get("fused"))
        like, begin = run.parameter, self._begin(run)
        state: dict[str, Any] = {}
        for what, value in single.items():
            host = what == "step" and not counts_on_device
            state[what] = value.clone().to("cpu" if host else like.device) if isinstance(
                value, torch.Tensor) else copy.copy(value)
        for what in sorted(along):
            first = (*STATE, self._name(run.bucket, run.slots[0]), what)
            state[what] = torch.zeros_like(like, dtype=stored.dtype(first), requires_grad=False)
            for slot in run.slots:
                path = (*STATE, self._name(run.bucket, slot), what)
                yield from self.trained.pieces(run.bucket, slot, path, (begin, state[what].view(-1)),
                                               self.trained.owned(run.bucket))
        self.optimizer.state[run.parameter] = state

    def _read_group(self, stored: Stored, number: int) -> None:
        group = self.optimizer.param_groups[number]
        for path in stored.under(*GROUPS, number):
            option = str(path[3]) if len(path) == 4 else ""
            if option in ("", "params"):
                continue
            value = stored.value(path)
            if isinstance(group.get(option), torch.Tensor):
                group[option].copy_(value) if isinstance(value, torch.Tensor) else group[option].fill_(value)
            else:
                group[option] = value

    def _along(self, stored: Stored) -> set[str]:
        """Names of state that lies along parameters: where it has the parameter's shape, whatever the parameter."""
        shapes = self._shapes()
        paths = [path for path in stored.under(*STATE) if len(path) == 4 and str(path[2]) in shapes]
        single = {str(path[3]) for path in paths if stored.shape(path) != shapes[str(path[2])]}
        wide = {str(path[3]) for path in paths if stored.shape(path)}
        return {str(path[3]) for path in paths} - single - {"step"} - (NUMBERS - wide)

    def _shapes(self) -> dict[str, Shape]:
        return {self._name(bucket, slot): bucket.layout.slots[slot].shape
                for bucket in self.trained.buckets for slot in range(len(bucket.names))}

    def _runs(self) -> Iterator[Run]:
        for runs in self.trained.optimizer.runs:
            yield from runs

    def _begin(self, run: Run) -> int:
        """Where a run starts in its bucket's flat buffer."""
        return self.trained.owned(run.bucket)[0] + run.start

    def _name(self, bucket: Bucket, slot: int) -> str:
        return self.trained.full.plain(bucket.names[slot])


def _along(what: str, value: Any, run: Run) -> bool:
    # a 0-dim parameter's moments have the shape of its step counter
    return isinstance(value, torch.Tensor) and value.shape == run.parameter.shape and what != "step"


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _odd(saved: Any, names: list[str]) -> str:
    """The first difference between a group as it was saved and as it is."""
    if not isinstance(saved, list):
        return f"a {type(saved).__name__} and no list of names"
    return next((f"{name!r}, which it does not hold here" for name in saved if name not in names),
                next((f"no {name!r}, which it holds here" for name in names if name not in saved), "other names"))
