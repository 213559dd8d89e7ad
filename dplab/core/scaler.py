"""Dynamic loss scaling: as large a factor on the loss as fp16 gradients bear.

The rule is torch.amp.GradScaler's: start at 2^16, halve on overflow, double after 2000 steps without. An
overflow anywhere is one on every rank (it travels in the control message), so all skip a step or none, and
every rank holds the same scale without asking.
"""

from __future__ import annotations

from dataclasses import dataclass

FLOOR = 1.0


@dataclass
class LossScaler:
    """`scale` multiplies the loss; `good` counts steps since it last changed."""

    scale: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    window: int = 2000
    good: int = 0

    @property
    def at_floor(self) -> bool:
        """True where another overflow cannot be answered by a smaller scale."""
        return self.scale <= FLOOR

    def update(self, *, overflow: bool) -> None:
        """After every window, with what the ranks agreed on."""
        if overflow:
            self.scale, self.good = max(FLOOR, self.scale * self.backoff), 0
            return
        self.good += 1
        if self.good == self.window:
            self.scale, self.good = self.scale * self.growth, 0
