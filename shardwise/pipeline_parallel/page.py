"""A timeline as one HTML file that needs nothing else: zoom, pan, and every action's times under the pointer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from shardwise.pipeline_parallel.drawing import COLORS, MEANING, color, kinds
from shardwise.pipeline_parallel.timeline import Comparison, Timeline


def save_page(
    timelines: Sequence[Timeline],
    path: str | Path,
    title: str,
    chips: Sequence[str] = (),
    table: Sequence[Sequence[str]] = (),
    comparison: Comparison | None = None,
) -> None:
    """Writes one or several timelines below each other, on one time axis if their units agree.

    Args:
        timelines: each is a pane; below each rank stands how many activations it holds.
        title: heading of the page.
        chips: short facts under it.
        table: a header row and rows, shown below.
        comparison: shown below the table.
    """
    data: dict[str, Any] = {
        "title": title,
        "chips": list(chips),
        "kinds": [(kind.value, MEANING[kind], COLORS[kind]) for kind in kinds(timelines)],
        "meaning": {kind.value: text for kind, text in MEANING.items()},
        "timelines": [_pane(timeline.from_zero()) for timeline in timelines],
        "table": {"head": table[0], "rows": table[1:]} if table else None,
        "comparison": comparison.lines() if comparison else [],
    }
    template = files("shardwise.pipeline_parallel").joinpath("timeline.html").read_text(encoding="utf-8")
    text = json.dumps(data).replace("<", "\\u003c")  # nothing in the data can close the script element
    Path(path).write_text(template.replace("__DATA__", text), encoding="utf-8")


def _pane(timeline: Timeline) -> dict[str, Any]:
    """What the page's script draws of a timeline."""
    return {
        "label": f"{timeline.name}, {timeline.source}",
        "unit": timeline.unit,
        "ranks": len(timeline.rows),
        "events": [
            [e.rank, e.action.kind.value, timeline.label(e), e.action.chunk, e.stage]
            + [float(e.start), float(e.end), e.step, color(e, timeline.slices)]
            for e in timeline.events
        ],
    }
