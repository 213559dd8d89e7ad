"""dplab itself: `ddp`, `zero1`, `zero2`, `zero3`, or any one-line strategy."""

from __future__ import annotations

from torch import Tensor

from dplab.engine import parallelize
from dplab.peers.base import Setup, Trainer


class Ours:
    """An engine of ours."""

    def __init__(self, setup: Setup) -> None:
        self.engine = parallelize(
            setup.model, strategy=setup.strategy,
            optimizer=lambda params: setup.optimizer(params, lr=setup.lr))  # type: ignore[call-arg]

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """One micro-batch, and a step where it closes a window."""
        loss: Tensor = self.engine(x, y)
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    def memory(self) -> dict[str, int]:
        """The ledger."""
        return self.engine.memory()

    def wire(self) -> dict[str, dict[str, int]]:
        """The wire's counters."""
        return self.engine.wire()


def start(setup: Setup) -> Trainer:
    """The rank's trainer."""
    return Ours(setup)
