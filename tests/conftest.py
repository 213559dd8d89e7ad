"""Runs that tests launch lie in a temporary folder, not among the user's; kept process worlds end with the session."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def runs_of_this_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPLAB_RUNS", str(tmp_path_factory.mktemp("runs")))
        yield
    if "tests.worlds" in sys.modules:
        sys.modules["tests.worlds"].ProcessWorld.drop_all()
