"""Plotly figures in a real browser: nothing of what stands around a picture lies on anything else, or is cut off."""

from __future__ import annotations

import pytest
from plotly.offline import get_plotlyjs

from dplab.views.figures import figure
from dplab.views.fold import Fold
from tests.browser.lab import CHROMIUM, browser_page
from tests.views.synthetic import run_events

pytestmark = [
    pytest.mark.browser, pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed; apt-get install chromium"),
]
BOXES = """() => [...document.querySelectorAll('.plotly-graph-div')].map(figure => {
  const outside = figure.getBoundingClientRect();
  return [...figure.querySelectorAll('.gtitle, .xtitle, .legendtext, .annotation-text')]
    .filter(one => one.textContent).map(one => [one, one.getBoundingClientRect()])
    .map(([one, box]) => [one.textContent, box.left - outside.left, box.top - outside.top,
                          box.right - outside.left, box.bottom - outside.top, outside.width, outside.height]);
})"""


def test_titles_legends_values_and_notes_do_not_meet():
    fold = Fold(2, "zero2")
    fold.feed(run_events(2, 20))
    charts = fold.charts()
    parts = [figure(chart).to_html(full_html=False, include_plotlyjs=False, default_width="820px")
             for chart in charts]
    with browser_page(width=860, height=900) as page:
        page.set_content(f"<script>{get_plotlyjs()}</script>{''.join(parts)}")
        page.wait_for_function(f"() => document.querySelectorAll('.gtitle').length >= {len(charts)}")
        found = page.evaluate(BOXES)
    assert len(found) == len(charts)
    for texts in found:
        for place, (text, left, top, right, bottom, width, height) in enumerate(texts):
            assert min(left, top, width - right, height - bottom) >= 0, text
            for other, x0, y0, x1, y1, *_ in texts[place + 1:]:
                assert x1 <= left or x0 >= right or y1 <= top or y0 >= bottom, (text, other)
