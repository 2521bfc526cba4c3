"""Every family is complete, in order and free of deadlock; the checker finds what is wrong with one that is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.pipeline_parallel.schedule import (
    FAMILIES,
    SLICED,
    Action,
    Kind,
    Receive,
    Schedule,
    ScheduleError,
    Send,
    all_transfers,
    build,
    check,
    drain_rows,
    linear,
    passes,
    round_rows,
    transfers,
    unroll,
    versions,
)
from shardwise.pipeline_parallel.transfers import Step, rendezvous
from tests.pipeline_parallel.cases import some

HANDMADE = sorted(FAMILIES.keys() - {"auto"})
F, B, W, BW, U = Kind


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any family with any numbers it exists for."""
    name = draw(st.sampled_from(HANDMADE))
    p, m = draw(st.integers(1, 8)), draw(st.integers(1, 20))
    least, most = FAMILIES[name].least_chunks, FAMILIES[name].most_chunks or 4
    if name == "pipedream-2bw":
        m = max(m, p)
    slices = draw(st.integers(1, 4)) if name in SLICED else 1
    vertical_sync = name == "pipedream" and draw(st.booleans())
    return build(name, p, m, draw(st.integers(least, most)), slices=slices, vertical_sync=vertical_sync)


@some
@given(schedules())
def test_every_family_passes_the_checker_and_does_everything_once(schedule: Schedule) -> None:
    report = check(schedule)
    for rank, row in enumerate(schedule.rows):
        done = [(kind, a.microbatch, a.chunk) for a in row for kind in passes(a) if kind is not U]
        everything = [
            (kind, j, c)
            for kind in (F, B, W)
            for j in range(schedule.num_microbatches)
            for c in range(schedule.num_chunks)
        ]
        assert sorted(done) == sorted(everything)
        assert report.peak_until_input[rank] <= report.peak_activations[rank]
        if not schedule.asynchronous:
            assert [a for a in row if a.kind is U] == list(row[-schedule.num_chunks :])
            assert report.peak_versions[rank] == 1


@some
@given(schedules())
def test_each_boundary_is_sent_once_and_received_once_by_the_right_ranks(schedule: Schedule) -> None:
    steps = all_transfers(schedule)
    sent = [(rank, s.peer, s[:3]) for rank, row in enumerate(steps) for s in row if isinstance(s, Send)]
    received = [(s.peer, rank, s[:3]) for rank, row in enumerate(steps) for s in row if isinstance(s, Receive)]
    assert sorted(sent) == sorted(received)
    expected = []
    for boundary in range(schedule.total_stages - 1):
        ends = schedule.owner(boundary)[0], schedule.owner(boundary + 1)[0]
        for j in range(schedule.num_microbatches):
            if ends[0] != ends[1]:
                expected += [(*ends, (F, j, boundary)), (*ends[::-1], (B, j, boundary))]
    assert sorted(sent) == sorted(expected)


@some
@given(schedules())
def test_transfers_keep_the_row_and_stand_on_the_right_side_of_their_action(schedule: Schedule) -> None:
    for rank in range(schedule.num_stages):
        row = transfers(schedule, rank)
        assert tuple(step for step in row if isinstance(step, Action)) == schedule.rows[rank]
        at = {(kind, step.microbatch, step.chunk): place for place, step in enumerate(row) if isinstance(step, Action)
              for kind in passes(step)}  # fmt: skip
        for place, step in enumerate(row):
            if isinstance(step, Send):
                assert place > at[step.kind, step.microbatch, step.chunk]
            elif isinstance(step, Receive):
                assert place < at[step.kind, step.microbatch, step.chunk]


