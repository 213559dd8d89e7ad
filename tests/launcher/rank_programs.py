"""What the ranks of these tests run. They go by name: the module is imported afresh in each rank."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


def place() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def here() -> Path:
    return Path(os.environ["DPLAB_RUN_DIR"], f"rank-{os.environ['RANK']}")


def join() -> tuple[int, int]:
    import torch.distributed as dist

    rank, size = place()
    dist.init_process_group("gloo", init_method=os.environ["DPLAB_RENDEZVOUS"], rank=rank, world_size=size)
    return rank, size


def total(*, value: int = 1) -> int:
    """Sum of `value` over the ranks."""
    import torch
    import torch.distributed as dist

    join()
    tensor = torch.tensor([value])
    dist.all_reduce(tensor)
    return int(tensor)


def reduce_for_ever(*, ignore_interrupts: bool = False) -> None:
    """Collectives without end; `ready` appears in the rank's directory after the first."""
    import torch
    import torch.distributed as dist

    if ignore_interrupts:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    join()
    tensor = torch.ones(1000)
    while True:
        dist.all_reduce(tensor)
        (here() / "ready").touch()


def train_until_stopped() -> str:
    """What a program on the engine does: ends by RunStopped, at the same step on all ranks."""
    import torch
    import torch.distributed as dist

    from dplab.errors import RunStopped
    from dplab.telemetry import recorder

    join()
    events = recorder.current()
    while True:
        start = recorder.now()
        wish = torch.tensor([int(events.stop_requested())])
        dist.all_reduce(wish)
        events.span("step", "train", start, recorder.now())
        events.gauge("loss", value=1.0 / (events.step + 1))
        events.step += 1
        (here() / "ready").touch()
        if int(wish):
            raise RunStopped(f"asked to stop in step {events.step}")


def wait_for(path: str) -> int:
    """Returns once a file is there."""
    (here() / "ready").touch()
    while not Path(path).exists():
        time.sleep(0.01)
    return place()[0]


def fail(how: str, on: int) -> int:
    """Rank `on` fails in the given way while the others are in a collective."""
    import torch
    import torch.distributed as dist

    rank, _ = place()
    if how == "before init" and rank == on:
        raise ValueError("no group today")
    join()
    for step in range(3):
        if rank == on and step == 2:
            {"ValueError": raise_value, "exit": lambda: sys.exit(3), "os._exit": lambda: os._exit(0),
             "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
             "SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
             "unpicklable": raise_unpicklable}[how]()
        dist.all_reduce(torch.ones(10))
    return rank


def raise_value() -> None:
    from dplab.telemetry import recorder

    recorder.current().step = 2
    raise ValueError("boom in the third step")


def raise_unpicklable() -> None:
    class Local(Exception):
        def __init__(self) -> None:
            super().__init__("I hold a lock")
            import threading

            self.lock = threading.Lock()

    raise Local


def facts() -> dict[str, Any]:
    """Surroundings of the rank."""
    import random

    import torch

    return {"environ": dict(os.environ), "cwd": os.getcwd(), "argv": sys.argv, "threads": torch.get_num_threads(),
            "torch": torch.rand(1).item(), "random": random.random(), "path": sys.path,
            "descriptors": sorted(int(name) for name in os.listdir("/proc/self/fd")),
            "stdin": sys.stdin.read(), "main": sorted(vars(sys.modules["__main__"]))}


def leave_children() -> int:
    """Returns while a child of its own, in a session of its own, would sleep on."""
    import subprocess

    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True).pid


def speak() -> None:
    print("to the output")
    print("to the errors", file=sys.stderr)
    os.write(1, b"from below\n")


def spoil_streams(*, how: str, fails: bool = False) -> str:
    """Leaves the process without streams that could be flushed."""
    print("half a line", end="")
    if how == "gone":
        sys.stdout = sys.stderr = None  # type: ignore[assignment]
    elif how == "closed":
        sys.stdout.close()
        sys.stderr.close()
    else:
        sys.stdout = sys.stderr = object()  # type: ignore[assignment]
    if fails:
        raise ValueError("after the streams")
    return how


