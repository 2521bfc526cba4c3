"""Fills the gaps of an order of forwards and input backwards with weight backwards (2401.10241 section 3.1)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from shardwise.pipeline_parallel.actions import Action, Kind, Row, Rows, updates

Eager = Callable[[float, float], bool]
"""(how long the rank would have waited in all, the longest wait of any rank) -> whether to run a weight half that is
longer than the gap instead of waiting."""


@dataclass(frozen=True)
class Task:
    """What to schedule, in plain floats with one entry per rank, each of which holds one stage.

    Args:
        num_microbatches: m.
        forward, backward, weight: seconds of F, B and W.
        delay: seconds over the boundary behind each rank.
        activation, deferred: bytes held by a microbatch until its B, and until its W.
        limits: bytes each rank may hold.
        barrier: count the time until all ranks are done instead of each rank's own.
    """

    num_microbatches: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    delay: tuple[float, ...]
    activation: tuple[int, ...]
    deferred: tuple[int, ...]
    limits: tuple[int, ...]
    barrier: bool = False


@dataclass(frozen=True)
class Filled:
    """Complete rows and their time: (what the task counts first, the other, the sum over ranks)."""

    score: tuple[float, float, float]
    rows: Rows


@dataclass
class _Rank:
    """Where one rank is while its row is filled."""

    order: Row
    at: int = 0
    time: float = 0.0
    began: float = 0.0
    waited: float = 0.0
    held: int = 0
    late: deque[int] = field(default_factory=deque)
    row: list[Action] = field(default_factory=list)


def fill(task: Task, order: Rows, eager: Eager) -> Filled | None:
    """Runs an order of F and B on a clock and puts the W where they cost least.

    A rank whose next action waits for another rank runs the weight halves that end before that, and one more if `eager`
    says so; before a forward that memory has no room for it runs as many as make room.

    Returns:
        None if the order deadlocks or its forwards do not fit in memory.
    """
    ranks = [_Rank(row) for row in order]
    done: dict[tuple[Kind, int, int], float] = {}
    waiting: dict[tuple[Kind, int, int], int] = {}
    runnable = list(range(len(ranks)))
    worst = 0.0
    while runnable:
        number = runnable.pop()
        rank = ranks[number]
        while rank.at < len(rank.order):
            action = rank.order[rank.at]
            kind, j = action.kind, action.microbatch
            forward = kind is Kind.F
            other = number - 1 if forward else number + 1
            arrival = 0.0
            if 0 <= other < len(ranks):
                if (kind, other, j) not in done:
                    waiting[kind, other, j] = number
                    break
                arrival = done[kind, other, j] + task.delay[min(other, number)]
            while forward and rank.held + task.activation[number] > task.limits[number]:
                if not rank.late:
                    return None
                _weight(task, number, rank)
            while rank.late and rank.time < arrival:
                gap = arrival - rank.time
                if gap < task.weight[number] and not eager(rank.waited + gap, worst):
                    break
                _weight(task, number, rank)
            if not rank.row:
                rank.time = rank.began = arrival
            elif rank.time < arrival:
                rank.waited += arrival - rank.time
                worst = max(worst, rank.waited)
                rank.time = arrival
            _compute(task, number, rank, action)
            done[kind, number, j] = rank.time
            if (kind, number, j) in waiting:
                runnable.append(waiting.pop((kind, number, j)))
    if any(rank.at < len(rank.order) for rank in ranks):
        return None
    for number, rank in enumerate(ranks):
        while rank.late:
            _weight(task, number, rank)
    spans = [rank.time - rank.began for rank in ranks]
    own, common = max(spans), max(rank.time for rank in ranks)
    flush = updates(task.num_microbatches)
    score = (common, own, sum(spans)) if task.barrier else (own, common, sum(spans))
    return Filled(score, tuple((*rank.row, *flush) for rank in ranks))


def _compute(task: Task, number: int, rank: _Rank, action: Action) -> None:
    """Runs the F or B that is next."""
    if action.kind is Kind.F:
        rank.time += task.forward[number]
        rank.held += task.activation[number]
    else:
        rank.time += task.backward[number]
        rank.held += task.deferred[number] - task.activation[number]
        rank.late.append(action.microbatch)
    rank.row.append(action)
    rank.at += 1


def _weight(task: Task, number: int, rank: _Rank) -> None:
    """Runs the oldest W."""
    rank.row.append(Action(Kind.W, rank.late.popleft()))
    rank.time += task.weight[number]
    rank.held -= task.deferred[number]
