"""The GPU script, where there is a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_every_check_of_the_gpu_script_holds() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.gpu.smoke"], cwd=Path(__file__).parents[2], text=True,
                          capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_a_gpu_the_script_says_so() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.gpu.smoke"], cwd=Path(__file__).parents[2], text=True,
                          capture_output=True, timeout=300, check=False, env={"CUDA_VISIBLE_DEVICES": ""})
    assert (done.returncode, done.stdout.strip()) == (2, "no GPU here")
