"""The world a rank belongs to, and the mesh of two axes laid over it.

`init()` joins whatever set the ranks up: a thread world, a process group that is already there (Ray, a
user's own), `dplab.launch`, torchrun, or Slurm. Alone it is a world of one.
"""

from __future__ import annotations

import atexit
import os
import platform
import sys
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from dplab.errors import UsageError
from dplab.specs import BACKENDS
from dplab.telemetry import recorder
from dplab.topology import Topology
from dplab.wire.axes import Axes
from dplab.wire.codec import MakeCodec
from dplab.wire.collectives import Collectives, Transport
from dplab.wire.groups import SoloTransport, leave, transport_for
from dplab.wire.shm.group import register
from dplab.wire.threads import ThreadWorld

TIMEOUT = timedelta(minutes=10)
"""How long a collective waits for a rank before it is an error."""

_world: ContextVar[World | None] = ContextVar("world", default=None)


@dataclass(frozen=True)
class World:
    """This rank's place among the ranks: `device` is where its tensors belong."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    backend: str
    threads: ThreadWorld | None = field(default=None, repr=False)

    def transport(self, ranks: list[list[int]], group: dist.ProcessGroup | None = None) -> Transport:
        """The way to this rank's peers in `ranks`, a partition of the world; made on all ranks together."""
        mine = next(members for members in ranks if self.rank in members)
        if len(mine) == 1:
            return SoloTransport()
        if self.threads is not None:
            return self.threads.transport(self.rank, tuple(mine))
        if group is None and len(ranks) > 1:
            group, _ = dist.new_subgroups_by_enumeration(ranks)  # type: ignore[no-untyped-call]
        return transport_for(group or dist.group.WORLD)


@dataclass(frozen=True)
class Mesh:
    """Two axes over the ranks. Shards are cut along `shard`, equal copies lie along `replicate`."""

    replicate: Collectives
    shard: Collectives
    world: Collectives
    codec: MakeCodec | None = None
    """how gradients travel on it, where not as they are"""

    @property
    def pieces(self) -> int:
        """Into how many pieces more than shards a bucket is cut: where an all-reduce takes it apart."""
        return self.replicate.pieces if self.codec is None else self.replicate.size

    @classmethod
    def flat(cls, world: World, *, sharded: bool, topology: Topology | None = None) -> Mesh:
        """All ranks on one axis, the other of length 1. A `topology` is emulated; here and below."""
        axes = Axes(world, topology)
        everyone, nobody = axes.everyone, axes.nobody
        return cls(replicate=nobody, shard=everyone, world=everyone) if sharded else cls(
            replicate=everyone, shard=nobody, world=everyone)

    @classmethod
    def of(cls, world: World, mesh: Any, *, topology: Topology | None = None) -> Mesh:
        """From a DeviceMesh with the dimensions ("replicate", "shard"), or from a (replicate, shard) shape."""
        grid, groups = _grid(mesh, world)
        axes = Axes(world, topology)
        replicate, shard = axes.crossed(grid, groups)
        return cls(replicate=replicate, shard=shard, world=axes.everyone)

    @classmethod
    def hybrid(cls, world: World, *, sharded: bool, topology: Topology | None = None) -> Mesh:
        """By hosts: sharded inside each and replicated across them; where nothing is sharded, one axis that sums
        inside hosts first. Raises UsageError where there are not several hosts of several ranks."""
        axes = Axes(world, topology)
        if not sharded:
            return cls(replicate=axes.two_level(), shard=axes.nobody, world=axes.everyone)
        replicate, shard = axes.crossed(axes.hosts.grid())
        return cls(replicate=replicate, shard=shard, world=axes.everyone)


def _grid(mesh: Any, world: World) -> tuple[list[list[int]], dict[str, dist.ProcessGroup]]:
    """Rows of ranks that shard among themselves; and the groups, where the mesh already has them."""
    if isinstance(mesh, tuple):
        if len(mesh) != 2 or mesh[0] * mesh[1] != world.size:
            raise UsageError(f"mesh {mesh} does not cover {world.size} ranks; give (replicate, shard) sizes whose "
                             f"product is the world size")
        return [list(range(row * mesh[1], (row + 1) * mesh[1])) for row in range(mesh[0])], {}
    names = tuple(getattr(mesh, "mesh_dim_names", None) or ())
    if names != ("replicate", "shard"):
        raise UsageError(f"mesh has dimensions {names}; parallelize takes a DeviceMesh with mesh_dim_names "
                         f"('replicate', 'shard'), or a (replicate, shard) tuple")
    return mesh.mesh.tolist(), {name: mesh.get_group(name) for name in names}


def adopt(world: World) -> None:
    """Makes `world` what `init()` returns in this context."""
    _world.set(world)


def init(*, backend: str | None = None, device: str | torch.device | None = None) -> World:
    """Joins the world that this process was started into; call it once, early. Later calls return the same.

    `backend`: `nccl`, `gloo`, or `shm` (CPU tensors, all ranks on one host). None: nccl where every rank of the host
    has a GPU of its own, shm for CPU ranks of one x86-64 Linux host, else gloo.
    `device`: None: the GPU of this rank, else the CPU.
    """
    known = _world.get()
    if known is not None and (known.size == 1 or known.threads or dist.is_initialized()):
        return known
    place, limit = _environment(), _limit()
    chosen = torch.device(device) if device is not None else _device(place["local_rank"])
    backend = backend or os.environ.get("DPLAB_BACKEND") or None
    if not dist.is_initialized() and place["size"] > 1:
        backend = _backend(backend, chosen, place)
        register()
        dist.init_process_group(backend, **_meeting(place, limit), rank=place["rank"], world_size=place["size"],
                                timeout=limit)
        atexit.register(leave)
    if dist.is_initialized():
        world = World(dist.get_rank(), dist.get_world_size(), place["local_rank"], chosen, str(dist.get_backend()))
    else:
        world = World(0, 1, place["local_rank"], chosen, "solo")
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    adopt(world)
    return world


