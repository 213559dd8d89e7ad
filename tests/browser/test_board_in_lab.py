"""The board in JupyterLab in a real browser: it appears, moves, follows the theme, stops, and leaves a picture."""

from __future__ import annotations

import importlib.util
import json
import platform
import shutil

import nbformat
import pytest

import dplab
from tests.browser.lab import (
    ALL_RUN,
    AT_STEP,
    CHROMIUM,
    REPOSITORY,
    Lab,
    board_data,
    browser_page,
    command,
    open_notebook,
    outputs,
    restart_kernel,
    save,
    switch_theme,
)

pytestmark = [
    pytest.mark.browser, pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed; apt-get install chromium"),
]
NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
QUICKSTART = "01-quickstart.ipynb"
REPLAY, SMALL, CLASSIC = "replay.ipynb", "small.ipynb", "classic.ipynb"
STEERED, ATTACHED = "steered.ipynb", "attached.ipynb"
STEERING = """import dplab
def train():
    import sys
    import torch
    engine = dplab.parallelize(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)), torch.optim.AdamW)
    print("rank", dplab.init().rank, "trains")
    print("a warning", file=sys.stderr)
    for _ in range(100_000):
        engine.backward(engine(torch.ones(256, 64)).square().mean())
        engine.step()
run = dplab.launch(train, world_size=2, strategy="zero2")"""
STEP_IS = "step => Number(document.querySelector('.dplab-board').dataset.step) === step"
STATE_IS = "state => document.querySelector('.dplab-board').dataset.state === state"
OPENED = """async name => {
  const panel = await window.jupyterapp.commands.execute('docmanager:open', {path: name});
  await panel.context.ready; await panel.sessionContext.ready; await panel.sessionContext.session.kernel.info;
  await new Promise(after => setTimeout(after, 1500));   // JupyterLab writes after the kernel's first answer
  const {model} = panel.context, told = [model.dirty, model.toJSON().metadata];
  await panel.sessionContext.shutdown();
  return told;
}"""
FINDINGS = """() => /^(1 .+\\nseen .+; lost: .+\\ntry .+|.*nothing to complain of)/.test(
  document.querySelector('.dplab-findings pre').textContent)
  && /[0-9]+ steps on 2 ranks/.test(document.querySelector('.dplab-findings figcaption').textContent)"""
WORD_BREAKS = "() => [...document.querySelectorAll('.dplab-panel pre')].map(pre => getComputedStyle(pre).wordBreak)"
CELLS = "() => window.jupyterapp.shell.currentWidget.content.widgets.length"
GONE = "() => !document.querySelector('.dplab-board')"
COLOURS = """() => [...document.querySelectorAll('.dplab-board canvas')].map(canvas => {
  const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data, seen = new Set();
  for (let i = 0; i < pixels.length; i += 4)
    if (pixels[i + 3] > 250) seen.add(pixels[i] * 65536 + pixels[i + 1] * 256 + pixels[i + 2]);
  return [...seen];
})"""
CLIPPED = """() => [...document.querySelectorAll(
  '.dplab-panel header > b, .dplab-value:not(:empty), .dplab-facts > *')].map(
  one => [one.textContent, one.scrollWidth > one.clientWidth + 1 && getComputedStyle(one).display !== 'inline'
    || one.offsetHeight > 24])"""
