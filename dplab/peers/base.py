"""What a system under comparison is: something that takes a model and makes whole training steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from dplab.wire.world import World


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What every system starts from: equal weights on all ranks, one class of optimizer, one learning rate."""

    model: nn.Module
    optimizer: type[Optimizer]
    lr: float
    world: World
    strategy: str


class Trainer(Protocol):
    """A running system on one rank."""

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Forward, backward and optimizer step on this rank's batch; returns its loss, before the step."""

    def memory(self) -> dict[str, int]:
        """Bytes by category, as far as the system tells; empty where it does not."""

    def wire(self) -> dict[str, dict[str, int]]:
        """Count and bytes sent by collective; empty where the system does not count."""


Start = Callable[[Setup], Trainer]


class Untold:
    """Base of systems that tell neither memory nor wire."""

    def memory(self) -> dict[str, int]:
        """Not told."""
        return {}

    def wire(self) -> dict[str, dict[str, int]]:
        """Not told."""
        return {}


def plain_step(forward: Callable[..., Any], optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """One step as plain torch writes it; what synchronises is inside `forward`, its hooks or `optimizer`."""
    loss: Tensor = forward(x, y)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