def fork_and_come_back(how: str) -> str:
    """A child of the program returns, or fails, where the program does."""
    child = os.fork()
    if child == 0:
        if how == "fails":
            raise ValueError("I am a child")
        return "of the child"
    return f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}"


def too_much() -> Any:
    import threading

    return {"good": 1, "bad": threading.Lock()}


def record_megabytes() -> None:
    """Fills a small disk with events."""
    from dplab.telemetry import recorder

    events = recorder.current()
    for _ in range(200):
        for _ in range(200):
            events.gauge("filler", text="x" * 1000)
        events.flush()


def record_a_little() -> None:
    """Two steps of known length."""
    from dplab.telemetry import recorder

    events, (rank, _) = recorder.current(), place()
    start = recorder.now()
    for step in range(2):
        events.step = step
        t0 = start + step * 4_000_000
        events.span("collective", "all_reduce", t0, t0 + 2_000_000, purpose="grads", bytes=4000, exposed=1_000_000)
        events.span("collective", "broadcast", t0, t0 + 2_000_000, purpose="init", bytes=99, exposed=7_000_000)
        events.gauge("loss", value=1.0 / (step + 1))
        events.gauge("memory", params=100 + rank)
        events.span("step", "train", t0, t0 + 3_000_000, micro_batches=1, moved=True)


def hang_at_exit() -> int:
    """Returns, and then never ends."""
    import atexit
    import threading

    atexit.register(threading.Event().wait)
    return place()[0]


def save_in_a_thread(path: str) -> None:
    """Returns while a thread of its own still writes."""
    import threading

    def save() -> None:
        time.sleep(0.2)
        Path(path).write_text("all of it")

    threading.Thread(target=save).start()


class Numbers:
    """A dataset whose items are recorded where they are made."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> int:
        from dplab.telemetry import recorder

        recorder.current().gauge("from a worker", index=index)
        return index


def load_with_workers() -> list[int]:
    from torch.utils.data import DataLoader

    return [int(number) for number in DataLoader(Numbers(), batch_size=None, num_workers=2)]


def load_for_ever() -> None:
    from torch.utils.data import DataLoader

    loader = DataLoader(Numbers(), batch_size=None, num_workers=1, persistent_workers=True)
    while True:
        for _ in loader:
            (here() / "ready").touch()


def on_the_gpu() -> float:
    import torch

    return float(torch.arange(4.0, device="cuda").sum())


def busy_gpu() -> None:
    import torch

    matrix = torch.ones(1000, 1000, device="cuda")
    while True:
        float((matrix @ matrix).sum())
        (here() / "ready").touch()


def steps(counts: tuple[int, ...], strategy: str) -> str:
    """Rank r takes `counts[r]` steps and returns."""
    import torch

    import dplab

    engine = dplab.parallelize(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), torch.optim.AdamW,
                               strategy)
    for _ in range(counts[dplab.init().rank]):
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
    return "returned"


def fail_in(where: str, on: int, strategy: str) -> None:
    """Rank `on` raises in its second step: where its batches come from, in a forward hook, or in backward."""
    import torch

    import dplab

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    engine = dplab.parallelize(model, torch.optim.AdamW, strategy)

    def boom(*_: Any) -> None:
        if dplab.init().rank == on and step == 1:
            raise ValueError(f"boom in {where}")

    for step in range(4):
        if where == "the loader":
            boom()
        if where == "a hook" and step == 1:
            model[1].register_forward_hook(boom)
        out = engine(torch.ones(2, 4))
        if where == "backward":
            out.register_hook(boom)
        engine.backward(out.sum())
        engine.step()


def train_small(steps: int = 100_000, pause: float = 0.002) -> list[int]:
    """A tiny model with the engine; what each step began as (so that a step done twice, or left out, is seen)."""
    import torch

    import dplab

    engine = dplab.parallelize(torch.nn.Linear(4, 4), lambda params: torch.optim.SGD(params, lr=0.1))
    done = []
    for step in range(steps):
        done.append(step)
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
        time.sleep(pause)
    return done