@pytest.mark.parametrize(
    ("name", "p", "m"),
    [("pipedream", p, m) for p in (1, 2, 3, 5) for m in (1, 2, 4, 7)]
    + [("pipedream-2bw", p, m) for p in (1, 2, 3, 5) for m in (1, 2, 4, 7) if m >= p],
)
def test_rounds_run_m_forwards_each_and_join_without_deadlock(name: str, p: int, m: int) -> None:
    schedule = build(name, p, m)
    assert schedule.rounds is not None
    for num_steps in (1, 2, 6):
        joined: list[list[Step]] = [[] for _ in range(p)]
        for step in range(num_steps + 1):
            rows = round_rows(schedule, step) if step < num_steps else drain_rows(schedule, num_steps)
            for rank, row in enumerate(all_transfers(schedule, rows)):
                forwards = [s.microbatch for s in row if isinstance(s, Action) and s.kind is F]
                assert forwards == (list(range(m)) if step < num_steps else [])
                joined[rank] += [s._replace(microbatch=s.microbatch + step * m) for s in row]
        rendezvous(tuple(map(tuple, joined)))
        whole = unroll(schedule, num_steps)
        check(whole)
        assert [tuple(s for s in row if isinstance(s, Action)) for row in joined] == list(whole.rows)


@pytest.mark.parametrize("p", [1, 2, 4, 7])
@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_pipedream_staleness_is_the_papers(p: int, num_steps: int) -> None:
    """Stage i of p, counted from 1, uses version t - p + i of microbatch t; with vertical sync t - p + 1 everywhere."""
    m = 4
    stashing = versions(unroll(build("pipedream", p, m), num_steps))
    vertical = versions(unroll(build("pipedream", p, m, vertical_sync=True), num_steps))
    for t in range(m * num_steps):
        assert stashing[t] == tuple(max(0, t - p + i) for i in range(1, p + 1))
        assert vertical[t] == (max(0, t - p + 1),) * p


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 2), (3, 5), (4, 4), (4, 9)])
def test_2bw_uses_the_weights_before_the_newest(p: int, m: int) -> None:
    """W(k + 1) = W(k) - lr grad f(W(k - 1)): batch k uses version k - 1."""
    used = versions(unroll(build("pipedream-2bw", p, m), 4))
    assert used == tuple((max(0, t // m - 1),) * p for t in range(4 * m))


@pytest.mark.parametrize("p", [1, 2, 4])
def test_weight_versions_kept(p: int) -> None:
    def peak(schedule: Schedule) -> tuple[int, ...]:
        return check(unroll(schedule, 4)).peak_versions

    assert peak(build("pipedream", p, 4)) == tuple(range(p, 0, -1))
    assert peak(build("pipedream", p, 4, vertical_sync=True)) == (p,) * p
    assert peak(build("pipedream-2bw", p, 4)) == (2,) * p


def test_synchronous_steps_use_the_weights_of_the_step_before() -> None:
    used = versions(unroll(build("zb-h1", 3, 4), 3))
    assert used == tuple((t // 4,) * 3 for t in range(12))


def test_a_version_that_is_not_made_yet_is_found() -> None:
    """2BW with fewer microbatches than its warm-up needs three versions."""
    from shardwise.pipeline_parallel.actions import Weights
    from shardwise.pipeline_parallel.pipedream import _stream

    with pytest.raises(ScheduleError, match="rank 0: F4 of chunk 0 needs weight version 1 but only 0 updates precede"):
        check(unroll(_stream("2bw", 5, 2, 2, Weights.DOUBLE), 6))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1b", 0, 4), "stages = 0 is too small"),
        (("1f1b", 2, 0), "microbatches = 0 is too small"),
        (("1f1b", 2, 4, 2), "1f1b has one chunk per rank, not 2; set chunks = 1"),
        (("interleaved", 2, 4, 1), "interleaved has 2 or more chunks per rank, not 1; set chunks = 2"),
        (("zbv", 2, 4), "zbv has 2 chunks per rank, not 1"),
        (("pipedream-2bw", 4, 3), "microbatches = 3 is below 4; raise it"),
        (("1f1bb", 2, 4), "did you mean 1f1b?"),
        (("what", 2, 4), "use one of gpipe, 1f1b"),
        (("nowhere.csv", 2, 4), "nowhere.csv: cannot be read"),
    ],
)
def test_impossible_numbers_are_refused_with_the_mend(arguments: tuple[str, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")) as caught:
        build(*arguments)
    assert "\n" not in str(caught.value)


def test_slices_belong_to_schedules_that_keep_their_order() -> None:
    with pytest.raises(ValueError, match="zb-h1 does not know .* use gpipe or 1f1b, or slices = 1"):
        build("zb-h1", 2, 4, slices=2)


def test_vertical_sync_belongs_to_pipedream() -> None:
    with pytest.raises(ValueError, match="1f1b has no vertical sync"):
        build("1f1b", 2, 4, vertical_sync=True)


def _with_row(rank: int, row: tuple[Action, ...]) -> Schedule:
    """1F1B on 2 ranks with 2 microbatches, one row replaced."""
    schedule = build("1f1b", 2, 2)
    rows = list(schedule.rows)
    rows[rank] = row
    return replace(schedule, rows=tuple(rows))


@some
@given(schedules(), st.data())
def test_no_action_is_superfluous(schedule: Schedule, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, schedule.num_stages - 1))
    row = schedule.rows[rank]
    at = data.draw(st.integers(0, len(row) - 1))
    rows = (*schedule.rows[:rank], row[:at] + row[at + 1 :], *schedule.rows[rank + 1 :])
    with pytest.raises(ScheduleError, match=f"rank {rank}"):
        check(replace(schedule, rows=rows, rounds=None))


F0, F1, BW0, BW1, U1 = Action(F, 0), Action(F, 1), Action(BW, 0), Action(BW, 1), Action(U, 1)


@pytest.mark.parametrize(
    ("rank", "row", "message"),
    [
        (1, (F0, BW0, BW1, F1, U1), r"rank 1 action 2 \(BW1\): stands before its F1"),
        (1, (F0, BW0, F1, U1), r"rank 1: missing action B1 \(or BW\)"),
        (0, (F0, BW0, BW1, U1), r"rank 0 action 2 \(BW1\): stands before its F1"),
        (0, (F0, F1, BW0, BW0, BW1, U1), r"rank 0 action 3 \(BW0\): duplicate, action 2 already does it"),
        (0, (F0, F1, BW0, BW1), r"rank 0: missing action U1"),
        (0, (F0, F1, BW0, U1, BW1), r"rank 0 action 3 \(U1\): .* W of microbatch 1 stands behind it"),
        (0, (F0, F1, BW0, BW1, U1, U1), r"rank 0 action 5 \(U1\): duplicate"),
        (
            0,
            (F0, F1, BW0, Action(U, 0), BW1, U1),
            r"rank 0 action 5 \(U1\): a synchronous schedule updates a chunk once",
        ),
        (0, (F0, F1, Action(F, 2), BW0, BW1, U1), r"rank 0 action 2 \(F2\): microbatch 2 does not exist"),
        (0, (Action(F, 0, 3), F1, BW0, BW1, U1), r"rank 0 action 0 \(F0 of chunk 3\): chunk 3 does not exist"),
        (0, (F0, F1, Action(B, 0), BW1, U1), r"rank 0: missing action W0 \(or BW\)"),
        (0, (F0, F1, Action(W, 0), Action(B, 0), BW1, U1), r"rank 0 action 2 \(W0\): stands before its B0"),
        (0, (F0, F1, Action("X", 0), BW1, U1), r"unknown kind 'X'"),  # type: ignore[arg-type]
    ],
)
def test_a_broken_row_is_named(rank: int, row: tuple[Action, ...], message: str) -> None:
    with pytest.raises(ScheduleError, match=message) as caught:
        check(_with_row(rank, row))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((F1, F0, BW1, BW0, U1), r"rank 0 action 0 \(F1\): stands before F0, of the slice before it"),
        ((F0, F1, BW0, BW1, U1), r"rank 0 action 2 \(BW0\): stands before B1, of the slice behind it"),
    ],
)
def test_slices_out_of_order_are_named(row: tuple[Action, ...], message: str) -> None:
    sliced = build("1f1b", 1, 1, slices=2)
    assert sliced.rows == ((F0, F1, BW1, BW0, U1),)
    with pytest.raises(ScheduleError, match=message):
        check(replace(sliced, rows=(row,)))


@pytest.mark.parametrize("name", SLICED)
def test_a_sequences_slices_go_forward_in_order_and_backward_in_the_opposite_one(name: str) -> None:
    for row in build(name, 3, 4, slices=3).rows:
        assert [a.microbatch for a in row if a.kind is F] == list(range(12))
        assert [a.microbatch for a in row if a.kind is BW] == [2, 1, 0, 5, 4, 3, 8, 7, 6, 11, 10, 9]


def test_a_single_stage_finishes_a_sequence_before_it_begins_the_next() -> None:
    ((*row, _),) = build("1f1b", 1, 2, slices=2).rows
    assert [(a.kind, a.microbatch) for a in row] == [
        (F, 0), (F, 1), (BW, 1), (BW, 0), (F, 2), (F, 3), (BW, 3), (BW, 2)
    ]  # fmt: skip


def test_a_cycle_is_followed_round() -> None:
    tangled = replace(build("1f1b", 2, 2), rows=((F0, BW0, F1, BW1, U1), (F0, F1, BW0, BW1, U1)))
    with pytest.raises(ScheduleError, match="cycle: ") as caught:
        check(tangled)
    assert "rank 0 action 1 (BW0) waits for rank 1 action 2 (BW0)" in str(caught.value)
    assert "rank 1 action 1 (F1) waits for rank 0 action 2 (F1)" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"placement": ((0,), (0,))}, "placement must hold each of the 2 stages once"),
        ({"placement": ((0,), (1, 2))}, "every one of the 2 ranks must hold 1 stages"),
        ({"rows": ()}, "0 rows for 2 ranks"),
        ({"num_microbatches": 0}, "must be at least 1"),
        ({"slices": 3}, "2 microbatches cannot be sequences of 3 slices"),
        ({"rounds": ((), (), ())}, "has rounds but is not marked asynchronous"),
    ],
)
def test_a_shape_that_does_not_fit_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check(replace(build("1f1b", 2, 2), **change))  # type: ignore[arg-type]


