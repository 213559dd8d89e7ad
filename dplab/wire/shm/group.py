# torch's stubs give callers several overloads of a method; what it calls is one of them
# mypy: disable-error-code="override,assignment"
"""The `shm` process group: what torch.distributed calls when `backend="shm"`, for CPU tensors of one host.

Every collective of torch's is here under each name that torch gives it, so DDP and FSDP2 run on it unchanged.
A work is taken as far as it gets when it is issued and to its end when it is waited for or asked for its
future; while the program is elsewhere, a helper thread goes on with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work
from torch.futures import Future

from dplab.errors import WireError
from dplab.wire.shm import staged
from dplab.wire.shm.channel import Channel
from dplab.wire.shm.letters import Letters
from dplab.wire.shm.operation import Operation, help_along
from dplab.wire.shm.peers import Patience

NAME = "shm"
FAREWELL = 5.0
"""Seconds that a rank which leaves waits for peers that still need something of it."""
Tensors = list[torch.Tensor]
_OPS = [(getattr(dist.ReduceOp, op.upper()), op) for op in
        ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")]


class ShmWork(Work):
    """Operations under way, and what is left to do when they are over (copies into tensors with gaps)."""

    def __init__(self, operations: Sequence[Operation], result: Any, finish: Sequence[Callable[[], Any]] = ()) -> None:
        super().__init__()
        self._operations, self._result, self._finish = list(operations), result, list(finish)
        if not all(operation.over for operation in operations):
            help_along()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        limit = timeout.total_seconds() if timeout > timedelta(0) else None
        for operation in self._operations:
            operation.wait(limit)
        while self._finish:
            self._finish.pop(0)()
        return True

    def is_completed(self) -> bool:
        if not all(operation.advance() for operation in self._operations):
            return False
        if self.exception() is None:
            self.wait()
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        return next((each.error for each in self._operations if each.error is not None), None)

    def result(self) -> Any:
        self.wait()
        return self._result

    def get_future(self) -> Future[Any]:
        """A future that is done: whoever asks (torch's DDP) waits for it where nothing of ours would go on."""
        self.wait()
        future: Future[Any] = Future()
        future.set_result(self._result)
        return future


class Receipt(Work):
    """A message to be received, when it is waited for."""

    def __init__(self, letters: Letters, tensor: torch.Tensor, source: int | None, tag: int) -> None:
        super().__init__()
        self._letters, self._tensor, self._source, self._tag = letters, tensor, source, tag
        self._came_from: int | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._receive(wait=True)
        return True

    def is_completed(self) -> bool:
        return self._receive(wait=False)

    def is_success(self) -> bool:
        return self._came_from is not None

    def exception(self) -> None:
        return None

    def get_future(self) -> Future[Any]:
        self.wait()
        future: Future[Any] = Future()
        future.set_result([self._tensor])
        return future

    def _source_rank(self) -> int:
        assert self._came_from is not None
        return self._came_from

    def _receive(self, *, wait: bool) -> bool:
        if self._came_from is None:
            flat = _Flat.of(self._tensor)
            self._came_from = self._letters.receive(flat.values, self._source, self._tag, wait=wait)
            if self._came_from is not None:
                flat.back()
        return self._came_from is not None


class _Flat:
    """A tensor's values in a row: the tensor itself where it is contiguous, else a copy that `back` returns.

    Taken past autograd and its version counters, as backends in C++ do.
    """

    def __init__(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        self.tensor, self.values = tensor, values

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Flat:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            raise WireError(f"backend 'shm' moves dense CPU tensors, not one that is {tensor.layout} on "
                            f"{tensor.device}; use backend='gloo' or 'nccl'")
        data = tensor.data
        return cls(data, data if data.dim() == 1 and data.is_contiguous() else data.contiguous().view(-1))

    def back(self) -> None:
        if self.values is not self.tensor and self.values.data_ptr() != self.tensor.data_ptr():
            self.tensor.copy_(self.values.view(self.tensor.shape))


def _op(reduce_op: Any) -> str:
    found = next((name for op, name in _OPS if reduce_op == op), None)
    if found is None:
        raise WireError(f"backend 'shm' has no reduction {reduce_op}; use one of {', '.join(n for _, n in _OPS)}")
    return found


class ShmGroup(dist.ProcessGroup):
    """One rank's end of a group."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.channel = Channel(store, rank, size, timeout)
        self.letters = Letters(self.channel)
        self._name = self._desc = ""

    def getBackendName(self) -> str:
        return NAME

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    def getGroupDesc(self) -> str:
        return self._desc

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def shutdown(self) -> None:
        """Leaves the group, once what was issued is over and what was sent is read, or nobody is there to do it."""
        patience = Patience()
        while self.channel.unfinished or self.letters.unread:
            if patience.pause() and patience.waited > FAREWELL:
                break
        self.channel.close()

    abort = shutdown

    def allreduce(self, tensors: Tensors, opts: Any = None) -> ShmWork:
        op = _op(opts.reduceOp) if opts is not None else "sum"
        flats = [_Flat.of(tensor) for tensor in tensors]
        return self._work([staged.all_reduce(self.channel, flat.values, op) for flat in flats], tensors, flats)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> ShmWork:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: Tensors, opts: Any) -> ShmWork:
        flats = [_Flat.of(tensor) for tensor in tensors]
        root = opts.rootRank
        return self._work([staged.broadcast(self.channel, flat.values, root) for flat in flats], tensors, flats)

    def reduce(self, tensors: Tensors, opts: Any) -> ShmWork:
        flats = [_Flat.of(tensor) for tensor in tensors]
        return self._work([staged.reduce(self.channel, flat.values, _op(opts.reduceOp), opts.rootRank)
                           for flat in flats], tensors, flats)

    def barrier(self, opts: Any = None) -> ShmWork:
        return self._work([staged.barrier(self.channel)], [], [])

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> ShmWork:
        operations, flats = [], []
        for output, tensor in zip(outputs, inputs, strict=True):
            take = [_Flat.of(each) for each in output]
            flats += take
            even = all(each.values.numel() == tensor.numel() for each in take)
            operations.append(self._exchange("all_gather", [tensor], take, even=even))
        return self._work(operations, outputs, flats)

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> ShmWork:
        by_tensor = [[output[index] for output in outputs] for index in range(len(inputs))]
        return self.allgather(by_tensor, inputs)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> ShmWork:
        return self.all_gather_single_coalesced([output], [tensor])

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> ShmWork:
        flats, operations = [_Flat.of(output) for output in outputs], []
        for flat, tensor in zip(flats, inputs, strict=True):
            self._must_hold(flat.values, tensor.numel(), "the output of all_gather", "input")
            take = [_Flat(each, each) for each in flat.values.view(self.channel.size, -1)]
            operations.append(self._exchange("all_gather", [tensor], take, even=True))
        return self._work(operations, outputs, flats)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> ShmWork:
        flats, operations = [_Flat.of(output) for output in outputs], []
        op = _op(opts.reduceOp) if opts is not None else "sum"
        for flat, pieces in zip(flats, inputs, strict=True):
            even = all(piece.numel() == flat.values.numel() for piece in pieces)
            operations.append(self._exchange("reduce_scatter", pieces, [flat], even=even, op=op))
        return self._work(operations, outputs, flats)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> ShmWork:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> ShmWork:
        pieces = []
        for output, tensor in zip(outputs, inputs, strict=True):
            flat = _Flat.of(tensor).values
            self._must_hold(flat, output.numel(), "the input of reduce_scatter", "output")
            pieces.append(list(flat.view(self.channel.size, -1)))
        return self.reduce_scatter(outputs, pieces, opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(self, output: torch.Tensor, tensor: torch.Tensor, output_splits: list[int],
                          input_splits: list[int], opts: Any = None) -> ShmWork:
        flat = _Flat.of(output)
        give, take = _cut(_Flat.of(tensor).values, tensor, input_splits, self.channel.size), _cut(
            flat.values, output, output_splits, self.channel.size)
        even = not (output_splits or input_splits)
        return self._work([self._exchange("all_to_all", give, [_Flat(each, each) for each in take], even=even)],
                          [output], [flat])

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> ShmWork:
        take = [_Flat.of(output) for output in outputs]
        return self._work([self._exchange("all_to_all", inputs, take, even=False)], outputs, take)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> ShmWork:
        take = [_Flat.of(each) for each in outputs[0]] if self.channel.rank == opts.rootRank else []
        return self._work([self._exchange(f"gather(to rank {opts.rootRank})", inputs, take, even=True)], outputs, take)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> ShmWork:
        root, flat = opts.rootRank, _Flat.of(outputs[0])
        nothing = flat.values[:0]
        give = inputs[0] if self.channel.rank == root else [nothing] * self.channel.size
        take = [flat if source == root else _Flat(nothing, nothing) for source in range(self.channel.size)]
        return self._work([self._exchange(f"scatter(from rank {root})", give, take, even=False)], outputs, [flat])

    def send(self, tensors: Tensors, to: int, tag: int = 0) -> ShmWork:
        for tensor in tensors:
            self.letters.send(_Flat.of(tensor).values, to, tag)
        return self._work([], tensors, [])

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Receipt:
        return Receipt(self.letters, tensors[0], source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Receipt:
        return Receipt(self.letters, tensors[0], None, tag)

    def _exchange(self, name: str, give: Tensors, take: Sequence[_Flat], *, even: bool, op: str | None = None,
                  ) -> Operation:
        return staged.exchange(self.channel, name, [_Flat.of(each).values for each in give],
                               [each.values for each in take], op=op, even=even)

    def _must_hold(self, flat: torch.Tensor, numel: int, what: str, of: str) -> None:
        if flat.numel() != numel * self.channel.size:
            raise WireError(f"{what} has {flat.numel()} values where {self.channel.size} ranks times an {of} of "
                            f"{numel} are {numel * self.channel.size}")

    def _work(self, operations: Sequence[Operation], result: Any, flats: Sequence[_Flat]) -> ShmWork:
        return ShmWork(operations, result, [flat.back for flat in flats])


def _cut(flat: torch.Tensor, tensor: torch.Tensor, splits: Sequence[int], size: int) -> Tensors:
    """Pieces along the first dimension, equal ones where no `splits` are given."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if (splits and (len(splits) != size or sum(splits) != rows)) or (not splits and rows % size):
        raise WireError(f"all_to_all over {size} ranks of {rows} rows with splits {list(splits)}: give one split a "
                        f"rank that add up to the rows, or rows that the ranks divide")
    width = flat.numel() // rows if rows else 0
    return list(torch.split(flat, [each * width for each in splits or [rows // size] * size]))


def register() -> None:
    """Makes `backend="shm"` known to torch.distributed; again is harmless."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, ShmGroup, devices=["cpu"])