def _limit() -> timedelta:
    """How long a collective waits for a rank before it is an error: DPLAB_TIMEOUT in seconds, else TIMEOUT."""
    text = os.environ.get("DPLAB_TIMEOUT")
    if not text:
        return TIMEOUT
    try:
        seconds = float(text)
        if not 0 < seconds < float("inf"):
            raise ValueError(text)
    except ValueError:
        raise UsageError(f"DPLAB_TIMEOUT={text!r} is not allowed; it is the seconds that a collective waits for a "
                         f"rank, a number above 0") from None
    return timedelta(seconds=seconds)


def _meeting(place: dict[str, Any], limit: timedelta) -> dict[str, Any]:
    """Where the ranks meet. After a restart torchrun gives them the store of before, in which the dead still stand."""
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
    if not attempt or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or place["rendezvous"] != "env://":
        return {"init_method": place["rendezvous"]}
    store, _, _ = next(rendezvous("env://", place["rank"], place["size"], timeout=limit))
    return {"store": PrefixStore(f"attempt-{attempt}", store)}


def _environment() -> dict[str, Any]:
    """Rank, size and rendezvous as dplab.launch, torchrun or Slurm put them into the environment."""
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])
        local_rank, told = int(env.get("LOCAL_RANK", rank)), env.get("LOCAL_WORLD_SIZE")
    elif "SLURM_PROCID" in env and int(env.get("SLURM_NTASKS", 1)) > 1:
        rank, size = int(env["SLURM_PROCID"]), int(env["SLURM_NTASKS"])
        local_rank, told = int(env.get("SLURM_LOCALID", rank)), env.get("SLURM_NTASKS_PER_NODE")
    else:
        return {"rank": 0, "size": 1, "local_rank": 0, "local_size": 1, "one_host": True, "rendezvous": None}
    rendezvous = env.get("DPLAB_RENDEZVOUS") or ("env://" if "MASTER_ADDR" in env and "MASTER_PORT" in env else None)
    if size > 1 and rendezvous is None and not dist.is_initialized():
        raise UsageError(f"rank {rank} of {size} does not know where to meet the others; set MASTER_ADDR and "
                         f"MASTER_PORT, or start the program with torchrun or dplab.launch")
    # where nobody says how many ranks this host has, they are taken for all, but only a file says that they are
    local_size = size if told is None else int(told)
    one_host = local_size == size and (told is not None or str(rendezvous).startswith("file:"))
    return {"rank": rank, "size": size, "local_rank": local_rank, "local_size": local_size, "one_host": one_host,
            "rendezvous": rendezvous}


def _device(local_rank: int) -> torch.device:
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return torch.device(kind.type, local_rank % torch.accelerator.device_count())


def _backend(asked: str | None, device: torch.device, place: dict[str, Any]) -> str:
    """nccl wants a GPU for each rank; more ranks than GPUs share them over gloo, and one line says so.

    CPU ranks that are known to be on one host share memory where the machine can do that.
    """
    local_size = place["local_size"]
    if asked is not None and asked not in BACKENDS:
        raise UsageError(f"backend {asked!r} is not known; use one of {', '.join(BACKENDS)}")
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    enough = gpus >= local_size
    if asked == "nccl" and not enough:
        raise UsageError(f"backend 'nccl' needs one GPU a rank, and {local_size} ranks share {gpus}; "
                         f"use backend='gloo' or fewer ranks")
    if asked == "shm":
        _refuse_shm(device, place)
    if asked is None and gpus and not enough and device.index == 0:
        recorder.current().span("log", "backend", recorder.now(), recorder.now(),
                                text=f"{local_size} ranks share {gpus} GPUs, over gloo")
        print(f"dplab: {local_size} ranks share {gpus} GPUs; they talk over gloo", flush=True)
    if asked is not None:
        return asked
    if device.type == "cpu" and place["one_host"] and not without_shm():
        return "shm"
    return "nccl" if gpus and enough else "gloo"


def _refuse_shm(device: torch.device, place: dict[str, Any]) -> None:
    """Says why these ranks cannot share memory, if they cannot."""
    wrong = without_shm()
    if device.type != "cpu":
        wrong = f"it moves CPU tensors, and this rank's device is {device}"
    elif place["local_size"] != place["size"]:
        wrong = f"it joins processes of one host, and {place['local_size']} of {place['size']} ranks are on this one"
    if wrong:
        raise UsageError(f"backend 'shm' cannot be used here: {wrong}; use backend='gloo'")


def without_shm() -> str:
    """Why this machine cannot have backend `shm`; empty where it can."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return f"it counts on the memory order of x86-64 Linux, and this is {platform.machine()} {platform.system()}"
    try:
        for descriptor in (os.memfd_create("dplab"), os.pidfd_open(os.getpid())):
            os.close(descriptor)
    except (AttributeError, OSError) as error:
        return f"this kernel or container gives no nameless memory, or no descriptors of processes ({error})"
    return ""
