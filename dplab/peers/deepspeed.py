"""`deepspeed:1|2|3`: DeepSpeed's ZeRO stages in fp32 with the same optimizer."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor

from dplab.peers.base import Setup, Trainer, Untold
from dplab.peers.group import join


class DeepSpeed(Untold):
    """A DeepSpeed engine of one stage."""

    def __init__(self, setup: Setup) -> None:
        if setup.world.device.type == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"      # asked for when deepspeed is imported
        join(setup.world)
        import deepspeed

        deepspeed.init_distributed(dist_backend=setup.world.backend, auto_mpi_discovery=False)
        # Clipping is on by default there, and off here and in torch.
        config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1,
                  "zero_optimization": {"stage": int(setup.strategy)}, "zero_allow_untested_optimizer": True,
                  "zero_force_ds_cpu_optimizer": False, "gradient_clipping": 0.0}
        optimizer = setup.optimizer(setup.model.parameters(), lr=setup.lr)  # type: ignore[call-arg]
        self.engine: Any = deepspeed.initialize(model=setup.model, optimizer=optimizer, config=config)[0]

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """One step."""
        loss: Tensor = self.engine(x, y)
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()


def start(setup: Setup) -> Trainer:
    """The rank's trainer."""
    return DeepSpeed(setup)
