"""The clock gives the papers' bubbles and memory, exactly where closed forms exist."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.pipeline_parallel.schedule import Action, Kind, Schedule, ScheduleError, build, check, unroll
from shardwise.pipeline_parallel.simulator import (
    Costs,
    Memory,
    simulate,
    steady_bubble,
    steady_step,
    steady_timeline,
)
from tests.pipeline_parallel.cases import some

stages, microbatches = st.integers(1, 8), st.integers(1, 24)
times = st.integers(1, 9)


def _idle(schedule: Schedule, forward: int, backward: int, weight: int) -> Fraction | float:
    """Idle time of the rank that waits most, with the costs of one whole rank."""
    result = simulate(schedule, Costs.per_rank(schedule.num_stages, schedule.num_chunks, forward, backward, weight))
    assert result.ideal == schedule.num_microbatches * (forward + backward + weight)
    return max(result.span) - result.ideal


@some
@given(st.sampled_from(["gpipe", "1f1b"]), stages, microbatches, times, times, times)
def test_flushed_bubble(name: str, p: int, m: int, f: int, b: int, w: int) -> None:
    """GPipe and 1F1B: (p - 1) / m of the ideal time for any costs; GPipe holds m, 1F1B p - i."""
    schedule = build(name, p, m)
    result = simulate(schedule, Costs.uniform(p, f, b, w))
    assert result.bubble == result.flush_bubble == Fraction(p - 1, m)
    held = check(schedule).peak_activations
    assert held == ((m,) * p if name == "gpipe" else tuple(min(p - i, m) for i in range(p)))


@some
@given(st.sampled_from(["gpipe", "1f1b"]), stages, microbatches, st.integers(2, 5), times, times, times)
def test_slices_are_a_finer_grain(name: str, p: int, m: int, n: int, f: int, b: int, w: int) -> None:
    """Sequences cut into n slices: (p - 1) / (m n) of the ideal time, and p - i + n - 1 slices held where 1F1B held
    p - i whole microbatches (TeraPipe, 2102.07988; Seq1F1B, 2406.03488)."""
    schedule = build(name, p, m, slices=n)
    result = simulate(schedule, Costs.uniform(p, f, b, w))
    assert result.bubble == Fraction(p - 1, m * n)
    held = check(schedule).peak_activations
    if name == "gpipe":
        assert held == (m * n,) * p
    elif p > 1:
        assert held == tuple(min(p - i + n - 1, m * n) for i in range(p))
    else:
        assert held == (n,)


@some
@given(stages, microbatches, st.integers(2, 4), times, times, times)
def test_interleaved_bubble_and_memory(p: int, m: int, v: int, f: int, b: int, w: int) -> None:
    """(p - 1) / (v m) for every m >= p, also one that p does not divide; p (1 + (p - 1) / (p v)) held if it does."""
    schedule = build("interleaved", p, m, v)
    result = simulate(schedule, Costs.per_rank(p, v, f, b, w))
    if m >= p:
        assert result.bubble == Fraction(p - 1, v * m)
    else:  # each chunk's forward must have crossed all ranks before the next one's can begin
        assert result.makespan == Fraction((v * p + m - 1) * (f + b + w), v)
    most = p * (1 + Fraction(p - 1, p * v))
    held = Fraction(check(schedule).peak_activations[0], v)
    if m % p == 0:
        assert held == min(m, most)
    else:  # a group of m // (m // p) rounded up instead of p
        groups = max(1, m // p)
        assert held <= Fraction((v - 1) * -(-m // groups) + 2 * p - 1, v)


def test_the_readmes_example() -> None:
    assert simulate(build("interleaved", 4, 8, 2)).bubble == Fraction(3, 16)


@some
@given(st.sampled_from([1, 2]), stages, st.integers(0, 16), times, times, times)
def test_zero_bubble_handcrafted(depth: int, p: int, extra: int, f: int, b: int, w: int) -> None:
    """ZB-H1: (p - 1)(F + B - W), p held; ZB-H2: (p - 1)(F + B - 2 W), 2 p - 1 held; while W is the shortest."""
    w = min(f, b, w)
    most = p if depth == 1 else 2 * p - 1
    schedule = build(f"zb-h{depth}", p, most + extra)
    assert _idle(schedule, f, b, w) == (p - 1) * (f + b - depth * w)
    assert check(schedule).peak_activations == (most,) * p


@some
@given(stages, st.integers(0, 16))
def test_zbv_has_no_bubble_and_equal_memory(p: int, extra: int) -> None:
    """ZB-V: none if F = B = W, p microbatches (2 p of its half stages) held by every rank."""
    schedule = build("zbv", p, 2 * p + extra, 2)
    assert _idle(schedule, 1, 1, 1) == 0
    assert check(schedule).peak_activations == (2 * p,) * p


@some
@given(stages, st.integers(0, 12), st.tuples(times, times, times).map(sorted), st.integers(0, 3))
def test_dualpipev_bubble_and_memory(p: int, extra: int, costs: list[int], gain: int) -> None:
    """(p / 2 - 1)(F&B + B - 3 W) for p stages on p / 2 ranks and p + 1 activations, all per stage; B is BW here."""
    w, f, b = costs
    schedule = build("dualpipev", p, 2 * p + extra, 2)
    together = max(b + w, f + b + w - gain)
    result = simulate(schedule, replace(Costs.uniform(2 * p, f, b, w), overlapped=together))
    assert max(result.makespan - busy for busy in result.busy) == (p - 1) * (together + (b + w) - 3 * w)
    assert check(schedule).peak_activations == (2 * p + 1,) * p
    serial = simulate(schedule, Costs.uniform(2 * p, f, f, w))  # the forward's result is there earlier
    assert serial.makespan - serial.ideal == (p - 1) * (f + (f + w) - 2 * w)


@pytest.mark.parametrize("p", [1, 2, 4, 7])
@pytest.mark.parametrize("m", [1, 3, 8])
def test_pipedream_has_no_bubble_in_steady_state(p: int, m: int) -> None:
    costs = Costs.uniform(p, 2, 3, 1)
    assert steady_bubble(build("pipedream", p, m), costs) == 0
    assert steady_step(build("pipedream", p, m), costs) == m * 6
    if m >= p:
        assert steady_bubble(build("pipedream-2bw", p, m), costs) == 0
    assert steady_bubble(build("1f1b", p, m), costs) == Fraction(p - 1, m)


def test_zb_h2_repeats_after_its_span() -> None:
    """Without a barrier the next step begins where the first rank ends: the bubble is that of the span."""
    schedule = build("zb-h2", 4, 8)
    result = simulate(schedule)
    assert (result.bubble, result.flush_bubble) == (0, Fraction(1, 8))
    assert steady_bubble(schedule) == 0


# T_F, T_B, T_W and T_comm in ms from the paper's appendix, quoted from memory: three figures of table 5 for each model
# depend on them and come out to the last digit. The interleaved ones have one layer per chunk.
PROFILED = {"6.2B": (8, 24, 4, (29.718, 29.444, 19.927, 0.527)), "28.3B": (32, 96, 2, (10.419, 10.207, 7.715, 0.408))}
TABLE_5 = {
    "6.2B": {"1f1b": 0.2347, "interleaved": 0.0808, "zb-h1": 0.1323, "zb-h2": 0.0698},
    "28.3B": {"1f1b": 0.2646, "interleaved": 0.1493, "zb-h1": 0.1421, "zb-h2": 0.0641},
}


@pytest.mark.parametrize("model", TABLE_5)
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "zb-h2"])
def test_zero_bubble_table_5(model: str, name: str) -> None:
    p, m, layers, costs = PROFILED[model]
    schedule = build(name, p, m, layers if name == "interleaved" else 1)
    rate = simulate(schedule, Costs.per_rank(p, schedule.num_chunks, *costs)).bubble_rate
    assert rate == pytest.approx(TABLE_5[model][name], abs=0.01 if name == "interleaved" else 0.0001)


@some
@given(st.sampled_from(["1f1b", "interleaved", "zb-h1", "zbv", "dualpipev", "gpipe"]), stages, microbatches)
def test_slower_costs_never_shorten_a_step(name: str, p: int, m: int) -> None:
    v = {"interleaved": 2, "zbv": 2, "dualpipev": 2}.get(name, 1)
    schedule = build(name, p, m, v)
    base = simulate(schedule, Costs.uniform(p * v, 3, 4, 2)).makespan
    assert simulate(schedule, Costs.uniform(p * v, 3, 4, 2, latency=1)).makespan >= base
    assert simulate(schedule, Costs.uniform(p * v, 3, 4, 3)).makespan >= base
    assert base >= m * v * 9


def test_update_and_full_backward_times_count() -> None:
    costs = Costs((2,), (3,), (4,), full=(5,), update=6)
    assert simulate(build("1f1b", 1, 3), costs).makespan == 3 * (2 + 5) + 6
    assert simulate(build("zb-h1", 1, 3), costs).makespan == 3 * (2 + 3 + 4) + 6


def test_transfers_of_one_direction_queue() -> None:
    """Two 10-byte activations at 1 byte/s over one link: the second arrives at 20 however early it is made."""
    costs = Costs((1, 1), (1, 1), (1, 1), latency=2, boundary_bytes=(10,), bandwidth=1.0)
    schedule = build("gpipe", 2, 2)
    start = {(e.rank, e.action): e.start for e in simulate(schedule, costs).timeline.events}
    assert start[1, Action(Kind.F, 0)] == 1 + 10 + 2
    assert start[1, Action(Kind.F, 1)] == 1 + 20 + 2


def test_uneven_stages_bubble_is_over_the_busiest_rank() -> None:
    result = simulate(build("1f1b", 2, 4), Costs((1, 3), (1, 3), (1, 3)))
    assert result.ideal == 36
    assert result.busy == (12, 36)
    assert result.makespan == 1 + 36 + 2  # the first forward before, the first stage's last backward behind


def test_peak_bytes_follow_the_row() -> None:
    one = simulate(build("1f1b", 3, 6), memory=Memory((10, 20, 30)))
    assert one.peak_bytes == (30, 40, 30)
    kept = simulate(build("zb-h1", 3, 6), memory=Memory((10, 10, 10), (4, 4, 4)))
    assert kept.peak_bytes == (30, 2 * 10 + 4, 10 + 2 * 4)


@some
@given(st.sampled_from(["1f1b", "interleaved", "zb-h1", "zb-h2", "zbv", "pipedream"]), stages, microbatches)
def test_peak_bytes_of_one_each_is_the_checkers_count(name: str, p: int, m: int) -> None:
    v = 2 if name in ("interleaved", "zbv") else 1
    schedule = build(name, p, m, v)
    report = check(schedule)
    assert simulate(schedule, memory=Memory((1,) * (p * v))).peak_bytes == report.peak_activations
    assert simulate(schedule, memory=Memory((1,) * (p * v), (0,) * (p * v))).peak_bytes == report.peak_until_input


@pytest.mark.parametrize(
    ("costs", "memory", "message"),
    [
        (Costs.uniform(3), None, "forward has 3 entries; 1f1b has 2 stages"),
        (Costs.uniform(2), Memory((1,)), "activation has 1 entries; 1f1b has 2 stages"),
        (replace(Costs.uniform(2), boundary_bytes=(1, 2)), None, "boundary_bytes has 2 entries"),
    ],
)
def test_costs_for_another_number_of_stages_are_refused(costs: Costs, memory: Memory | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(build("1f1b", 2, 2), costs, memory)


def test_steady_timeline_is_one_step_numbered_as_the_runner_runs_it() -> None:
    schedule = build("pipedream", 3, 2)
    assert schedule.rounds is not None
    timeline = steady_timeline(schedule)
    assert tuple(tuple(event.action for event in row) for row in timeline.rows) == schedule.rounds[1]
    assert timeline.makespan == 6 + 2  # the last rank's step lies two forwards behind the first's
    assert steady_timeline(build("1f1b", 2, 3)) == simulate(build("1f1b", 2, 3)).timeline


def test_several_steps_follow_each_other() -> None:
    one, three = simulate(build("1f1b", 3, 4)), simulate(unroll(build("1f1b", 3, 4), 3))
    assert three.makespan == 3 * one.makespan
    rows = build("1f1b", 2, 2).rows
    backwards = replace(build("1f1b", 2, 2), rows=(rows[0][::-1], rows[1]))
    with pytest.raises(ScheduleError, match="cycle"):
        simulate(backwards)
