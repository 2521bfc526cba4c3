"""Puts the rows of a schedule on a clock: who waits for what, when everything starts, or why it never does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import NamedTuple

from shardwise.pipeline_parallel.actions import Action, Kind, Row, Rows, ScheduleError, passes

Time = int | float | Fraction


class Need(NamedTuple):
    """One pass of one microbatch on one global stage: what an action makes and what another waits for."""

    kind: Kind
    stage: int
    microbatch: int


class Span(NamedTuple):
    """When an action starts and ends."""

    start: Time
    end: Time


Arrival = Callable[[int, int, Need, Time], Time]


def needs(action: Action, stage: int, last_stage: int) -> list[Need]:
    """What must be there before the action starts: the neighbour's output or gradient, its own earlier pass."""
    kind, microbatch = action.kind, action.microbatch
    if kind is Kind.F:
        return [Need(Kind.F, stage - 1, microbatch)] if stage else []
    if kind in (Kind.B, Kind.BW):
        own = Need(Kind.F, stage, microbatch)
        return [own] if stage == last_stage else [own, Need(Kind.B, stage + 1, microbatch)]
    return [Need(Kind.B, stage, microbatch)] if kind is Kind.W else []


def makers(rows: Rows, placement: tuple[tuple[int, ...], ...]) -> dict[Need, tuple[int, int]]:
    """The (rank, position) of the action that makes each pass in these rows."""
    return {
        Need(kind, placement[rank][action.chunk], action.microbatch): (rank, position)
        for rank, row in enumerate(rows)
        for position, action in enumerate(row)
        for kind in passes(action)
    }


def unit_duration(rank: int, action: Action) -> Time:
    """One unit of time for F, B and W, two for BW, none for U."""
    return {Kind.BW: 2, Kind.U: 0}.get(action.kind, 1)


def run(
    rows: Rows,
    placement: tuple[tuple[int, ...], ...],
    duration: Callable[[int, Action], Time] = unit_duration,
    arrival: Arrival | None = None,
    overlapped: Time | None = None,
) -> list[list[Span]]:
    """Start and end of every action when each rank runs its row in order and waits for what an action needs.

    Args:
        rows: the actions of each rank; passes that no action of the rows makes are there from the beginning.
        placement: the global stage of each rank's chunks.
        duration: (rank, action) -> seconds (or any unit).
        arrival: (sender rank, receiver rank, what, end of the action that made it) -> when it is there; called once per
            transfer in the order in which the sender makes them. Without it transfers take no time.
        overlapped: seconds of a forward and a full backward of another chunk that stand next to each other and run
            together, from when both can start until both are done; None runs them one after the other.

    Raises:
        ScheduleError: a cycle: ranks that wait for each other.
    """
    last_stage = max(stage for stages in placement for stage in stages)
    maker = makers(rows, placement)
    owner = {stage: rank for rank, stages in enumerate(placement) for stage in stages}
    ready: dict[tuple[int, Need], Time] = {}
    waiting: dict[Need, list[int]] = defaultdict(list)
    spans: list[list[Span]] = [[] for _ in rows]
    runnable = list(range(len(rows)))
    while runnable:
        rank = runnable.pop()
        row, done, stages = rows[rank], spans[rank], placement[rank]
        while len(done) < len(row):
            at = len(done)
            together = row[at : at + 1] if overlapped is None or not _overlap(row, at) else row[at : at + 2]
            start: Time = done[-1].end if done else 0
            missing = None
            for need in (need for action in together for need in needs(action, stages[action.chunk], last_stage)):
                if need in maker:
                    if (rank, need) not in ready:
                        missing = need
                        break
                    start = max(start, ready[rank, need])
            if missing is not None:
                waiting[missing].append(rank)
                break
            end = start + (duration(rank, together[0]) if len(together) == 1 or overlapped is None else overlapped)
            for action in together:
                done.append(Span(start, end))
                for kind in passes(action):
                    made = Need(kind, stages[action.chunk], action.microbatch)
                    ready[rank, made] = end
                    consumer = owner.get(made.stage + (kind is Kind.F) - (kind is Kind.B))
                    if consumer is not None and consumer != rank:
                        ready[consumer, made] = arrival(rank, consumer, made, end) if arrival else end
                    runnable.extend(waiting.pop(made, ()))
    stuck = {rank: len(done) for rank, done in enumerate(spans) if len(done) < len(rows[rank])}
    if stuck and overlapped is not None:
        run(rows, placement)
        raise ScheduleError(
            f"rank {min(stuck)}: a forward cannot run beside the backward that follows it; do not overlap"
        )
    if stuck:
        raise ScheduleError(_describe_cycle(rows, placement, maker, last_stage, stuck))
    return spans


def _overlap(row: Row, at: int) -> bool:
    """Whether the action and the next are a forward and a full backward of two chunks."""
    if at + 1 == len(row):
        return False
    first, second = row[at], row[at + 1]
    return first.kind is Kind.F and second.kind is Kind.BW and first.chunk != second.chunk


def _describe_cycle(
    rows: Rows,
    placement: tuple[tuple[int, ...], ...],
    maker: Mapping[Need, tuple[int, int]],
    last_stage: int,
    stuck: dict[int, int],
) -> str:
    """One line that follows the waits from a stuck rank until they come round."""
    rank = min(stuck)
    seen: dict[int, str] = {}
    while rank not in seen:
        position = stuck[rank]
        action = rows[rank][position]
        stage = placement[rank][action.chunk]
        for need in needs(action, stage, last_stage):
            other, at = maker.get(need, (rank, -1))
            if at >= stuck.get(other, len(rows[other])):
                seen[rank] = (
                    f"rank {rank} action {position} ({action}) waits for rank {other} action {at} ({rows[other][at]})"
                )
                rank = other
                break
        else:  # pragma: no cover
            raise AssertionError("a stuck rank waits for nothing")
    ring = list(seen.values())[list(seen).index(rank) :]
    return f"cycle: {', '.join(ring)}; move the action that is waited for further to the front"