GROUND = """() => {
  const style = getComputedStyle(document.querySelector('.dplab-board'));
  return [style.backgroundColor, style.color].map(text => text.match(/[0-9]+/g).slice(0, 3).map(Number));
}"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab")
    root = folder / "notebooks"
    root.mkdir()
    shutil.copy(REPOSITORY / "notebooks" / QUICKSTART, root)
    cells = ["from tests.widgets.replay import ReplayRun\nfrom dplab.widgets.board import Board\nrun = ReplayRun()",
             "board = Board(run)\nboard", "import time\ntime.sleep(6)"]
    attach = ["import dplab", "run = dplab.runs()[0]\nrun.dashboard()"]
    for name, told in ((REPLAY, cells), (SMALL, cells), (CLASSIC, cells), (ATTACHED, attach),      # a kernel each
                       (STEERED, [STEERING, "run.dashboard(hz=4)"])):
        nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in told], metadata={
            "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}), root / name)
    server = Lab(root, folder / "scratch", ci=True)
    yield server
    for run in dplab.runs(server.runs):
        run.stop(timeout=0)
    server.close()


@pytest.fixture
def page(lab):
    with browser_page(width=1400, height=1400) as made:
        asked: list[str] = []
        complaints: list[str] = []
        made.on("request", lambda request: asked.append(request.url))
        made.on("pageerror", lambda error: complaints.append(str(error)))
        made.complaints = complaints
        yield made
        elsewhere = [url for url in asked if not url.startswith((f"http://127.0.0.1:{lab.port}", "data:", "blob:"))]
        assert elsewhere == []
        assert complaints == []


def test_notebook_01_shows_a_moving_board_and_saves_a_still_one(lab, page, tmp_path):
    open_notebook(page, lab, QUICKSTART)
    command(page, "notebook:run-all-cells")
    page.wait_for_function(AT_STEP, arg=3, timeout=90_000)
    before = board_data(page)
    page.locator(".dplab-board").scroll_into_view_if_needed()
    page.wait_for_function(AT_STEP, arg=int(before["step"]) + 3, timeout=60_000)
    after = board_data(page)
    assert int(after["seq"]) > int(before["seq"])
    assert int(after["redraws"]) > int(before["redraws"])
    drawn = page.evaluate(COLOURS)
    assert len(drawn) == 11                          # one a panel, in the board's order
    orange, blue, vermillion, pink = 0xE69F00, 0x0072B2, 0xD55E00, 0xCC79A7
    assert vermillion in drawn[0]                    # the smoothed loss
    assert 0x009E73 in drawn[1]                      # the rate of the last steps
    assert {blue, vermillion} <= set(drawn[3])       # backward and exposed synchronisation, rank by rank
    assert {blue, orange} <= set(drawn[4])           # backward, and buckets against it
    assert {orange, pink} <= set(drawn[5])           # gradients and parameters sent
    assert {blue, orange} <= set(drawn[6])           # parameters and gradients in memory
    assert blue in drawn[8]                          # who holds what
    page.locator(".dplab-board").screenshot(path=str(tmp_path / "board.png"))

    page.wait_for_function(GONE, timeout=60_000)     # the run was stopped: the picture stays
    page.wait_for_function(ALL_RUN, timeout=120_000)
    page.screenshot(path=str(tmp_path / "page.png"))
    said = outputs(page)
    assert any("held as predicted: True True True True" in text for text in said)
    assert not any('"output_type": "error"' in text for text in said)
    save(page)
    saved = json.loads((lab.root / QUICKSTART).read_text())
    board = next(cell for cell in saved["cells"] if "run.dashboard()" in "".join(cell["source"]))
    assert [sorted(output["data"]) for output in board["outputs"]] == [["image/svg+xml", "text/plain"]]
    assert "stopped" in "".join(board["outputs"][0]["data"]["text/plain"])
    assert "widgets" not in saved["metadata"]
    assert (lab.root / QUICKSTART).stat().st_size < 200_000


def test_opening_a_notebook_changes_nothing_in_it(lab, page):
    """All of them one after the other on one page: a page and its start take longer than a notebook."""
    open_notebook(page, lab, SMALL)
    changed = []
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, as_version=4)
        notebook.metadata.language_info.version = platform.python_version()
        nbformat.write(notebook, lab.root / f"opened-{path.name}")
        if page.evaluate(OPENED, f"opened-{path.name}") != [False, notebook.metadata]:
            changed.append(path.name)
    assert len(NOTEBOOKS) > 9
    assert changed == []


def test_in_a_small_window_nothing_is_clipped_and_keys_are_the_boards(lab, page, tmp_path):
    """1280 wide with the file browser open, as JupyterLab starts; in its command mode d twice deletes a cell."""
    page.set_viewport_size({"width": 1280, "height": 1400})
    open_notebook(page, lab, SMALL)
    command(page, "notebook:run-all-cells")
    page.wait_for_function(AT_STEP, arg=8, timeout=60_000)
    page.locator(".dplab-board").screenshot(path=str(tmp_path / "small.png"))
    words = page.evaluate(CLIPPED)
    assert len(words) >= 5 * 2
    assert [text for text, clipped in words if clipped or not text] == []
    assert set(page.evaluate(WORD_BREAKS)) == {"normal"}      # JupyterLab's own breaks words anywhere

    page.get_by_label("rank shown").focus()
    page.keyboard.press("d")
    page.keyboard.press("d")
    slider = page.get_by_label("step shown")
    slider.click()
    middle = int(slider.input_value())
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    page.wait_for_function(STEP_IS, arg=middle - 2, timeout=30_000)
    assert page.evaluate(CELLS) == 3


def test_board_follows_theme_rank_reload_and_its_stop_button(lab, page, tmp_path):
    open_notebook(page, lab, REPLAY)
    command(page, "notebook:run-all-cells")
    page.wait_for_selector(".dplab-board canvas", state="attached", timeout=60_000)
    began = board_data(page)
    page.wait_for_function(AT_STEP, arg=int(began.get("step") or 0) + 8, timeout=30_000)  # while a cell sleeps
    (ground, ink) = page.evaluate(GROUND)
    assert sum(ground) > sum(ink)
    switch_theme(page, "JupyterLab Dark")
    page.wait_for_function("() => document.body.dataset.jpThemeLight === 'false'", timeout=30_000)
    page.wait_for_function(f"() => {{ const [ground, ink] = ({GROUND})().map(rgb => rgb[0] + rgb[1] + rgb[2]); "
                           "return ground < ink; }", timeout=30_000)
    page.locator(".dplab-board").screenshot(path=str(tmp_path / "dark.png"))

    page.get_by_label("rank shown").select_option("1")
    page.wait_for_function("() => document.querySelector('.dplab-steps b').textContent === 'Step time, rank 1'")

    # a kernel that is busy when the page comes back does not tell it in time which widgets there are
    page.wait_for_function(ALL_RUN, timeout=60_000)
    save(page)
    page.reload()
    page.wait_for_function(AT_STEP, arg=1, timeout=60_000)
    step = int(board_data(page)["step"])
    page.wait_for_function(AT_STEP, arg=step + 8, timeout=30_000)

    page.get_by_role("button", name="Stop run").click()
    # a reloaded page no longer knows which output the picture replaces: the board stays, with its last word
    page.wait_for_function("() => document.querySelector('.dplab-board').dataset.state === 'stopped'", timeout=30_000)
    assert not page.get_by_role("button", name="Stop run").is_visible()
    page.screenshot(path=str(tmp_path / "stopped.png"))


def test_a_run_is_paused_stepped_looked_back_at_and_relaunched_from_the_page(lab, page, tmp_path):
    open_notebook(page, lab, STEERED)
    command(page, "application:toggle-left-area")
    command(page, "notebook:run-all-cells")
    page.wait_for_function(AT_STEP, arg=20, timeout=90_000)
    page.get_by_role("button", name="Pause").click()
    page.wait_for_function(STATE_IS, arg="paused", timeout=30_000)
    page.wait_for_timeout(1000)                      # the last events reach the page
    steps = int(board_data(page)["step"])
    page.get_by_role("button", name="Step", exact=True).click()
    page.wait_for_function(STEP_IS, arg=steps + 1, timeout=30_000)

    slider = page.get_by_label("step shown")
    slider.evaluate("slider => { slider.value = 7; slider.dispatchEvent(new Event('input')); }")
    page.wait_for_function(STEP_IS, arg=7, timeout=30_000)
    page.wait_for_function("() => document.querySelector('.dplab-sync b').textContent.endsWith('step 7')")
    page.locator(".dplab-board").screenshot(path=str(tmp_path / "past.png"))
    page.get_by_role("button", name="Live").click()
    page.wait_for_function(STEP_IS, arg=steps + 1, timeout=30_000)
    printed = page.locator(".dplab-logs pre").inner_text()
    assert sorted(printed.split("\n")[:4]) == ["0 a warning", "0 rank 0 trains", "1 a warning", "1 rank 1 trains"]
    page.get_by_label("ownership shown").select_option("publish")
    page.wait_for_function("() => document.querySelector('.dplab-ownership b').textContent.endsWith('publish')")

    page.wait_for_function(FINDINGS, timeout=30_000)

    page.get_by_role("button", name="Resume").click()
    page.wait_for_function(AT_STEP, arg=steps + 20, timeout=30_000)
    page.get_by_label("strategy to relaunch under").select_option("zero3")
    page.get_by_role("button", name="Relaunch").click()
    page.wait_for_function("() => document.querySelector('.dplab-facts').textContent.includes('zero3')", timeout=60_000)
    page.wait_for_function(AT_STEP, arg=5, timeout=60_000)
    page.locator(".dplab-board").screenshot(path=str(tmp_path / "relaunched.png"))
    beside = page.get_by_label("run to compare with")
    assert beside.locator("option").count() >= 2
    assert beside.input_value() == str(dplab.runs(lab.runs)[1].path)      # and may be taken away again:
    assert "earlier run" in page.locator(".dplab-loss").inner_text()
    beside.select_option("")
    page.wait_for_function("() => !document.querySelector('.dplab-loss').innerText.includes('earlier run')")

    restart_kernel(page)                             # the board is dead, the run goes on
    run = dplab.runs(lab.runs)[0]
    assert (run.state, run.spec.strategy) == ("running", "zero3")
    open_notebook(page, lab, ATTACHED)
    command(page, "notebook:run-all-cells")
    page.wait_for_function(AT_STEP, arg=10, timeout=60_000)
    page.wait_for_function(AT_STEP, arg=int(board_data(page)["step"]) + 10, timeout=30_000)
    page.get_by_role("button", name="Stop run").click()
    page.wait_for_function(GONE, timeout=60_000)
    said = outputs(page)
    assert len(said) == 1
    assert "zero3, 2 ranks, stopped" in said[0]
    assert run.state == "stopped"


@pytest.mark.skipif(importlib.util.find_spec("notebook") is None, reason="pip install notebook to test Notebook 7")
def test_the_board_in_notebook_7(lab, page, tmp_path):
    open_notebook(page, lab, CLASSIC, classic=True)
    page.complaints.clear()                          # Notebook's own, while it starts
    command(page, "notebook:run-all-cells")
    page.wait_for_function(AT_STEP, arg=8, timeout=60_000)
    page.wait_for_function(AT_STEP, arg=int(board_data(page)["step"]) + 8, timeout=30_000)
    assert all(page.evaluate(COLOURS)[:8])
    page.screenshot(path=str(tmp_path / "notebook7.png"))
