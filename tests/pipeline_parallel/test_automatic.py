"""The automatic schedule fits its memory limit and is never worse than the handmade ones that do."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.pipeline_parallel.automatic import automatic
from shardwise.pipeline_parallel.schedule import Kind, build, check
from shardwise.pipeline_parallel.simulator import Costs, Memory, simulate
from tests.pipeline_parallel.cases import some

time_of_stage = st.integers(1, 9)


@some
@given(st.integers(1, 5), st.integers(1, 10), st.data(), st.booleans())
def test_never_worse_than_the_handmade_that_fit(p: int, m: int, data: st.DataObject, barrier: bool) -> None:
    columns = [tuple(data.draw(st.lists(time_of_stage, min_size=p, max_size=p))) for _ in range(3)]
    full = tuple(max(pair) for pair in zip(*columns[1:], strict=True)) if data.draw(st.booleans()) else None
    costs = Costs(*columns, full, latency=data.draw(st.integers(0, 2)))
    memory = Memory((3,) * p, (data.draw(st.integers(1, 3)),) * p)
    limit = 3 * data.draw(st.integers(1, 2 * p + 1))
    schedule = automatic(p, m, costs=costs, memory=memory, limit=limit, barrier=barrier)
    check(schedule)
    found = simulate(schedule, costs, memory)
    assert found.peak_bytes is not None
    assert max(found.peak_bytes) <= limit
    for name in ("1f1b", "zb-h1", "zb-h2"):
        other = simulate(build(name, p, m), costs, memory)
        assert other.peak_bytes is not None
        if max(other.peak_bytes) <= limit:
            assert found.makespan <= other.makespan if barrier else max(found.span) <= max(other.span)


# Bytes of a microbatch per token and hidden unit until B (34 + 5 a s / h) and until W (32), as the paper counts them.
MODELS = {
    "6.2B": (8, 24, (29.718, 29.444, 19.927, 0.527), (74, 32), 0.0029),
    "28.3B": (32, 96, (10.419, 10.207, 7.715, 0.408), (74, 32), 0.0038),
}


@pytest.mark.parametrize("model", MODELS)
def test_zb_2p_of_table_5(model: str) -> None:
    """2401.10241 table 5: a limit of 2 p microbatches leaves almost no bubble."""
    p, m, times, (activation, deferred), rate = MODELS[model]
    costs, memory = Costs.uniform(p, *times), Memory((activation,) * p, (deferred,) * p)
    schedule = automatic(p, m, costs=costs, memory=memory, limit=2 * p * activation)
    assert simulate(schedule, costs).bubble_rate == pytest.approx(rate, abs=0.01)


def test_no_bubble_with_equal_times_and_2p() -> None:
    assert simulate(automatic(4, 8, limit=8)).bubble == 0
    assert simulate(automatic(4, 8)).bubble == simulate(build("zb-h1", 4, 8)).bubble  # the limit is p


def test_more_memory_is_never_worse() -> None:
    costs = Costs.uniform(4, 3, 4, 2, latency=1)
    bubbles = [simulate(automatic(4, 10, costs=costs, limit=limit), costs).bubble for limit in (1, 2, 3, 4, 6, 8)]
    assert bubbles == sorted(bubbles, reverse=True)


def test_a_slow_stage_is_what_everyone_waits_for() -> None:
    """With one stage of twice the time, that stage does not wait between its first and last action."""
    costs = Costs((1, 1, 2, 1), (1, 1, 2, 1), (1, 1, 2, 1))
    assert simulate(automatic(4, 12, costs=costs, limit=8), costs).bubble == pytest.approx(0, abs=0.1)


def test_fused_backwards_are_used_where_they_are_cheaper() -> None:
    costs = replace(Costs.uniform(2, 2, 2, 2), full=(3, 3))
    schedule = automatic(2, 6, costs=costs)
    assert any(action.kind is Kind.BW for action in schedule.rows[0])
    assert simulate(schedule, costs).makespan <= simulate(build("1f1b", 2, 6), costs).makespan


def test_is_quick() -> None:
    begin = time.perf_counter()
    automatic(8, 24, costs=Costs.uniform(8, 29.7, 29.4, 19.9, 0.5), limit=12)
    assert time.perf_counter() - begin < 5


def test_the_same_costs_give_the_same_schedule() -> None:
    costs = Costs.uniform(3, 2.5, 3.5, 1.5, 0.25)
    assert automatic(3, 7, costs=costs, limit=5) == automatic(3, 7, costs=costs, limit=5)


@pytest.mark.parametrize(
    ("limit", "message"),
    [(0, "rank 0 may hold 0 but one microbatch takes 1"), ((2, 0), "rank 1 may hold 0"), ((1, 1, 1), "3 limits")],
)
def test_an_impossible_limit_is_refused(limit: int | tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        automatic(2, 4, limit=limit)


def test_build_gives_it_by_name() -> None:
    assert build("auto", 2, 4) == automatic(2, 4)
    assert build("auto", 2, 4, limit=3, costs=Costs.uniform(2, 1, 2, 1)).name == "auto"
