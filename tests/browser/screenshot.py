"""Makes the README's picture anew: `python -m tests.browser.screenshot [FILE] [--dark] [--step N]`.

Opens notebook 01 in JupyterLab, runs it, waits until the run on the board has reached a step, and takes the board.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from tests.browser.lab import AT_STEP, REPOSITORY, Lab, board_data, browser_page, command, open_notebook

NOTEBOOK = "01-quickstart.ipynb"


def take(file: Path, *, dark: bool = False, step: int = 45, whole_page: bool = False) -> dict[str, str]:
    """Writes a picture of the live board (or of the page around it) and returns what the board says of itself."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "notebooks"
        root.mkdir()
        shutil.copy(REPOSITORY / "notebooks" / NOTEBOOK, root)
        lab = Lab(root, Path(folder) / "scratch", dark=dark)
        try:
            with browser_page(width=1400, height=1500) as page:
                open_notebook(page, lab, NOTEBOOK)
                command(page, "application:toggle-left-area")
                command(page, "notebook:run-all-cells")
                page.wait_for_function(AT_STEP, arg=step, timeout=120_000)
                board = page.locator(".dplab-board")
                board.scroll_into_view_if_needed()
                page.wait_for_timeout(700)  # one more message after the scroll, so that every panel is drawn in view
                data = board_data(page)
                (page if whole_page else board).screenshot(path=str(file))
                return data
        finally:
            lab.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=REPOSITORY / "data" / "images" / "board.png")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--step", type=int, default=45)
    parser.add_argument("--whole-page", action="store_true")
    arguments = parser.parse_args()
    arguments.file.parent.mkdir(parents=True, exist_ok=True)
    print(take(arguments.file, dark=arguments.dark, step=arguments.step, whole_page=arguments.whole_page))


if __name__ == "__main__":
    main()
