"""JupyterLab and Chromium for tests: a server on a port of its own, a page on it, commands into its notebook."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from dplab.launcher import linux

REPOSITORY = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
          "--disable-component-update", "--disable-sync"]
AT_STEP = "step => { const b = document.querySelector('.dplab-board'); return b && Number(b.dataset.step) >= step; }"
ALL_RUN = """() => window.jupyterapp.shell.currentWidget.content.widgets
  .filter(cell => cell.model.type === 'code').every(cell => cell.model.executionCount)"""
_OPEN = """async () => {
  const app = window.jupyterapp; await app.restored;
  let panel;
  while (!(panel = app.shell.currentWidget) || !panel.sessionContext) await new Promise(r => setTimeout(r, 50));
  const late = new Promise((_, no) => setTimeout(() => no(new Error("no kernel within 60 s")), 60000));
  await Promise.race([late, panel.context.ready.then(() => panel.sessionContext.ready)]);
  await Promise.race([late, panel.sessionContext.session.kernel.info]);
}"""


def free_port() -> int:
    """A port nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Lab:
    """A JupyterLab server rooted at `root`; `url(path)` opens a notebook with a clean workspace."""

    def __init__(self, root: Path, scratch: Path, *, dark: bool = False, ci: bool = False) -> None:
        self.root, self.token, self.port = root, secrets.token_hex(16), free_port()
        self.runs = scratch / "runs"
        settings = scratch / "settings"
        settings.mkdir(parents=True)
        overrides: dict[str, Any] = {"@jupyterlab/apputils-extension:notification": {
            "fetchNews": "false", "checkForUpdates": False}}
        if dark:
            overrides["@jupyterlab/apputils-extension:themes"] = {"theme": "JupyterLab Dark"}
        (settings / "overrides.json").write_text(json.dumps(overrides))
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "DPLAB_RUNS": str(scratch / "runs"),
                       **{f"JUPYTER_{kind}_DIR": str(scratch / kind.lower()) for kind in ("CONFIG", "DATA", "RUNTIME")}}
        environment.pop("CI", None)
        if ci:
            environment["CI"] = "true"
        self.log = scratch / "server.log"
        with self.log.open("w") as log:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "jupyterlab", "--allow-root", "--no-browser", "--ip=127.0.0.1",
                 f"--port={self.port}", f"--IdentityProvider.token={self.token}", "--expose-app-in-browser",
                 "--JupyterNotebookApp.expose_app_in_browser=True",
                 f"--LabApp.app_settings_dir={settings}", f"--ServerApp.root_dir={root}"],
                stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
                preexec_fn=functools.partial(linux.die_with, os.getpid()))  # also where pytest itself is killed
        self._wait()

    def _wait(self, seconds: float = 60) -> None:
        limit = time.monotonic() + seconds
        while time.monotonic() < limit and self._server.poll() is None:
            with contextlib.suppress(URLError, OSError):
                urlopen(f"http://127.0.0.1:{self.port}/api?token={self.token}").close()
                return
            time.sleep(0.1)
        self.close()
        raise RuntimeError(f"JupyterLab did not answer within {seconds} s:\n{self.log.read_text()[-2000:]}")

    def url(self, notebook: str, *, classic: bool = False) -> str:
        """Address of a notebook below the root, in JupyterLab or in Notebook 7 (`classic`)."""
        place = "notebooks" if classic else "lab/tree"
        return f"http://127.0.0.1:{self.port}/{place}/{notebook}?token={self.token}&reset"

    def close(self) -> None:
        """Ends the server and its kernels: all are in the session that we started."""
        if self._server.poll() is None:
            os.killpg(self._server.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._server.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._server.pid, signal.SIGKILL)


@contextlib.contextmanager
def browser_page(*, width: int = 1280, height: int = 1500) -> Iterator[Any]:
    """A page of headless Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        try:
            yield browser.new_page(viewport={"width": width, "height": height})
        finally:
            browser.close()


def open_notebook(page: Any, lab: Lab, notebook: str, *, classic: bool = False) -> None:
    """Opens a notebook and waits until its kernel answers."""
    page.goto(lab.url(notebook, classic=classic))
    page.wait_for_function("() => window.jupyterapp", timeout=60_000)
    page.evaluate(_OPEN)


def restart_kernel(page: Any) -> None:
    """Restarts the notebook's kernel and waits until it answers."""
    page.evaluate("async () => { const {kernel} = window.jupyterapp.shell.currentWidget.sessionContext.session; "
                  "await kernel.restart(); await kernel.info; }")


def command(page: Any, name: str) -> None:
    """Starts a JupyterLab command without waiting for its end."""
    page.evaluate("name => { window.jupyterapp.commands.execute(name); }", name)


def board_data(page: Any) -> dict[str, str]:
    """What the (first) board on the page says about itself: seq, redraws, step, state, drawMs, lagMs."""
    data = page.evaluate("() => { const b = document.querySelector('.dplab-board'); return b ? {...b.dataset} : {}; }")
    return dict(data)


def switch_theme(page: Any, theme: str) -> None:
    """Changes JupyterLab's theme while the notebook is open."""
    page.evaluate("theme => window.jupyterapp.commands.execute('apputils:change-theme', {theme})", theme)


def save(page: Any) -> None:
    """Saves the notebook and waits until it is written."""
    page.evaluate("async () => { await window.jupyterapp.shell.currentWidget.context.save(); }")


def outputs(page: Any) -> list[str]:
    """Type and text of every output of the notebook, in order, also of those that are scrolled away."""
    told = page.evaluate("() => window.jupyterapp.shell.currentWidget.context.model.toJSON()"
                         ".cells.flatMap(cell => cell.outputs || [])")
    return [json.dumps(output) for output in told]
