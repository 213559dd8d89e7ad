"""The page's side of the board, in Python: a comm that keeps what is sent, and a store that applies it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from comm.base_comm import BaseComm


class RecordingComm(BaseComm):
    """Keeps every message: (type, data, buffers)."""

    opened: list[RecordingComm]

    def __init__(self, **options: Any) -> None:
        self.messages: list[tuple[str, dict[str, Any], list[Any]]] = []
        self.opened.append(self)
        super().__init__(**options)

    def publish_msg(self, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None,
                    **keys: Any) -> None:
        self.messages.append((msg_type, data or {}, list(buffers or [])))

    def board_messages(self) -> list[tuple[dict[str, Any], bytes]]:
        """Content and buffer of the board's own messages, in order."""
        return [(data["content"], bytes(buffers[0])) for kind, data, buffers in self.messages
                if kind == "comm_msg" and data.get("method") == "custom"]

    def say(self, **content: Any) -> None:
        """The page says something."""
        self.handle_msg({"content": {"comm_id": self.comm_id, "data": {"method": "custom", "content": content}},
                         "buffers": []})


class Page:
    """Applies messages as board.js does; `whole` is False once rows were missing."""

    def __init__(self) -> None:
        self.columns: dict[str, np.ndarray] = {}
        self.status: dict[str, Any] = {}
        self.charts: dict[str, dict[str, Any]] = {}
        self.whole = True
        self._sequence = 0

    def apply(self, content: dict[str, Any], data: bytes) -> None:
        floats, at = np.frombuffer(data, dtype=np.float32), 0
        if content["keyframe"]:
            self.columns.clear()
            self.charts.clear()
            self.whole = True
        elif content["seq"] != self._sequence + 1:
            self.whole = False
        self._sequence = content["seq"]
        self.status.update(content["status"])
        for name, said in content["charts"].items():
            self.charts.setdefault(name, {}).update(said)
        for part in content["parts"]:
            rows = floats[at:at + part["rows"] * part["columns"]].reshape(part["columns"], -1)
            at += rows.size
            held = self.columns.get(part["id"])
            if part["start"] == 0:
                self.columns[part["id"]] = rows
            elif held is None or held.shape != (part["columns"], part["start"]):
                self.whole = False
            else:
                self.columns[part["id"]] = np.concatenate([held, rows], axis=1)
        assert at == floats.size


def until(holds: Callable[[], bool], seconds: float = 20) -> None:
    """Waits until something holds; fails after a while."""
    limit = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < limit, f"did not happen within {seconds} s"
        time.sleep(0.01)
