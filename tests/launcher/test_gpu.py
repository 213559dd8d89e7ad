"""With a GPU: forked ranks may use CUDA although the launching process does, and NVML's gauges tell of it."""

from __future__ import annotations

import pytest
import rank_programs
import survivors

import dplab

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]


def test_cuda_in_ranks_of_a_process_that_uses_cuda() -> None:
    assert torch.ones(2, device="cuda").sum().item() == 2
    assert dplab.launch(rank_programs.on_the_gpu, detach=False, warm=True).wait(120) == [6.0]
    assert dplab.launch(rank_programs.on_the_gpu, detach=False, warm=False).wait(120) == [6.0]


def test_nvml_gauges_of_a_rank() -> None:
    run = dplab.launch(rank_programs.busy_gpu, detach=False)
    survivors.rank_pids(run.path, 1)

    def measured() -> bool:
        return any(event.name == "utilization" and {"gpu", "gpu_memory"} <= event.attrs.keys()
                   for event in run.events())

    survivors.poll(measured, "a gauge of the GPU")
    run.stop(timeout=0)
