"""The full values of a model that is laid out in buckets: to read, to write, to export, to compare between ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from dplab.core import build
from dplab.core.bucket import Bucket
from dplab.core.gathers import Gathers
from dplab.core.params import checksum
from dplab.errors import StateError, UsageError
from dplab.wire.rollcall import RollCall
from dplab.wire.world import Mesh, World

LATE = 60.0
"""Seconds for which rank 0 waits for the others to make the same call."""
BUSY = 600.0
"""Seconds for which the others wait for rank 0, which may be evaluating or writing."""


class Plain:
    """Names without what torch.compile and torch's checkpoint_wrapper put into them; real modules keep theirs."""

    INNER = ("_orig_mod", "_checkpoint_wrapped_module")

    def __init__(self, model: nn.Module) -> None:
        self._wrapping: set[str] = set()
        for path, module in model.named_modules():
            for inner in self.INNER:
                if inner in module._modules and type(module).__module__.startswith("torch."):
                    self._wrapping |= {f"{outer}.{inner}".lstrip(".") for outer in (path, self(path))}

    def __call__(self, name: str) -> str:
        if not self._wrapping:
            return name
        parts, kept = name.split("."), list[str]()
        for place, part in enumerate(parts):
            # state dicts come without the outer wrapper's name already, where that has hooks of its own
            if not {".".join(parts[:place + 1]), ".".join([*kept, part])} & self._wrapping:
                kept.append(part)
        return ".".join(kept)


class Full:
    """Everything here is collective. `gathers` is None where the parameters are never sharded."""

    def __init__(self, model: nn.Module, buckets: Sequence[Bucket], gathers: Gathers | None, mesh: Mesh,
                 world: World) -> None:
        self.model, self.buckets, self.gathers, self.mesh = model, buckets, gathers, mesh
        # the other transports name whoever is missing or elsewhere at once
        self._calls = RollCall(world, "full values") if world.backend in ("gloo", "nccl") else None
        self.plain = Plain(model)
        self._slots = {self.plain(name): (bucket, slot) for bucket in buckets
                       for slot, name in enumerate(bucket.names)}
        self.writable = False

    @contextmanager
    def read(self) -> Iterator[None]:
        """Full parameters inside, to be read."""
        if self.gathers is None:
            yield
        else:
            with self.gathers.pin():
                yield

    @contextmanager
    def write(self) -> Iterator[None]:
        """Full parameters inside, readable and writable; afterwards rank 0's values are everybody's."""
        if self.writable:
            raise StateError("engine.gathered() was entered inside engine.gathered(); the parameters are there already")
        self._meet("engine.gathered()")
        with self.read():
            before = self._digests()
            self.writable = True
            try:
                yield
            finally:
                self.writable = False
                self._spread(before)

    def _spread(self, before: list[int]) -> None:
        """What any rank has written becomes rank 0's; what nobody has, a backward under way may still need."""
        changed = torch.tensor([now != then for now, then in zip(self._digests(), before, strict=True)],
                               dtype=torch.uint8, device=self.buckets[0].device)
        self.mesh.world.all_reduce(changed, op="max", purpose="init").wait()
        flags = iter(changed.tolist())
        for bucket in self.buckets:
            written = [parameter for parameter in bucket.parameters if next(flags)]
            for parameter in written:
                build.broadcast(parameter.detach(), self.mesh)
            if written:
                torch.autograd.graph.increment_version(written)
                bucket.params.take_back()
            bucket.params.settle()

    def _digests(self) -> list[int]:
        return [checksum(parameter) for bucket in self.buckets for parameter in bucket.parameters]

    def _meet(self, what: str) -> None:
        """Before the first collective of a call that people make on one rank only: whoever does not come is named."""
        if self._calls is not None:
            self._calls.gather(None, what=what, limit=LATE)
            self._calls.tell(what=what, limit=BUSY)

    def refuse_inside(self, what: str) -> None:
        """Raises StateError for what would move the weights while somebody may be writing to them."""
        if self.writable:
            raise StateError(f"{what} was called inside engine.gathered(); leave its `with` block first")

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The plain model's state_dict on the CPU; a master copy's values rather than their rounding."""
        self._meet("engine.full_state_dict()")
        with self.read():
            state = {self.plain(name): value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
                     for name, value in self.model.state_dict().items()}
        exact: dict[nn.Parameter, torch.Tensor] = {}
        for bucket in self.buckets:
            bucket.params.refresh_master()
            if bucket.params.master is not None:
                exact |= zip(bucket.parameters, [t.cpu() for t in bucket.whole(bucket.params.master)], strict=True)
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if parameter in exact and self.plain(name) in state:
                state[self.plain(name)] = exact[parameter].clone()
        return state

    def grad(self, name: str) -> torch.Tensor | None:
        """The averaged gradient of a parameter once the window is closed; None where no rank has one."""
        if self.plain(name) not in self._slots:
            raise UsageError(f"parameter {name!r} is not in the model; names are as in model.named_parameters()")
        bucket, slot = self._slots[self.plain(name)]
        return bucket.full_grad(slot) if bucket.trainable else None

    def check_agreement(self) -> None:
        """Raises StateError, naming parameter and ranks, where copies of a parameter differ between ranks."""
        self._meet("engine.check_agreement()")
        with self.read():
            mine = {name: checksum(p) for name, p in self.model.named_parameters()}
        every = self.mesh.world.gather_objects(mine)
        for name in mine:
            odd = [rank for rank, theirs in enumerate(every) if theirs[name] != every[0][name]]
            if odd:
                raise StateError(f"parameter {name!r} differs between rank 0 and ranks {odd}; something wrote to it "
                                 f"outside engine.gathered()")
