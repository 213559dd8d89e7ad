"""This rank's share of a data set, and getting results back in the data set's order.

The order of an epoch is a function of (seed, epoch) alone. Ranks deal it out sample by sample (rank r has
numbers r, r + N, r + 2N, ...), so a step's batches together are the same samples at every world size.
Training leaves out what does not fill a batch on every rank; evaluation (`shuffle=False`) leaves out nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate

from dplab.errors import UsageError
from dplab.telemetry import recorder
from dplab.telemetry.recorder import now
from dplab.wire.collectives import Collectives, Counters
from dplab.wire.world import World, init


class Loader:
    """Batches of this rank, epoch after epoch; made by `dplab.loader`.

    Iterating runs one epoch, the next time the next. `state_dict()` says where it stands,
    `load_state_dict()` goes on from there, on any number of ranks that divides the samples already taken.
    """

    def __init__(self, dataset: Any, sizes: Sequence[int], world: World, *, seed: int, shuffle: bool,
                 drop_last: bool) -> None:
        self.dataset, self.world = dataset, world
        self.sizes = tuple(sizes)
        """samples of each rank's batch"""
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last
        self.epoch = 0
        self._taken = 0
        """samples of this epoch that all ranks together have taken"""
        self._recorder = recorder.current()

    @property
    def batch_size(self) -> int:
        """Samples of this rank's batch."""
        return self.sizes[self.world.rank]

    @property
    def global_batch(self) -> int:
        """Samples of all ranks' batches together."""
        return sum(self.sizes)

    def __len__(self) -> int:
        """Batches of one epoch on this rank; the same on every rank where the last ones are dropped."""
        whole, rest = divmod(len(self.dataset), self.global_batch)
        return whole + (not self.drop_last and rest > self.world.rank)

    def __iter__(self) -> Iterator[Any]:
        order = self.order(self.epoch)
        end = len(order) - (len(order) % self.global_batch if self.drop_last else 0)
        while self._taken < end:
            began = self._recorder.open("data", "loader")
            mine = self._dealt(order[self._taken:min(end, self._taken + self.global_batch)])
            self._taken += self.global_batch
            if mine:
                batch = _to(default_collate([self.dataset[i] for i in mine]), self.world.device)
                self._recorder.span("data", "loader", began, now(), samples=len(mine), tokens=_tokens(batch, len(mine)))
                yield batch
        self.epoch, self._taken = self.epoch + 1, 0

    def _dealt(self, samples: list[int]) -> list[int]:
        """This rank's of a step's samples: one by one in turn, or a run of them where ranks take unequal numbers."""
        rank = self.world.rank
        if len(set(self.sizes)) == 1:
            return samples[rank::self.world.size]
        before = sum(self.sizes[:rank])
        return samples[before:before + self.sizes[rank]]

    def order(self, epoch: int) -> list[int]:
        """Indices of the data set in the order in which this epoch goes through them, for all ranks together."""
        if not self.shuffle:
            return list(range(len(self.dataset)))
        generator = torch.Generator().manual_seed(hash((self.seed, epoch)) & 0x7FFFFFFFFFFFFFFF)
        return torch.randperm(len(self.dataset), generator=generator).tolist()

    def state_dict(self) -> dict[str, int]:
        """Epoch and samples taken in it, by all ranks together."""
        return {"seed": self.seed, "epoch": self.epoch, "taken": self._taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on where `state_dict` was taken."""
        self.seed, self.epoch, self._taken = state["seed"], state["epoch"], state["taken"]


def loader(dataset: Any, batch_size: int | Sequence[int], *, seed: int = 0, shuffle: bool = True,
           drop_last: bool | None = None) -> Loader:
    """Batches of `batch_size` samples a rank from anything with a length and an index; one epoch a loop.

    `batch_size` may be a number for each rank, in rank order: what a strategy with `shares` holds.

    Every epoch has another order, by itself. Batches are collated as a DataLoader does and moved to the
    rank's device. `drop_last=None` leaves samples out only when shuffling. Raises UsageError where the ranks
    cannot have a batch each.
    """
    world = init()
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise UsageError(f"dataset is a {type(dataset).__name__}; dplab.loader takes anything with a length and an "
                         f"index (for a stream use your own DataLoader)")
    sizes = list(batch_size) if isinstance(batch_size, Sequence) else [batch_size] * world.size
    if len(sizes) != world.size:
        raise UsageError(f"batch_size={batch_size!r} is for {len(sizes)} ranks, and the world has {world.size}; give "
                         f"one number, or one for each rank")
    if not all(isinstance(size, int) and not isinstance(size, bool) and size >= 1 for size in sizes):
        raise UsageError(f"batch_size={batch_size!r} is not allowed; it is the samples of one batch on one rank, an "
                         f"integer >= 1")
    drops = shuffle if drop_last is None else drop_last
    if len(set(sizes)) > 1 and not drops:
        raise UsageError(f"batch_size={batch_size!r} differs between ranks, which is for training; where nothing is "
                         f"left out give one number, so that dplab.gather can put results in order")
    made = Loader(dataset, sizes, world, seed=seed, shuffle=shuffle, drop_last=drops)
    if drops and len(made) == 0:
        ranks = f"{world.size} rank{'s' * (world.size > 1)}"
        raise UsageError(f"the data set has {len(dataset)} samples, and {ranks} x batch_size {batch_size} "
                         f"need {made.global_batch}; use a smaller batch, fewer ranks or more data")
    return made


def gather(samples: Any) -> Any:
    """Every rank's results in the order of the data set, exactly as many as there are; collective.

    `samples` are this rank's, one for each sample that an unshuffled `dplab.loader` dealt to it: a list, or a
    tensor with one row a sample. Ranks may hold one fewer than others, or none. Returns the same kind, on
    every rank.
    """
    world = init()
    wire = Collectives(world.transport([list(range(world.size))]), Counters(), recorder.current())
    every = wire.gather_objects([row.cpu() for row in samples] if isinstance(samples, torch.Tensor) else list(samples))
    longest = max(map(len, every))
    merged = [every[rank][turn] for turn in range(longest) for rank in range(world.size) if turn < len(every[rank])]
    return torch.stack(merged) if isinstance(samples, torch.Tensor) and merged else merged


def _to(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device)
    if isinstance(batch, dict):
        return {name: _to(value, device) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [_to(value, device) for value in batch]
    return batch


def _tokens(batch: Any, samples: int) -> int:
    """Elements of the first tensor where it holds token numbers, else samples."""
    first = batch[0] if isinstance(batch, list | tuple) and batch else batch
    whole = isinstance(first, torch.Tensor) and first.dtype in (torch.int64, torch.int32)
    return int(first.numel()) if whole and first.dim() > 1 else samples
