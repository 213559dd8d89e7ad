"""Pictures of a run: events fold into panels of plain columns; plotly and SVG draw them. No display, no torch."""
