"""What differs between two runs, as a small table."""

from __future__ import annotations

import html
from dataclasses import dataclass
from pathlib import Path

from dplab.specs import RunSpec
from dplab.telemetry.reader import RunReader
from dplab.telemetry.summary import Summary


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side. `rows`: (what, this run, the other one); a figure that was not recorded is None."""

    titles: tuple[str, str]
    rows: tuple[tuple[str, object, object], ...]

    def __repr__(self) -> str:
        cells = [("", *self.titles), *((what, _text(left), _text(right)) for what, left, right in self.rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(3)]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
                         for row in cells)

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{html.escape(title)}</th>" for title in ("", *self.titles))
        body = "".join(f"<tr><td>{html.escape(what)}</td><td>{html.escape(_text(left))}</td>"
                       f"<td>{html.escape(_text(right))}</td></tr>" for what, left, right in self.rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def compare(left: Path, right: Path) -> Comparison:
    """Strategy, size, step and exposed synchronisation, loss, memory and bytes on the wire of two runs."""
    readers = RunReader(left), RunReader(right)
    sides = [_figures(reader.spec, Summary().feed(reader.poll())) for reader in readers]
    rows = tuple((what, value, sides[1][what]) for what, value in sides[0].items())
    return Comparison((left.name, right.name), rows)


def _figures(spec: RunSpec, summary: Summary) -> dict[str, object]:
    peak = max(summary.peak_private.values(), default=None)
    return {
        "strategy": spec.strategy or "the program's own", "ranks": spec.world_size, "steps": summary.steps,
        "loss": summary.loss, "step, median ms": summary.step_ms, "exposed sync, median ms": summary.sync_ms,
        "tokens a second": summary.tokens_per_s, "peak private MB of a rank": None if peak is None else peak / 1e6,
        "MB sent by rank 0": sum(row["bytes"] for row in summary.wire.values()) / 1e6 if summary.wire else None,
    }


def _text(value: object) -> str:
    if value is None:
        return "not recorded"
    return f"{value:,.4g}" if isinstance(value, float) and abs(value) < 1e4 else (
        f"{value:,.0f}" if isinstance(value, float) else str(value))
