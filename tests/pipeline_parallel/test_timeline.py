"""One form for simulated and recorded timelines, and what differs between two of them."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from shardwise.pipeline_parallel.schedule import Action, Kind, build
from shardwise.pipeline_parallel.simulator import Costs, simulate
from shardwise.pipeline_parallel.timeline import Event, Timeline, compare, load_timeline

F, B, W, BW, U = Kind


def test_json_gives_a_timeline_back(tmp_path: Path) -> None:
    timeline = simulate(build("zbv", 2, 3, 2), Costs.uniform(4, 1.5, 2, Fraction(1, 2)), unit="s").timeline
    path = tmp_path / "it.json"
    path.write_text(json.dumps(timeline.to_json()))
    assert load_timeline(path) == timeline
    path.write_text(json.dumps({"timeline": timeline.to_json(), "other": 1}))
    assert load_timeline(path) == timeline


def test_what_is_no_timeline_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "it.json"
    for text in ("[", "{}", '{"events": [[1]]}', "[1]"):
        path.write_text(text)
        with pytest.raises(ValueError, match="timeline") as caught:
            load_timeline(path)
        assert "\n" not in str(caught.value)
        assert str(caught.value).startswith(str(path))
    with pytest.raises(ValueError, match="nowhere.json: cannot be read: No such file or directory; give"):
        load_timeline(tmp_path / "nowhere.json")


def test_recordings_of_ranks_merge_and_begin_at_zero() -> None:
    parts = [
        Timeline("1f1b", "measured", "s", (Event(rank, Action(F, 0), rank, 100.0 + rank, 100.5 + rank, step=4),))
        for rank in range(3)
    ]
    merged = Timeline.merge(parts)
    assert [(event.rank, event.start) for event in merged.events] == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert merged.makespan == 2.5
    assert merged.busy == (0.5, 0.5, 0.5)


def test_steps_are_told_apart_and_the_typical_one_found() -> None:
    events = tuple(
        Event(0, Action(F, 0), 0, 10.0 * step, 10.0 * step + length, step) for step, length in ((3, 9), (4, 1), (5, 2))
    )
    timeline = Timeline("gpipe", "measured", "s", events)
    assert timeline.of_step(4).events == (Event(0, Action(F, 0), 0, 0.0, 1.0, 4),)
    assert timeline.typical_step().makespan == 2
    with pytest.raises(ValueError, match="no step 6; it has 3 to 5"):
        timeline.of_step(6)


def test_overlapping_events_count_once_as_busy() -> None:
    events = (Event(0, Action(F, 0), 0, 0, 4), Event(0, Action(BW, 1), 0, 0, 4), Event(0, Action(BW, 0), 0, 5, 6))
    assert Timeline("x", "simulated", "", events).busy == (5,)


def test_measured_costs_are_medians_by_stage() -> None:
    rows = (
        (F, 0, 1.0), (F, 0, 3.0), (F, 0, 2.0), (BW, 0, 5.0), (U, 0, 0.25),
        (F, 1, 4.0), (B, 1, 1.5), (W, 1, 2.5),
    )  # fmt: skip
    events = tuple(Event(s, Action(k, n), s, 10 * n, 10 * n + t) for n, (k, s, t) in enumerate(rows))
    costs = Costs.measured(Timeline("x", "measured", "s", events), 2)
    assert costs == Costs((2.0, 4.0), (2.5, 1.5), (2.5, 2.5), (5.0, 4.0), update=0.25)
    with pytest.raises(ValueError, match="no complete forward and backward of stage 2"):
        Costs.measured(Timeline("x", "measured", "s", events), 3)


def test_simulation_from_its_own_times_is_the_same() -> None:
    schedule = build("zb-h1", 3, 5)
    costs = Costs((1.0, 2.0, 1.5), (1.0, 1.5, 1.0), (0.5, 0.75, 1.0))
    first = simulate(schedule, costs)
    again = simulate(schedule, Costs.measured(first.timeline, 3))
    assert again.timeline == first.timeline


def test_comparison_says_how_much_slower_and_where() -> None:
    schedule = build("1f1b", 2, 2)
    simulated = simulate(schedule, Costs.uniform(2, 1.0, 1.0, 1.0)).timeline
    slower = simulate(schedule, Costs.uniform(2, 1.5, 1.0, 1.0)).timeline
    measured = replace(slower, source="measured", events=tuple(
        event._replace(start=event.start + 7, end=event.end + 7) for event in slower.events))  # fmt: skip
    found = compare(simulated, measured)
    assert found.makespan == (9.0, 10.5)
    assert found.ratio == pytest.approx(10.5 / 9)
    assert found.durations[F] == (1.0, 1.5)
    assert found.durations[BW] == (2.0, 2.0)
    assert found.waiting[0] == (pytest.approx(3 / 9), pytest.approx(3.5 / 10.5))
    assert found.latest[2] == pytest.approx(1.5)
    assert found.lines()[0] == "step 9 simulated, 10.5 measured: +16.7%"


def test_different_schedules_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="only the simulated timeline has BW2 on rank 0"):
        compare(simulate(build("1f1b", 2, 3)).timeline, simulate(build("1f1b", 2, 2)).timeline)
