"""`torch:ddp`: torch.nn.parallel.DistributedDataParallel, gradients as views of its buckets."""

from __future__ import annotations

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from dplab.peers.base import Setup, Trainer, Untold, plain_step
from dplab.peers.group import join


class TorchDDP(Untold):
    """DDP with a replicated optimizer."""

    def __init__(self, setup: Setup) -> None:
        join(setup.world)
        self.model = DistributedDataParallel(setup.model, gradient_as_bucket_view=True)
        self.optimizer = setup.optimizer(self.model.parameters(), lr=setup.lr)  # type: ignore[call-arg]

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """One step; DDP reduces in backward."""
        return plain_step(self.model, self.optimizer, x, y)


def start(setup: Setup) -> Trainer:
    """The rank's trainer."""
    return TorchDDP(setup)
