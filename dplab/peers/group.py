"""torch's default process group, which other engines need also where they are alone."""

from __future__ import annotations

import os

import torch.distributed as dist

from dplab.wire.world import World


def join(world: World) -> None:
    """Makes the default group where `dplab.init` had no need of one: in a world of one."""
    if dist.is_initialized():
        return
    backend = "nccl" if world.device.type == "cuda" else "gloo"
    rendezvous = os.environ.get("DPLAB_RENDEZVOUS")
    if rendezvous is None:
        rendezvous = "tcp://localhost:0"      # alone, so nobody has to find the port
    dist.init_process_group(backend, init_method=rendezvous, rank=world.rank, world_size=world.size)
