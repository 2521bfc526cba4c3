"""Timelines for the eye and for trace viewers: terminal, PNG and SVG, Chrome and Perfetto traces."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import groupby
from math import lcm
from pathlib import Path
from typing import Any

from rich.text import Text

from shardwise.pipeline_parallel.actions import Kind
from shardwise.pipeline_parallel.timeline import Event, Timeline

COLORS = {Kind.F: "#3d7fd9", Kind.B: "#e58a36", Kind.W: "#4ca868", Kind.BW: "#d2603f", Kind.U: "#8b62cf"}
"""One colour per kind of action; later chunks are drawn paler."""

MEANING = {
    Kind.F: "forward",
    Kind.B: "backward of the input",
    Kind.W: "backward of the weights",
    Kind.BW: "backward",
    Kind.U: "update",
}


def color(event: Event, slices: int = 1) -> str:
    """The colour of an event as #rrggbb: its kind's, mixed with white by chunk and, a little, by odd microbatches or,
    with slices, odd sequences."""
    white = min(0.6, 0.3 * event.action.chunk) + 0.12 * (event.action.microbatch // slices % 2)
    channels = (int(COLORS[event.action.kind][at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(channel + (255 - channel) * white):02x}" for channel in channels)


def kinds(timelines: Iterable[Timeline]) -> list[Kind]:
    """The kinds of action that occur, in the order F, B, W, BW, U."""
    found = {event.action.kind for timeline in timelines for event in timeline.events}
    return [kind for kind in Kind if kind in found]


def terminal(timeline: Timeline, width: int, colored: bool = True) -> Text:
    """One line per rank, time to the right, as wide as `width` columns allow.

    A block shows its kind (D is a whole backward) and microbatch where they fit, else the one that matters more: the
    microbatch where colours tell the kind, the kind without them.
    """
    timeline = timeline.from_zero()
    margin = len(f"rank {len(timeline.rows) - 1} ")
    columns = _columns(timeline, max(20, width - margin))
    out = Text()
    for rank, row in enumerate(timeline.rows):
        out.append(f"rank {rank}".ljust(margin))
        for event, cells in groupby(_sample(row, float(timeline.makespan), columns)):
            length = sum(1 for _ in cells)
            if event is None:
                out.append("·" * length, style="bright_black")
            else:
                shade = color(event, timeline.slices)
                out.append(_label(timeline, event, length, colored), style=f"bold black on {shade}")
        out.append("\n")
    seen = replace(timeline, events=tuple(event for event in timeline.events if event.end > event.start))
    for kind in kinds([seen]):
        out.append(f" {'D' if kind is Kind.BW else kind.value} ", style=f"bold black on {COLORS[kind]}")
        out.append(f" {MEANING[kind]}  ")
    return out


def _columns(timeline: Timeline, room: int) -> int:
    """Columns to draw: a whole number for each unit of time, where times are exact and there is room."""
    times = [time for event in timeline.events for time in (event.start, event.end)]
    if not all(isinstance(time, int | Fraction) for time in times):
        return room
    units = int(timeline.makespan * lcm(*(Fraction(time).denominator for time in times)))
    return units * min(6, room // units) if 0 < units <= room else room


def _sample(row: Sequence[Event], makespan: float, columns: int) -> list[Event | None]:
    """The event in the middle of each column."""
    cells: list[Event | None] = []
    at = 0
    for column in range(columns):
        time = (column + 0.5) * makespan / columns
        while at < len(row) and row[at].end <= time:
            at += 1
        cells.append(row[at] if at < len(row) and row[at].start <= time else None)
    return cells


def _label(timeline: Timeline, event: Event, length: int, colored: bool) -> str:
    """As much of an event's name as fits into a block."""
    letter, number = "D" if event.action.kind is Kind.BW else event.action.kind.value, timeline.label(event)
    choices = [letter + number, number, ""] if colored else [letter + number, letter]
    return next(choice for choice in choices if len(choice) <= length).center(length)


