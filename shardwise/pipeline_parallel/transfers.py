"""Sends and receives, derived from a schedule's rows so that no order of them can deadlock."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from typing import NamedTuple

from shardwise.pipeline_parallel.actions import Action, Kind, Rows, Schedule, ScheduleError
from shardwise.pipeline_parallel.clock import makers, needs, run


class Send(NamedTuple):
    """Hand an activation (F) or a gradient (B) of a microbatch to another rank.

    `boundary` s lies between the global stages s and s + 1; `chunk` is the sender's local chunk.
    """

    kind: Kind
    microbatch: int
    boundary: int
    chunk: int
    peer: int


class Receive(NamedTuple):
    """Take an activation (F) or a gradient (B) of a microbatch from another rank; `chunk` is the receiver's."""

    kind: Kind
    microbatch: int
    boundary: int
    chunk: int
    peer: int


Step = Action | Send | Receive


def transfers(schedule: Schedule, rank: int, rows: Rows | None = None) -> tuple[Step, ...]:
    """The row of a rank with its sends and receives; see `all_transfers`."""
    return all_transfers(schedule, rows)[rank]


def all_transfers(schedule: Schedule, rows: Rows | None = None) -> tuple[tuple[Step, ...], ...]:
    """Every rank's row with its sends and receives in an order that is free of deadlock even if each of them blocks.

    All transfers are put in one order that all ranks share: by the time at which the data is made on a clock where
    every pass takes one unit. A send follows the action that makes its data; its receive stands where the receiver is
    at that time, ahead of the action that needs it. Neighbouring stages on one rank need none.

    Args:
        schedule: whose placement applies.
        rows: the rows to complete, `schedule.rows` unless given; for a round of an asynchronous schedule (`round_rows`,
            `drain_rows`) what comes from an earlier round is received first and what a later one needs is sent last.

    Returns:
        per rank its actions, `Send`s and `Receive`s in order.

    Raises:
        ScheduleError: the rows have a cycle.
    """
    rows = schedule.rows if rows is None else rows
    spans = run(rows, schedule.placement)
    starts = [[span.start for span in row] for row in spans]
    maker = makers(rows, schedule.placement)
    last_stage = schedule.total_stages - 1
    owner = {stage: (rank, chunk) for rank, row in enumerate(schedule.placement) for chunk, stage in enumerate(row)}
    wanted = {
        need
        for rank, row in enumerate(rows)
        for action in row
        for need in needs(action, schedule.placement[rank][action.chunk], last_stage)
        if owner[need.stage][0] != rank
    }
    timed = []
    for need in wanted | maker.keys():
        boundary = need.stage if need.kind is Kind.F else need.stage - 1
        if need.kind not in (Kind.F, Kind.B) or not 0 <= boundary < last_stage:
            continue
        if owner[boundary][0] == owner[boundary + 1][0]:
            continue
        time: float = -1.0
        if need in maker:
            rank, position = maker[need]
            time = float(spans[rank][position].end) if need in wanted else float("inf")
        timed.append((time, need, boundary))
    inserts: list[dict[int, list[Step]]] = [defaultdict(list) for _ in rows]
    for time, need, boundary in sorted(timed):
        there = boundary + 1 if need.kind is Kind.F else boundary
        (sender, made_by), (receiver, used_by) = owner[need.stage], owner[there]
        if need in maker:
            send = Send(need.kind, need.microbatch, boundary, made_by, receiver)
            inserts[sender][bisect_left(starts[sender], time)].append(send)
        if need in wanted:
            receive = Receive(need.kind, need.microbatch, boundary, used_by, sender)
            inserts[receiver][bisect_left(starts[receiver], time)].append(receive)
    return tuple(
        tuple(step for at in range(len(row) + 1) for step in (*added.get(at, ()), *row[at : at + 1]))
        for row, added in zip(rows, inserts, strict=True)
    )


def rendezvous(steps: tuple[tuple[Step, ...], ...]) -> None:
    """Plays rows in which every send and every receive blocks until its other half is reached.

    Raises:
        ScheduleError: a deadlock, naming what a rank waits for.
    """
    at = [0] * len(steps)
    runnable = list(range(len(steps)))
    while runnable:
        rank = runnable.pop()
        while at[rank] < len(steps[rank]):
            step = steps[rank][at[rank]]
            if isinstance(step, Send | Receive):
                other = steps[step.peer][at[step.peer]] if at[step.peer] < len(steps[step.peer]) else None
                if not isinstance(other, Send | Receive) or type(other) is type(step) or other[:3] != step[:3]:
                    break
                at[step.peer] += 1
                runnable.append(step.peer)
            at[rank] += 1
    for rank, position in enumerate(at):
        if position < len(steps[rank]):
            step = steps[rank][position]
            raise ScheduleError(f"deadlock: rank {rank} waits for ever at step {position}, {step}")
