"""A comm that records, in the place of a front end; and no board left behind by a test."""

from __future__ import annotations

import comm
import pytest
from ipywidgets import Widget

from tests.widgets.page import RecordingComm


@pytest.fixture
def comms(monkeypatch):
    """The comms opened during the test."""
    opened: list[RecordingComm] = []
    monkeypatch.setattr(RecordingComm, "opened", opened, raising=False)
    monkeypatch.setattr(comm, "create_comm", lambda *args, **options: RecordingComm(**options))
    yield opened
    Widget.close_all()


@pytest.fixture
def shown(monkeypatch):
    """What was displayed during the test: (bundle, display id, update)."""
    from dplab.widgets import frontend

    calls: list[tuple[dict, str, bool]] = []
    monkeypatch.setattr(frontend, "show", lambda bundle, display_id, update=False: calls.append(
        (bundle, display_id, update)))
    return calls
