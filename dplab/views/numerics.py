"""Where two runs differ, as a heat map: parameters down, steps across, units in the last place in colour."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]

from dplab.views import theme

if TYPE_CHECKING:
    from dplab.telemetry.numerics import Comparison


def heat_map(comparison: Comparison, title: str = "") -> go.Figure:
    """A figure of the largest difference of each parameter after each step; equal weights stay blank."""
    powers = np.full(comparison.ulps.shape, np.nan)
    some = comparison.ulps > 0
    powers[some] = np.log10(comparison.ulps[some].astype(np.float64))
    figure = go.Figure(go.Heatmap(
        x=comparison.steps, y=comparison.parameters, z=powers.T, customdata=comparison.ulps.T, colorscale="Cividis",
        zmin=0, colorbar={"title": "ulp", "tickvals": [0, 2, 4, 6, 8], "ticktext": ["1", "10²", "10⁴", "10⁶", "10⁸"]},
        hovertemplate="step %{x}, %{y}: %{customdata:,} ulp<extra></extra>"))
    figure.update_layout(template="none", title=title or str(comparison), height=120 + 18 * len(comparison.parameters),
                         margin={"l": 220, "r": 20, "t": 50, "b": 40}, font={"color": theme.TEXT, "size": 12},
                         paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)")
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title="step")
    return figure
