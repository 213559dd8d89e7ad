"""Every Python block of the README runs as it stands, in a program of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S | re.M)
SAYS = ["0 5.", "run ", "zero3 stopped\n", "5 steps, 53 parameters: equal to the bit\n[]\n", "went on from step 0\n"]
"""What each block prints, or how that begins."""


def test_no_block_goes_unread():
    assert len(BLOCKS) == len(SAYS)


@pytest.mark.parametrize("block", range(len(SAYS)))
def test_a_block_runs_as_pasted(block, tmp_path):
    # a program that trains for minutes is shortened, nothing else
    script = BLOCKS[block].replace("range(200)", "range(2)").replace('{"steps": 60}', '{"steps": 2}')
    (tmp_path / "mine.py").write_text(script)
    done = subprocess.run([sys.executable, "mine.py"], cwd=tmp_path, capture_output=True, text=True, timeout=180,
                          check=False, env={**os.environ, "DPLAB_RUNS": str(tmp_path / "runs")})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(SAYS[block]), done.stdout
    assert bool(done.stdout) == bool(SAYS[block])