def figure(timelines: Sequence[Timeline], path: str | Path, title: str) -> None:
    """Writes a PNG or SVG (or another format of matplotlib's) of one or several timelines below each other.

    Raises:
        ValueError: matplotlib is missing or does not know the format.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.collections import PatchCollection
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch, Rectangle
    except ImportError:
        raise ValueError(f"{path}: drawing PNG and SVG needs matplotlib; pip install 'shardwise[plots]'") from None
    timelines = [timeline.from_zero() for timeline in timelines]
    ranks = max(len(timeline.rows) for timeline in timelines)
    end = max(float(timeline.makespan) for timeline in timelines) or 1.0
    shortest = min((float(e.end - e.start) for t in timelines for e in t.events if e.end > e.start), default=end)
    width = min(30.0, max(9.0, 0.26 * end / shortest + 1.5))
    with rc_context({"svg.hashsalt": "shardwise", "font.size": 9}):
        drawing = Figure(figsize=(width, (0.42 * ranks + 0.75) * len(timelines) + 0.65), layout="constrained")
        drawing.suptitle(title, fontsize=11, fontweight="bold", x=0.01, ha="left")
        for number, timeline in enumerate(timelines):
            axes = drawing.add_subplot(len(timelines), 1, number + 1)
            events = [event for event in timeline.events if event.end > event.start]
            blocks = [Rectangle((float(e.start), e.rank - 0.42), float(e.end - e.start), 0.84) for e in events]
            axes.add_collection(
                PatchCollection(
                    blocks, facecolors=[color(e, timeline.slices) for e in events], edgecolors="white", linewidths=0.6
                )
            )
            for event in (event for event in timeline.events if event.end == event.start):
                axes.vlines(float(event.start), event.rank - 0.42, event.rank + 0.42, COLORS[event.action.kind], lw=1.6)
            inches = (width - 1.2) / end
            for event in events:
                name = timeline.label(event)
                if float(event.end - event.start) * inches > 0.085 * len(name) + 0.04:
                    middle = float(event.start + event.end) / 2
                    axes.text(middle, event.rank, name, ha="center", va="center", fontsize=8, clip_on=True)
            axes.set_xlim(0, end)
            axes.set_ylim(ranks - 0.45, -0.55)
            axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
            axes.set_xlabel(f"{timeline.source}, time" + (f" in {timeline.unit}" if timeline.unit else ""))
            axes.spines[["top", "right", "left"]].set_visible(False)
            axes.tick_params(axis="y", length=0)
        handles = [Patch(color=COLORS[kind], label=MEANING[kind]) for kind in kinds(timelines)]
        if any(event.action.chunk for timeline in timelines for event in timeline.events):
            handles.append(Patch(color="#d9dde4", label="paler: later chunk"))
        drawing.legend(handles=handles, loc="outside upper right", ncols=len(handles), frameon=False, fontsize=9)
        try:
            drawing.savefig(path, dpi=150, metadata={"Date": None} if str(path).endswith(".svg") else None)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


def trace(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """The Trace Event format of chrome://tracing and ui.perfetto.dev: one process per timeline, one thread per rank.

    Besides the actions it counts the activations that each rank holds. Without a unit, one is a millisecond.
    """
    events: list[dict[str, Any]] = []
    for process, timeline in enumerate(timelines):
        micro = 1e6 if timeline.unit == "s" else 1e3
        label = f"{timeline.name} {timeline.source}"
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": label}})
        for rank, row in enumerate(timeline.from_zero().rows):
            events.append(
                {"ph": "M", "name": "thread_name", "pid": process, "tid": rank, "args": {"name": f"rank {rank}"}}
            )
            held = 0
            for event in row:
                kind, microbatch, chunk = event.action
                start, end = float(event.start) * micro, float(event.end) * micro
                where = {"pid": process, "tid": rank}
                args = {"microbatch": microbatch, "chunk": chunk, "stage": event.stage, "step": event.step}
                entry = {"ph": "X", "name": f"{kind.value}{timeline.label(event)}", "cat": MEANING[kind], "ts": start}
                events.append({**entry, **where, "dur": end - start, "args": args})
                if change := {Kind.F: 1, Kind.W: -1, Kind.BW: -1}.get(kind):
                    held += change
                    name = f"activations held, rank {rank}"
                    events.append({"ph": "C", "name": name, "ts": end, **where, "args": {"held": held}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def save_trace(timelines: Sequence[Timeline], path: str | Path) -> None:
    """Writes `trace` as JSON."""
    Path(path).write_text(json.dumps(trace(timelines)))
