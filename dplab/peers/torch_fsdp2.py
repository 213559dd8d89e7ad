"""`torch:fsdp2`: torch.distributed.fsdp.fully_shard over the model's own units, its closest match to `zero3`."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dplab.peers.base import Setup, Trainer, Untold, plain_step
from dplab.peers.group import join


class TorchFSDP2(Untold):
    """Parameters, gradients and optimizer sharded by dimension 0."""

    def __init__(self, setup: Setup) -> None:
        join(setup.world)
        mesh = init_device_mesh(setup.world.device.type, (setup.world.size,))
        units = getattr(setup.model, "shard_units", ())
        for module in setup.model.modules():
            if isinstance(module, units):
                fully_shard(module, mesh=mesh)
        fully_shard(setup.model, mesh=mesh)
        self.model = setup.model
        self.optimizer = setup.optimizer(self.model.parameters(), lr=setup.lr)  # type: ignore[call-arg]

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """One step; FSDP gathers and reduces in forward and backward."""
        return plain_step(self.model, self.optimizer, x, y)


def start(setup: Setup) -> Trainer:
    """The rank's trainer."""
    return TorchFSDP2(setup)
