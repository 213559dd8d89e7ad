"""From a gradient's arrival to its average: the walk through one window of backwards.

A backward begins with its first gradient (or with `engine.backward`) and ends with the outermost graph
task. Buckets launch in index order on every rank, as soon as they and all before them are full; what never
fills is launched at the end. A closing backward then waits, exchanges the control message and divides.

Backwards are counted, not steps: with `accumulate=1` further backwards add up as in plain torch, above 1
the average runs over the backwards there were.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dplab.core.bucket import Bucket
from dplab.core.control import Control, Model, Told
from dplab.core.grads import BufferPool
from dplab.core.scaler import LossScaler
from dplab.errors import StateError
from dplab.telemetry.recorder import Recorder, now
from dplab.wire.collectives import Pending
from dplab.wire.world import Mesh


@dataclass
class Window:
    """What has happened since the weights last moved. `divisor` is what a closed window was divided by."""

    backwards: int = 0
    unreduced: bool = True
    weight: float = 0.0
    weighted: bool = False
    unweighted: bool = False
    closed: bool = False
    divisor: float = 1.0
    stop: bool = False
    pause: bool = False
    overflow: bool = False
    buffers: tuple[int, ...] = ()


class Reduction:
    """All trainable buckets of an engine, in launch order."""

    def __init__(self, buckets: Sequence[Bucket], mesh: Mesh, recorder: Recorder, *, model: Model, accumulate: int,
                 every_backward: bool, scaler: LossScaler | None = None, share: int | None = None) -> None:
        self.model = model
        self.buckets, self.mesh, self.recorder, self.scaler = buckets, mesh, recorder, scaler
        self.accumulate, self.every_backward, self.share = accumulate, every_backward, share
        self.window = Window()
        self.syncing = True
        self.filled: Callable[[Bucket], None] = lambda bucket: None
        self.backward_ended: Callable[[], None] = lambda: None
        self._in_flight: deque[tuple[Bucket, Pending]] = deque()
        self._next = 0
        self._open = self._reducing = False
        self._task = -1
        self._began = 0
        self._weight: float | None = None
        self._suspect: str | None = None
        self._under_way = min(bucket.grads.under_way for bucket in buckets if bucket.grads is not None)
        self._closing = False

    @property
    def due(self) -> bool:
        """True where `step()` may act. A window of one is always due: a rank without gradients takes part."""
        return self.accumulate == 1 or self.window.backwards >= self.accumulate

    def serve(self, pool: BufferPool) -> None:
        """Lets a pool that has run out end the oldest reduction under way."""
        pool.make_room = self._end_oldest

    def begin(self, weight: float | None = None) -> None:
        """A backward begins."""
        if self._open:
            return
        self.reopen()
        self._open, self._began, self._weight = True, self.recorder.open("backward", "backward"), weight
        self._closing = self.window.backwards + 1 >= self.accumulate
        self._reducing = self.syncing and (self._closing or self.every_backward)
        self._next = 0
        for bucket in self.buckets:
            bucket.expect()
        self.recorder.phase("backward")

    def came(self, place: int, slot: int, *, more: bool = False) -> None:
        """A gradient has come to a slot of the bucket at `place`; launches what is ready.

        `more`: hooks of the user's on this gradient are still to run, so its bucket waits for the next one's.
        """
        bucket = self.buckets[place]
        if self.scaler is not None and not self._open:
            raise StateError("loss.backward() was called under a precision that scales the loss; call "
                             "engine.backward(loss)")
        if self.share is not None and not self._open:
            raise StateError("loss.backward() was called under a strategy with shares, which weigh each rank's loss; "
                             "call engine.backward(loss)")
        self.begin()
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._task_ended)
        self._launch_filled()
        if bucket.launched:
            raise StateError(f"parameter {bucket.names[slot]!r} got a gradient again after its bucket was reduced in "
                             f"this backward (a re-entrant checkpoint around shared weights does that); "
                             f"use use_reentrant=False")
        for _, pending in self._in_flight:
            pending.look()
        if bucket.accumulate(slot):
            self.filled(bucket)
            if not more:
                self._launch_filled()

    def end(self) -> None:
        """The backward has ended; safe to call again."""
        if not self._open:
            return
        self._open, self._task = False, -1
        self.window.backwards += 1
        self._count_weight()
        if self._reducing:
            self._launch_rest()
            if self.window.backwards >= self.accumulate:
                self.close()
            else:
                self._end_all(last=False)
                self.window.unreduced = False
        else:
            self.window.unreduced = True
        self.backward_ended()
        self.recorder.span("backward", "backward", self._began, now())

    def close(self) -> None:
        """Reduces what is unreduced and divides: the owned gradients are averages afterwards.

        Called by every rank at the same point of its collectives: at the end of a closing backward, or in
        `step()` by a rank that had none and by all where the window is cut short.
        """
        if self.window.closed:
            return
        if not self.window.backwards:
            for bucket in self.buckets:
                bucket.refuse_assigned()
        self._closing = True
        if self.window.unreduced:
            self._launch_rest()
        self._in_flight.extend((bucket, bucket.grads.reduce_rest(bucket.index)) for bucket in self.buckets
                               if bucket.grads is not None and bucket.grads.inside)
        flags = {"weighted": self.window.weighted, "unweighted": self.window.unweighted,
                 "stop": self.recorder.stop_requested(), "overflow": False,
                 "pause": self.recorder.pause().holds(self.recorder.step + 1)}
        if self.scaler is not None:
            # the vote is about the sums, so these must be there before it
            self._end_all(last=True)
            flags["overflow"] = any(not _finite(bucket) for bucket in self.buckets)
        control = Control.send(self.mesh.world, self.buckets, flags, self.window.backwards, self.model)
        self._end_all(last=True)
        told = control.read()
        self.window.stop, self.window.pause = told.stop, told.pause
        self.window.overflow, self.window.buffers = told.overflow, told.buffers
        if told.overflow:
            self._refuse_at_floor()
        self.window.divisor = self._divisor(told)
        for bucket in self.buckets:
            bucket.close(self.window.divisor)
        self.model.optimizer.show_cut()
        self.window.closed = True

    def reopen(self) -> None:
        """More backwards come to a closed window: its averages become sums again."""
        if self.window.closed:
            for bucket in self.buckets:
                bucket.take_edits()
                bucket.reopen(self.window.divisor)
            self.window.closed, self.window.unreduced, self._next = False, True, 0

    def reset(self) -> None:
        """A new window, with whatever was under way ended and dropped."""
        while self._in_flight:
            self._in_flight.popleft()[1].wait()
        for bucket in self.buckets:
            bucket.clear()
        self.window, self._suspect = Window(), None
        self._open, self._task, self._next = False, -1, 0

    def abandon(self) -> None:
        """The backward under way has raised: its window is dropped, so that the next one starts clean."""
        if self._open:
            self.reset()
            self.backward_ended()

    def _task_ended(self) -> None:
        # a nested graph task (re-entrant checkpoint) ends inside a node of the one around it
        if torch._C._current_autograd_node() is None:
            self.end()
        else:
            self._task = -1

    def _count_weight(self) -> None:
        if self._weight is None:
            self.window.unweighted = True
        else:
            self.window.weighted = True
            self.window.weight += self._weight

    def _divisor(self, told: Told) -> float:
        scale = 1.0 if self.scaler is None else self.scaler.scale
        if not told.weighted:
            return scale * self.mesh.world.size * (max(1, told.backwards) if self.accumulate > 1 else 1)
        total = torch.tensor([self.window.weight], dtype=torch.float64, device=self.buckets[0].device)
        self.mesh.world.all_reduce(total, purpose="control").wait()
        if not total.item() > 0:
            raise StateError(f"the weights given to engine.backward() add up to {total.item()} over all ranks; "
                             f"they must be above 0 (a number of tokens or samples)")
        return scale * float(total.item())

    def _refuse_at_floor(self) -> None:
        """An overflow that no smaller scale can answer: every rank says where it came from."""
        if self.scaler is None or not self.scaler.at_floor:
            return
        every = self.mesh.world.gather_objects(self._suspect)
        found = [f"rank {rank}: the gradient of {where}" for rank, where in enumerate(every) if where]
        raise StateError(f"gradients are not finite at the smallest loss scale ({self.scaler.scale}), first on "
                         f"{'; '.join(found) or 'the sum over ranks'}; look at the loss and the inputs there, or lower "
                         f"the learning rate")

    def _launch_filled(self) -> None:
        while self._reducing and self._next < len(self.buckets) and not self.buckets[self._next].missing:
            self._launch()

    def _launch(self) -> None:
        while len(self._in_flight) >= self._under_way:
            self._end_oldest(last=self._closing)
        bucket = self.buckets[self._next]
        self._next += 1
        if self.scaler is not None and self.scaler.at_floor:
            self._suspect = self._suspect or bucket.first_not_finite()
        # the newest first: what it issues follows on the wire what an older one may still wait for
        for _, pending in reversed(self._in_flight):
            pending.nudge()
        self._in_flight.append((bucket, bucket.reduce(last=self._closing)))

    def _launch_rest(self) -> None:
        while self._next < len(self.buckets):
            self._launch()

    def _end_oldest(self, *, last: bool = False) -> bool:
        if not self._in_flight:
            return False
        bucket, pending = self._in_flight.popleft()
        pending.wait()
        bucket.fold(last=last)
        return True

    def _end_all(self, *, last: bool) -> None:
        going = True
        while going:
            going = False
            for _, pending in self._in_flight:
                going |= pending.push()
        while self._end_oldest(last=last):
            pass
        self._next = 0


def _finite(bucket: Bucket) -> bool:
    """Whether every owned sum is; padding is zero and always is."""
    assert bucket.grads is not None
    return bool(torch.isfinite(bucket.grads.owned).all())