def test_stages_in_descending_order_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"rank 0 must list its stages in ascending order"):
        check(replace(build("zbv", 2, 2, 2), placement=((3, 0), (1, 2))))


def test_rounds_that_do_not_continue_are_refused() -> None:
    schedule = build("pipedream", 3, 4)
    assert schedule.rounds is not None
    first, following, drain = schedule.rounds
    with pytest.raises(ScheduleError, match="the rows must be those of one step and the drain"):
        check(replace(schedule, rounds=(first, following, ((), (), ()))))
    with pytest.raises(ScheduleError, match="must run the forwards of microbatches 0 to 3"):
        check(replace(schedule, rounds=(first, tuple(row[2:] for row in following), drain)))


def test_blocking_sends_that_face_each_other_deadlock() -> None:
    facing = ((Send(F, 0, 0, 0, 1), Receive(B, 0, 0, 0, 1)), (Send(B, 0, 0, 0, 0), Receive(F, 0, 0, 0, 0)))
    with pytest.raises(ScheduleError, match="deadlock: rank 0 waits for ever"):
        rendezvous(facing)


def test_owner_is_the_inverse_of_stage() -> None:
    schedule = build("zbv", 3, 4, 2)
    for rank in range(3):
        for chunk in range(2):
            assert schedule.owner(schedule.stage(rank, chunk)) == (rank, chunk)
    with pytest.raises(ValueError, match="stage 6 does not exist"):
        schedule.owner(6)
    assert linear(2, 3) == ((0, 2, 4), (1, 3, 5))
