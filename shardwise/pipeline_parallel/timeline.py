"""What ran when: one form for simulated schedules and for recorded runs."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from shardwise.pipeline_parallel.actions import Action, Kind, label
from shardwise.pipeline_parallel.clock import Time


class Event(NamedTuple):
    """One action of one rank, from `start` to `end`; `stage` is the global stage, `step` the training step."""

    rank: int
    action: Action
    stage: int
    start: Time
    end: Time
    step: int = 0


@dataclass(frozen=True)
class Timeline:
    """The events of all ranks of a pipeline.

    Args:
        name: the schedule's name.
        source: "simulated" or "measured".
        unit: of the times, "s" or "" for a simulation in units of its own.
        events: in any order; the events of one rank do not overlap, except those of a pair that runs together.
        slices: as of `Schedule`.
    """

    name: str
    source: str
    unit: str
    events: tuple[Event, ...]
    slices: int = 1

    def label(self, event: Event) -> str:
        """What an event's microbatch is called; with slices its sequence and slice, such as 2.0."""
        return label(event.action.microbatch, self.slices)

    @cached_property
    def rows(self) -> tuple[tuple[Event, ...], ...]:
        """The events of each rank by start."""
        rows: list[list[Event]] = [[] for _ in range(max(event.rank for event in self.events) + 1)]
        for event in self.events:
            rows[event.rank].append(event)
        return tuple(tuple(sorted(row, key=lambda event: (event.start, event.end))) for row in rows)

    @property
    def makespan(self) -> Time:
        """From the first start to the last end of any rank."""
        return max(event.end for event in self.events) - min(event.start for event in self.events)

    @property
    def busy(self) -> tuple[Time, ...]:
        """Per rank how long it computes; what overlaps counts once."""
        return tuple(_covered(row) for row in self.rows)

    @property
    def span(self) -> tuple[Time, ...]:
        """Per rank the time from its first start to its last end."""
        return tuple(max(event.end for event in row) - row[0].start if row else 0 for row in self.rows)

    def from_zero(self) -> Timeline:
        """The same with the first start at 0."""
        first = min(event.start for event in self.events)
        events = (event._replace(start=event.start - first, end=event.end - first) for event in self.events)
        return replace(self, events=tuple(events))

    def of_step(self, step: int) -> Timeline:
        """The events of one training step, the first start at 0."""
        events = tuple(event for event in self.events if event.step == step)
        if not events:
            steps = sorted({event.step for event in self.events})
            raise ValueError(f"the timeline has no step {step}; it has {steps[0]} to {steps[-1]}")
        return replace(self, events=events).from_zero()

    def typical_step(self) -> Timeline:
        """The step whose makespan is the median one, the first start at 0."""
        steps = sorted((self.of_step(number) for number in {event.step for event in self.events}), key=_makespan)
        return steps[(len(steps) - 1) // 2]

    def to_json(self) -> dict[str, Any]:
        """Plain data for `json.dump`; `from_json` reads it."""
        return {
            "name": self.name,
            "source": self.source,
            "unit": self.unit,
            "slices": self.slices,
            "events": [
                [
                    e.rank,
                    e.action.kind.value,
                    e.action.microbatch,
                    e.action.chunk,
                    e.stage,
                    _plain(e.start),
                    _plain(e.end),
                ]
                + [e.step]
                for e in self.events
            ],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Timeline:
        """What `to_json` gave.

        Raises:
            ValueError: the data is no timeline.
        """
        try:
            events = tuple(
                Event(rank, Action(Kind(kind), microbatch, chunk), stage, start, end, step)
                for rank, kind, microbatch, chunk, stage, start, end, step in data["events"]
            )
            return cls(data["name"], data["source"], data["unit"], events, int(data.get("slices", 1)))
        except (KeyError, TypeError, ValueError) as error:
            what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"is no recorded timeline ({what}); {_RECORD}") from None

    @classmethod
    def merge(cls, parts: Iterable[Timeline]) -> Timeline:
        """One timeline of several ranks' recordings, the first start at 0."""
        parts = list(parts)
        return replace(parts[0], events=tuple(event for part in parts for event in part.events)).from_zero()


def load_timeline(path: str | Path) -> Timeline:
    """Reads a timeline file: a recorded run's or the JSON of `shardwise schedule --out`.

    Raises:
        ValueError: no such file or no timeline in it.
    """
    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}; {_RECORD}") from None
    except ValueError as error:  # not JSON, or not even text
        raise ValueError(f"{path}: is no recorded timeline ({error}); {_RECORD}") from None
    if isinstance(data, dict) and "timeline" in data:
        data = data["timeline"]
    try:
        return Timeline.from_json(data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


# What to do about a file that is none.
_RECORD = "give the file that log.timeline=true or --out FILE.json wrote"


@dataclass(frozen=True)
class Comparison:
    """A measured timeline beside the simulated one.

    Args:
        makespan: (simulated, measured).
        ratio: measured / simulated makespan.
        waiting: per rank (simulated, measured) share of the makespan in which it does not compute.
        durations: per kind of action the mean (simulated, measured) duration.
        latest: the action whose measured end lies furthest behind its simulated one, as (rank, action, how much).
    """

    makespan: tuple[float, float]
    ratio: float
    waiting: tuple[tuple[float, float], ...]
    durations: dict[Kind, tuple[float, float]]
    latest: tuple[int, Action, float]

    def lines(self) -> list[str]:
        """A summary to print."""
        out = [f"step {self.makespan[0]:.6g} simulated, {self.makespan[1]:.6g} measured: {self.ratio - 1:+.1%}"]
        for kind, (simulated, measured) in self.durations.items():
            out.append(f"mean {kind.value} {simulated:.6g} simulated, {measured:.6g} measured")
        for rank, (simulated, measured) in enumerate(self.waiting):
            out.append(f"rank {rank} idle {simulated:.1%} simulated, {measured:.1%} measured")
        rank, action, late = self.latest
        return [*out, f"furthest behind: rank {rank} {action} by {late:.6g}"]


def compare(simulated: Timeline, measured: Timeline) -> Comparison:
    """Puts a measured step beside its simulation; both begin at 0.

    Raises:
        ValueError: they do not have the same actions on the same ranks.
    """
    sides = simulated.from_zero(), measured.from_zero()
    ends = [{(event.rank, event.action): float(event.end) for event in side.events} for side in sides]
    if unequal := ends[0].keys() ^ ends[1].keys():
        rank, action = min(unequal)
        having = "simulated" if (rank, action) in ends[0] else "measured"
        raise ValueError(f"only the {having} timeline has {action} on rank {rank}; compare runs of the same schedule")
    durations: dict[Kind, list[list[float]]] = defaultdict(lambda: [[], []])
    for number, side in enumerate(sides):
        for event in side.events:
            durations[event.action.kind][number].append(float(event.end - event.start))
    makespan = float(sides[0].makespan), float(sides[1].makespan)
    busy = zip(sides[0].busy, sides[1].busy, strict=True)
    latest = max(ends[0], key=lambda key: ends[1][key] - ends[0][key])
    return Comparison(
        makespan=makespan,
        ratio=makespan[1] / makespan[0],
        waiting=tuple((1 - float(a) / makespan[0], 1 - float(b) / makespan[1]) for a, b in busy),
        durations={kind: (fmean(a), fmean(b)) for kind, (a, b) in sorted(durations.items())},
        latest=(*latest, ends[1][latest] - ends[0][latest]),
    )


def stage_seconds(timeline: Timeline, kind: Kind, num_stages: int) -> tuple[float | None, ...]:
    """The median duration of a kind of action on each global stage, None where it never ran."""
    found: dict[int, list[float]] = defaultdict(list)
    for event in timeline.events:
        if event.action.kind is kind:
            found[event.stage].append(float(event.end - event.start))
    return tuple(median(found[stage]) if stage in found else None for stage in range(num_stages))


def _makespan(timeline: Timeline) -> Time:
    return timeline.makespan


def _covered(row: Iterable[Event]) -> Time:
    """Length of the union of intervals sorted by start."""
    total: Time = 0
    until: Time | None = None
    for event in row:
        begin = event.start if until is None else max(event.start, until)
        if event.end > begin:
            total += event.end - begin
        until = event.end if until is None else max(until, event.end)
    return total


def _plain(time: Time) -> int | float:
    """A number that JSON can hold."""
    if isinstance(time, Fraction):
        return time.numerator if time.denominator == 1 else float(time)
    return time
