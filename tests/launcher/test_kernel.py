"""A real notebook kernel: functions and classes of cells travel, edits count, and a killed kernel leaves nothing."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import survivors

import dplab

jupyter_client = pytest.importorskip("jupyter_client")

CELL = """
import dplab
class Model:
    scale = {scale}
    def __init__(self, value): self.value = value
    def answer(self): return self.scale * self.value
loss = lambda model: model.answer() + 1
def train(value):
    return loss(Model(value)), Model(value)
results = dplab.launch(train, world_size=2, args=(5,), detach=False).wait(60)
print([number for number, _ in results], all(type(model) is Model for _, model in results))
"""

FAILING = """
def broken():
    numbers = [1, 2]
    return numbers[7]  # the line that fails
try:
    dplab.launch(broken, detach=False).wait(60)
except dplab.RankFailed as error:
    print(error)
"""

ENDLESS = """
import time
from pathlib import Path
def endless():
    import os
    Path(os.environ["DPLAB_RUN_DIR"], f"rank-{{os.environ['RANK']}}", "ready").touch()
    while True:
        time.sleep(0.01)
run = dplab.launch(endless, world_size=2, detach={detach})
print(run.path)
"""


class Kernel:
    def __init__(self, folder: Path) -> None:
        self.manager: Any = jupyter_client.KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=str(folder))
        self.client: Any = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def run(self, code: str, limit: float = 60.0) -> str:
        """What the cell prints; fails where the cell raises."""
        request, printed = self.client.execute(code), ""
        until = time.monotonic() + limit
        while time.monotonic() < until:
            try:
                message = self.client.get_iopub_msg(timeout=1)
            except queue.Empty:
                continue
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            if message["msg_type"] == "stream":
                printed += content["text"]
            assert message["msg_type"] != "error", "\n".join(content["traceback"])
            if message["msg_type"] == "status" and content["execution_state"] == "idle":
                return printed
        raise AssertionError(f"the cell did not end within {limit:g} s, it printed {printed!r}")

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    kernel = Kernel(tmp_path)
    yield kernel
    kernel.close()


@pytest.mark.slow
def test_h41_cells_travel_edits_count_and_a_killed_kernel_leaves_nothing(kernel: Kernel) -> None:
    assert kernel.run(CELL.format(scale=10)) == "[51, 51] True\n"
    assert kernel.run(CELL.format(scale=100)) == "[501, 501] True\n"

    told = kernel.run(FAILING)
    assert told.startswith("rank 0 of 1 failed before its first step was done: IndexError: list index out of range\n")
    assert "return numbers[7]  # the line that fails" in told

    kept = Path(kernel.run(ENDLESS.format(detach=True)).strip())
    ending = Path(kernel.run(ENDLESS.format(detach=False)).strip())
    survivors.rank_pids(kept, 2)
    survivors.rank_pids(ending, 2)
    kernel.manager.interrupt_kernel()
    assert kernel.run("print(run.state)") == "running\n"

    kernel.manager.provisioner.process.kill()
    survivors.assert_none(ending)
    assert dplab.attach(ending).state == "stopped"
    run = dplab.attach(kept)
    assert run.state == "running"
    assert run.stop(timeout=0) == "stopped"
