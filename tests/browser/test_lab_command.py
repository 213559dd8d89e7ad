"""`dplab lab` as a newcomer starts it: the notebooks are there, and nothing lies over them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.browser.lab import CHROMIUM, REPOSITORY, browser_page, free_port

pytestmark = [
    pytest.mark.browser, pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed; apt-get install chromium"),
]
ANNOUNCES = "async id => { await window.jupyterapp.restored; return window.jupyterapp.hasPlugin(id); }"


def test_a_newcomer_sees_the_notebooks_and_is_not_asked_about_news(tmp_path):
    """The plugin that asks is not there; JupyterLab's other ones are."""
    port = free_port()
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "DPLAB_RUNS": str(tmp_path / "runs"),
                   **{f"JUPYTER_{kind}_DIR": str(tmp_path / kind.lower()) for kind in ("CONFIG", "DATA", "RUNTIME")}}
    with subprocess.Popen(
            [sys.executable, "-m", "dplab", "lab", "--no-browser", f"--port={port}", "--ip=127.0.0.1",
             "--IdentityProvider.token=told", "--expose-app-in-browser"],
            env=environment, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            assert any("is running at" in line for line in server.stderr)      # ends where the server does
            with browser_page() as page:
                page.goto(f"http://127.0.0.1:{port}/lab?token=told&reset")
                page.wait_for_selector("text=01-quickstart.ipynb", timeout=60_000)
                assert not page.evaluate(ANNOUNCES, "@jupyterlab/apputils-extension:announcements")
                assert page.evaluate(ANNOUNCES, "@jupyterlab/apputils-extension:notification")
        finally:
            server.terminate()
