"""`single`: every rank trains for itself. No synchronisation at all, the bound that no strategy can beat."""

from __future__ import annotations

from torch import Tensor

from dplab.peers.base import Setup, Trainer, Untold, plain_step


class Single(Untold):
    """Plain torch on one rank."""

    def __init__(self, setup: Setup) -> None:
        self.model = setup.model
        self.optimizer = setup.optimizer(setup.model.parameters(), lr=setup.lr)  # type: ignore[call-arg]

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """One step without peers."""
        return plain_step(self.model, self.optimizer, x, y)


def start(setup: Setup) -> Trainer:
    """The rank's trainer."""
    return Single(setup)
