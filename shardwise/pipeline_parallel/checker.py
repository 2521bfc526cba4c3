"""Proves that a schedule is complete, in order and free of deadlock, and counts what it holds."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate

from shardwise.pipeline_parallel.actions import Action, Kind, Row, Schedule, ScheduleError, Weights, passes, unroll
from shardwise.pipeline_parallel.transfers import Receive, Send, all_transfers, rendezvous

_KINDS = frozenset(Kind)


@dataclass(frozen=True)
class Report:
    """What a checked schedule costs besides time, one entry per rank.

    Activations are counted in stages of one microbatch: with v chunks per rank, v of them are a rank's share of it.

    Args:
        peak_activations: most held at once when each is kept from its forward until its weight backward has run.
        peak_until_input: the same when the input backward already frees them.
        peak_versions: most versions of a chunk's weights held at once.
        num_transfers: sends and receives of each rank.
    """

    peak_activations: tuple[int, ...]
    peak_until_input: tuple[int, ...]
    peak_versions: tuple[int, ...]
    num_transfers: tuple[int, ...]


def check(schedule: Schedule) -> Report:
    """Proves a schedule runnable and reports its high-water marks.

    Every microbatch passes every stage once forward and once backward (B and W, or BW), each after what it depends on;
    every gradient is followed by an update; a synchronous schedule updates each chunk once, after all of its
    gradients; slices of a sequence go forward in order and backward in the opposite one; the derived transfers do not
    deadlock even if each of them blocks (rendezvous).

    Raises:
        ScheduleError: one line with the rank, the action and the reason.
    """
    _check_shape(schedule)
    if schedule.rounds is not None:
        _check_rounds(schedule)
    for rank, row in enumerate(schedule.rows):
        _check_row(schedule, rank, row)
        _check_slices(schedule, rank, row)
    steps = all_transfers(schedule)
    rendezvous(steps)
    version = versions(schedule)
    return Report(
        peak_activations=tuple(_peak(row, Kind.W) for row in schedule.rows),
        peak_until_input=tuple(_peak(row, Kind.B) for row in schedule.rows),
        peak_versions=tuple(_peak_versions(schedule, rank, version) for rank in range(schedule.num_stages)),
        num_transfers=tuple(sum(isinstance(step, Send | Receive) for step in row) for row in steps),
    )


def versions(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """How many updates precede the weights that each microbatch uses, forward and backward alike.

    Weight stashing (PipeDream, 1806.03377 section 3.3): at stage i of p, counted from 1, microbatch t uses version
    t - p + i; vertical sync: t - p + 1 everywhere; PipeDream-2BW (2006.09503 section 3.1): batch k uses k - 1; none is
    below 0.

    Returns:
        `[microbatch][global stage]`.

    Raises:
        ScheduleError: a microbatch's version is not made yet when its forward starts.
    """
    newest: dict[tuple[int, int], int] = {}  # (microbatch, stage) -> updates of the stage before the forward
    batch: dict[tuple[int, int], int] = {}  # ... -> updates of the stage that do not include the microbatch
    for rank, row in enumerate(schedule.rows):
        last_included: dict[int, list[int]] = {chunk: [] for chunk in range(schedule.num_chunks)}
        for action in row:
            if action.kind is Kind.U:
                last_included[action.chunk].append(action.microbatch)
            elif action.kind is Kind.F:
                key = (action.microbatch, schedule.stage(rank, action.chunk))
                newest[key] = len(last_included[action.chunk])
        for microbatch in range(schedule.num_microbatches):
            for chunk, included in last_included.items():
                batch[microbatch, schedule.stage(rank, chunk)] = bisect_left(included, microbatch)
    table = []
    for microbatch in range(schedule.num_microbatches):
        used = []
        for stage in range(schedule.total_stages):
            version = newest[microbatch, stage]
            if schedule.weights is Weights.VERTICAL:
                version = newest[microbatch, 0]
            elif schedule.weights is Weights.DOUBLE:
                version = max(0, batch[microbatch, stage] - 1)
            if version > newest[microbatch, stage]:
                rank, chunk = schedule.owner(stage)
                raise ScheduleError(
                    f"rank {rank}: F{microbatch} of chunk {chunk} needs weight version {version} but only "
                    f"{newest[microbatch, stage]} updates precede it; use more microbatches per update"
                )
            used.append(version)
        table.append(tuple(used))
    return tuple(table)


def _check_shape(schedule: Schedule) -> None:
    """Counts, placement and row count fit each other."""
    p, v = schedule.num_stages, schedule.num_chunks
    if min(p, v, schedule.num_microbatches) < 1:
        raise ScheduleError(
            f"{schedule.name}: stages, chunks and microbatches must be at least 1, "
            f"not {p}, {v} and {schedule.num_microbatches}"
        )
    if schedule.slices < 1 or schedule.num_microbatches % schedule.slices:
        raise ScheduleError(
            f"{schedule.name}: {schedule.num_microbatches} microbatches cannot be sequences of {schedule.slices} slices"
        )
    if len(schedule.rows) != p:
        raise ScheduleError(f"{schedule.name}: {len(schedule.rows)} rows for {p} ranks; give one row per rank")
    if [len(stages) for stages in schedule.placement] != [v] * p:
        raise ScheduleError(f"{schedule.name}: every one of the {p} ranks must hold {v} stages: {schedule.placement}")
    if sorted(stage for stages in schedule.placement for stage in stages) != list(range(p * v)):
        raise ScheduleError(f"{schedule.name}: the placement must hold each of the {p * v} stages once")
    for rank, stages in enumerate(schedule.placement):
        if list(stages) != sorted(stages):
            raise ScheduleError(f"{schedule.name}: rank {rank} must list its stages in ascending order, not {stages}")


def _check_rounds(schedule: Schedule) -> None:
    """Every step runs each microbatch's forward on every rank, and the steps and the drain make one valid schedule."""
    assert schedule.rounds is not None
    p, m = schedule.num_stages, schedule.num_microbatches
    if not schedule.asynchronous:
        raise ScheduleError(f"{schedule.name}: has rounds but is not marked asynchronous")
    if schedule.rows != unroll(schedule, 1).rows:
        raise ScheduleError(f"{schedule.name}: the rows must be those of one step and the drain")
    for number, rows in enumerate(schedule.rounds[:2]):
        for rank, row in enumerate(rows):
            for chunk in range(schedule.num_chunks):
                found = sorted(a.microbatch for a in row if a.kind is Kind.F and a.chunk == chunk)
                if found != list(range(m)):
                    raise ScheduleError(
                        f"{schedule.name}: round {number} of rank {rank} must run the forwards of microbatches 0 to "
                        f"{m - 1} of chunk {chunk}, not {found}"
                    )
    check(unroll(schedule, 2 + -(-2 * p // m)))


def _check_row(schedule: Schedule, rank: int, row: Row) -> None:
    """One rank's row has every pass once, in an order that its own dependencies allow."""
    seen: dict[tuple[Kind, int, int], int] = {}
    for position, action in enumerate(row):
        if action.kind not in _KINDS:
            unknown = f"rank {rank} action {position}: unknown kind {action.kind!r}"
            raise ScheduleError(f"{unknown}; use one of {', '.join(Kind)}")
        where = f"rank {rank} action {position} ({action})"
        if not 0 <= action.chunk < schedule.num_chunks:
            raise ScheduleError(f"{where}: chunk {action.chunk} does not exist, the rank holds {schedule.num_chunks}")
        if not 0 <= action.microbatch < schedule.num_microbatches:
            raise ScheduleError(
                f"{where}: microbatch {action.microbatch} does not exist, the schedule has {schedule.num_microbatches}"
            )
        for kind in passes(action):
            key = (kind, action.microbatch, action.chunk)
            if key in seen:
                raise ScheduleError(f"{where}: duplicate, action {seen[key]} already does it; remove one")
            before = {Kind.B: Kind.F, Kind.W: Kind.B}.get(kind)
            if before and (before, action.microbatch, action.chunk) not in seen:
                earlier = Action(before, action.microbatch, action.chunk)
                raise ScheduleError(f"{where}: stands before its {earlier}; move it behind that")
            seen[key] = position
    for chunk in range(schedule.num_chunks):
        for microbatch in range(schedule.num_microbatches):
            for kind in (Kind.F, Kind.B, Kind.W):
                if (kind, microbatch, chunk) not in seen:
                    raise ScheduleError(
                        f"rank {rank}: missing action {Action(kind, microbatch, chunk)}"
                        f"{' (or BW)' if kind is not Kind.F else ''}; add it to the row"
                    )
        _check_updates(schedule, rank, row, chunk)


def _check_slices(schedule: Schedule, rank: int, row: Row) -> None:
    """A slice's forward needs the keys and values of the slices before it, and its backward the gradients that the
    slices behind it have found for its own."""
    n = schedule.slices
    if n == 1:
        return
    seen: set[tuple[Kind, int, int]] = set()
    for position, action in enumerate(row):
        first = action.microbatch // n * n
        for kind in passes(action):
            if kind not in (Kind.F, Kind.B):
                continue
            before = action.microbatch + (-1 if kind is Kind.F else 1)
            if first <= before < first + n and (kind, before, action.chunk) not in seen:
                raise ScheduleError(
                    f"rank {rank} action {position} ({action}): stands before {Action(kind, before, action.chunk)}, of "
                    f"the slice {'before' if kind is Kind.F else 'behind'} it of the same sequence; move it behind that"
                )
            seen.add((kind, action.microbatch, action.chunk))


def _check_updates(schedule: Schedule, rank: int, row: Row, chunk: int) -> None:
    """Each update of a chunk includes exactly the gradients since the one before, up to its own microbatch."""
    pending: set[int] = set()
    updated = -1
    for position, action in enumerate(row):
        if action.chunk != chunk:
            continue
        if Kind.W in passes(action):
            pending.add(action.microbatch)
        if action.kind is not Kind.U:
            continue
        where = f"rank {rank} action {position} ({action})"
        if not schedule.asynchronous and updated >= 0:
            raise ScheduleError(f"{where}: a synchronous schedule updates a chunk once; remove the earlier U{updated}")
        wrong = pending.symmetric_difference(range(updated + 1, action.microbatch + 1))
        if wrong or not pending:
            microbatch = min(wrong, default=action.microbatch)
            raise ScheduleError(
                f"{where}: must include the gradients of microbatches {updated + 1} to {action.microbatch}, but W of "
                f"microbatch {microbatch} stands {'before' if microbatch in pending else 'behind'} it"
            )
        pending.clear()
        updated = action.microbatch
    if updated != schedule.num_microbatches - 1:
        raise ScheduleError(
            f"rank {rank}: missing action {Action(Kind.U, schedule.num_microbatches - 1, chunk)}; "
            "add it behind the last W or BW of the chunk"
        )


def _peak(row: Row, freed_by: Kind) -> int:
    """Most activations held at once."""
    held = accumulate((_change(action, freed_by) for action in row), initial=0)
    return max(held)


def _change(action: Action, freed_by: Kind) -> int:
    return (action.kind is Kind.F) - (freed_by in passes(action))


def _peak_versions(schedule: Schedule, rank: int, version: tuple[tuple[int, ...], ...]) -> int:
    """Most versions of one chunk's weights that are alive at once, from when each is made until its last use."""
    return max(_peak_versions_of_chunk(schedule, rank, chunk, version) for chunk in range(schedule.num_chunks))


def _peak_versions_of_chunk(schedule: Schedule, rank: int, chunk: int, version: tuple[tuple[int, ...], ...]) -> int:
    row = [action for action in schedule.rows[rank] if action.chunk == chunk]
    stage = schedule.stage(rank, chunk)
    last_use: dict[int, int] = {}
    made = [0]
    for position, action in enumerate(row):
        if action.kind is Kind.U:
            made.append(position)
        else:
            last_use[version[action.microbatch][stage]] = position
    ends = [max(last_use.get(number, 0), _superseded(made, number, len(row))) for number in range(len(made))]
    return _most_at_once(made, ends)


def _superseded(made: list[int], number: int, end: int) -> int:
    """Until when a version is the newest."""
    return made[number + 1] - 1 if number + 1 < len(made) else end


def _most_at_once(starts: list[int], ends: list[int]) -> int:
    """The most spans (inclusive of both ends, in ascending order of their starts) that cover one position."""
    most = 0
    alive: list[int] = []
    for start, end in zip(starts, ends, strict=True):
        while alive and alive[0] < start:
            heappop(alive)
        heappush(alive, end)
        most = max(most, len(alive))
    return most
