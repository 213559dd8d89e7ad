"""`torch:zero1`: DDP with ZeroRedundancyOptimizer, which all-reduces and then broadcasts what it stepped."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from dplab.peers.base import Setup, Trainer, Untold, plain_step
from dplab.peers.group import join


class TorchZero1(Untold):
    """DDP with a sharded optimizer."""

    def __init__(self, setup: Setup) -> None:
        join(setup.world)
        self.model = DistributedDataParallel(setup.model, gradient_as_bucket_view=True)
        self.optimizer = ZeroRedundancyOptimizer(
            self.model.parameters(), optimizer_class=setup.optimizer, lr=setup.lr)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """One step; DDP reduces in backward, the optimizer publishes."""
        return plain_step(self.model, self.optimizer, x, y)


def start(setup: Setup) -> Trainer:
    """The rank's trainer."""
    return TorchZero1(setup)
