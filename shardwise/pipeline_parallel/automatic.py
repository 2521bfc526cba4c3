"""Searches the schedule with the least bubble for given times and memory (ZB-1p and ZB-2p of 2401.10241 section 3)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil, floor

from shardwise.pipeline_parallel.actions import Action, Kind, Rows, Schedule
from shardwise.pipeline_parallel.clock import Time
from shardwise.pipeline_parallel.filling import Eager, Filled, Task, fill
from shardwise.pipeline_parallel.one_f_one_b import one_f_one_b
from shardwise.pipeline_parallel.simulator import Costs, Memory, simulate
from shardwise.pipeline_parallel.zero_bubble import zb_h1, zb_h2

_EFFORT = 600_000  # actions placed in one search, one or two seconds
_EAGER: tuple[Eager, ...] = (
    lambda waited, worst: False,
    lambda waited, worst: waited > worst,
    lambda waited, worst: True,
)

Ahead = tuple[int, ...]
"""Per rank how many forwards it runs before its first backward."""


def automatic(
    num_stages: int,
    num_microbatches: int,
    *,
    costs: Costs | None = None,
    memory: Memory | None = None,
    limit: int | tuple[int, ...] | None = None,
    barrier: bool = False,
) -> Schedule:
    """The best schedule found for these costs within a memory limit; never worse than 1F1B, ZB-H1 or ZB-H2 that fit it.

    As in the paper every rank runs some forwards ahead, then one backward and one forward in turn, and fills its gaps
    with weight halves: always where one fits, where it does not if the rank has waited the longest so far, and
    wherever memory asks for it. Searched are the forwards ahead, from several beginnings, one rank at a time. Where a
    full backward is cheaper than its halves (`Costs.full`), halves that ended up next to each other are joined.

    Args:
        num_stages, num_microbatches: p ranks with one stage each, and m.
        costs: per stage; one unit for each pass unless given.
        memory: bytes a microbatch holds per stage; 1 unless given, so that `limit` counts microbatches.
        limit: bytes each rank may hold (one number for all, or one per rank); unless given p microbatches, which is
            what 1F1B's first rank holds. p microbatches give ZB-1p, 2 p ZB-2p.
        barrier: all ranks meet between steps, so count from the first start to the last end of any rank
            (`Simulation.flush_bubble`) instead of each rank for itself (`Simulation.bubble`).

    Raises:
        ValueError: a limit below one microbatch.
    """
    p, m = num_stages, num_microbatches
    costs = costs or Costs.uniform(p)
    memory = memory or Memory((1,) * p)
    limits = (limit,) * p if isinstance(limit, int) else limit or tuple(p * held for held in memory.activation)
    task = _task(m, costs, memory, limits, barrier)
    rivals = [one_f_one_b(p, m), zb_h1(p, m), zb_h2(p, m)]
    rivals += [replace(rivals[0], rows=found.rows) for found in _search(task)]
    scored = [(score, schedule) for schedule in rivals if (score := _score(schedule, costs, memory, limits, barrier))]
    best, schedule = min(scored, key=lambda pair: pair[0])
    if costs.full is not None:
        for rank in range(p):
            fused = _fuse(schedule, rank)
            score = _score(fused, costs, memory, limits, barrier)
            if score and score <= best:
                best, schedule = score, fused
    return replace(schedule, name="auto")


def _score(
    schedule: Schedule, costs: Costs, memory: Memory, limits: tuple[int, ...], barrier: bool
) -> tuple[Time, Time] | None:
    """The time that counts and the other one; None if the schedule does not fit."""
    result = simulate(schedule, costs, memory)
    assert result.peak_bytes is not None
    if any(peak > most for peak, most in zip(result.peak_bytes, limits, strict=True)):
        return None
    own = max(result.span)
    return (result.makespan, own) if barrier else (own, result.makespan)


def _task(m: int, costs: Costs, memory: Memory, limits: tuple[int, ...], barrier: bool) -> Task:
    """The search's view of the arguments, checked."""
    p = len(limits)
    if {len(costs.forward), len(memory.activation)} != {p}:
        raise ValueError(
            f"{len(costs.forward)} stage costs, {len(memory.activation)} activation sizes and {p} limits; "
            "give one of each per rank"
        )
    deferred = memory.deferred or memory.activation
    for rank, most in enumerate(limits):
        least = max(memory.activation[rank], deferred[rank])
        if most < least:
            raise ValueError(f"rank {rank} may hold {most} but one microbatch takes {least}; raise the memory limit")
    moved = costs.boundary_bytes if costs.boundary_bytes and costs.bandwidth else (0,) * (p - 1)
    return Task(
        num_microbatches=m,
        forward=tuple(map(float, costs.forward)),
        backward=tuple(map(float, costs.backward)),
        weight=tuple(map(float, costs.weight)),
        delay=tuple(float(costs.latency) + size / (costs.bandwidth or 1) for size in moved),
        activation=memory.activation,
        deferred=deferred,
        limits=limits,
        barrier=barrier,
    )


