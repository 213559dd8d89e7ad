"""What is known about the notebook around us: whether somebody watches, which cell runs, how to show a picture."""

from __future__ import annotations

import time
import weakref
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.display import display


class Cells:
    """When the cells of this kernel run. A busy kernel may hold back the page's messages: silence is no proof."""

    def __init__(self) -> None:
        self.running = True  # made by a cell
        self.ended_at = 0.0
        self._boards: weakref.WeakSet[Any] = weakref.WeakSet()
        shell = get_ipython()
        if shell is not None:
            shell.events.register("pre_run_cell", self._begin)
            shell.events.register("post_run_cell", self._end)

    def after_each(self, board: Any) -> None:
        """Calls `board.after_cell()` on the main thread after every cell, until the board is frozen or closed."""
        self._boards.add(board)

    def _begin(self, *_: Any) -> None:
        self.running = True

    def _end(self, *_: Any) -> None:
        self.running, self.ended_at = False, time.monotonic()
        for board in list(self._boards):
            if not (board.frozen or board.closed):
                board.after_cell()


_cells: Cells | None = None


def cells() -> Cells:
    """This kernel's cells."""
    global _cells
    if _cells is None:
        _cells = Cells()
    return _cells


def _request() -> dict[str, Any] | None:
    """The execute request of the cell that runs, None outside a Jupyter kernel."""
    kernel = getattr(get_ipython(), "kernel", None)
    return kernel.get_parent("shell") if kernel is not None else None


def in_kernel() -> bool:
    """True in a Jupyter kernel, with or without somebody watching."""
    return _request() is not None


def watched() -> bool:
    """True where a person may see widgets: the request allows `input()`, which headless runners do not."""
    request = _request()
    return bool(request and request.get("content", {}).get("allow_stdin"))


def cell_id() -> str | None:
    """The front end's id of the cell that runs, where it tells one."""
    request = _request()
    return request.get("metadata", {}).get("cellId") if request else None


def show(bundle: dict[str, Any], display_id: str, *, update: bool = False) -> None:
    """Displays a mime bundle under an id, or replaces what stands there; in a script, where nothing can, its words."""
    display(bundle, raw=True, display_id=display_id, update=update) if get_ipython() else print(bundle["text/plain"])
