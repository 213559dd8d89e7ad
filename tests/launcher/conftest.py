"""Runs of these tests lie under the test's own folder, and none of their processes may live on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import survivors


@pytest.fixture(autouse=True)
def runs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    root = tmp_path / "runs"
    monkeypatch.setenv("DPLAB_RUNS", str(root))
    yield root
    for path in root.glob("*/pids.json"):
        survivors.assert_none(path.parent)