class _Search:
    """Hill-climbing over the forwards ahead, with every vector filled once and a budget of fills."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.left = max(24, _EFFORT // (3 * len(task.forward) * task.num_microbatches))
        self.known: dict[Ahead, Filled | None] = {}

    def best(self, ahead: Ahead) -> Filled | None:
        """The best filling of an order, None if none fits."""
        if ahead not in self.known:
            order = _order(ahead, self.task.num_microbatches)
            filled = [found for eager in _EAGER if (found := fill(self.task, order, eager))]
            self.left -= len(_EAGER)
            self.known[ahead] = min(filled, key=lambda found: found.score, default=None)
        return self.known[ahead]

    def climb(self, ahead: Ahead, found: Filled) -> Filled:
        """The best that is reached by better neighbours."""
        better = True
        while better:
            better = False
            for near in _neighbours(self.task, ahead):
                other = self.best(near) if self.left > 0 else None
                if other and other.score < found.score:
                    ahead, found, better = near, other, True
        return found


def _search(task: Task) -> list[Filled]:
    """What the three best beginnings lead to."""
    search = _Search(task)
    starts = [(found, ahead) for ahead in _beginnings(task) if (found := search.best(ahead))]
    starts.sort(key=lambda start: start[0].score)
    return [search.climb(ahead, found) for found, ahead in starts[:3]]


def _beginnings(task: Task) -> list[Ahead]:
    """Multiples of 1F1B's forwards ahead, and as many as fit before the first gradient can be there."""
    p = len(task.limits)
    wishes = [[1 + ceil(depth * (p - 1 - rank)) for rank in range(p)] for depth in (0, 1, 1.25, 1.5, 1.75, 2, 2.5, 3)]
    for rounding in (floor, ceil):
        trip, wish = 0.0, [1] * p
        for rank in reversed(range(p - 1)):
            trip += task.forward[rank + 1] + task.backward[rank + 1] + 2 * task.delay[rank]
            wish[rank] += rounding(trip / task.forward[rank]) if task.forward[rank] else task.num_microbatches
        wishes.append(wish)
    return list(dict.fromkeys(_descending(task, wish) for wish in wishes))


def _neighbours(task: Task, ahead: Ahead) -> Iterator[Ahead]:
    """One rank's forwards ahead changed by one, the others' only as far as needed."""
    for rank in range(len(ahead)):
        for change in (1, -1):
            near = list(ahead)
            near[rank] = max(1, near[rank] + change)
            for other in reversed(range(rank)):
                near[other] = max(near[other], near[other + 1])
            found = _descending(task, near)
            if found != ahead:
                yield found


def _descending(task: Task, wish: list[int]) -> Ahead:
    """As wished, within memory and microbatches, and no rank further ahead than the one before it (a deadlock)."""
    ahead: list[int] = []
    for rank, count in enumerate(wish):
        held = task.activation[rank]
        room = task.limits[rank] // held if held else task.num_microbatches
        ahead.append(min(count, room, task.num_microbatches, *ahead[-1:]))
    return tuple(ahead)


def _order(ahead: Ahead, m: int) -> Rows:
    """Forwards and input backwards only: the forwards ahead, then a backward and a forward in turn."""
    rows = []
    for count in ahead:
        row = [Action(Kind.F, j) for j in range(count)]
        for j in range(m):
            row.append(Action(Kind.B, j))
            if j + count < m:
                row.append(Action(Kind.F, j + count))
        rows.append(tuple(row))
    return tuple(rows)


def _fuse(schedule: Schedule, rank: int) -> Schedule:
    """B directly followed by its own W made one BW on a rank; free on the first, whose gradient nobody awaits."""
    row: list[Action] = []
    for action in schedule.rows[rank]:
        if action.kind is Kind.W and row and row[-1] == action._replace(kind=Kind.B):
            row[-1] = action._replace(kind=Kind.BW)
        else:
            row.append(action)
    return replace(schedule, rows=(*schedule.rows[:rank], tuple(row), *schedule.rows[rank + 1 :]))
