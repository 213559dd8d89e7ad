"""How much memory there is: the machine's, or a container's where that allows less."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from dplab.telemetry.limits import host_memory


def test_a_container_s_limit_counts_where_it_is_less(tmp_path: Path) -> None:
    (tmp_path / "max").write_text("1000000\n")
    assert host_memory((tmp_path / "max",)) == (1_000_000, "container, all ranks")


@pytest.mark.parametrize("text", ["max\n", str(2**63), "", "nonsense"])
def test_without_one_it_is_the_machine_s(text: str, tmp_path: Path) -> None:
    (tmp_path / "max").write_text(text)
    for groups in ((), (tmp_path / "absent",), (tmp_path / "max",)):
        assert host_memory(groups) == (psutil.virtual_memory().total, "host, all ranks")
