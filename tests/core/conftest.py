"""Where the ranks of a case run: most run as threads and as processes over gloo and shared memory alike."""

from __future__ import annotations

from typing import Any

import pytest

from tests.worlds import in_processes, in_shm, in_threads


@pytest.fixture(params=[in_threads, in_processes, in_shm], ids=["threads", "gloo", "shm"])
def where(request: pytest.FixtureRequest) -> Any:
    """`in_threads`, `in_processes` or `in_shm`: called with a number of ranks and what each of them does."""
    return request.param
