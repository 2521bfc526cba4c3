"""What a pipeline schedule is made of: actions, one row of them per rank, and where each stage lives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple


class ScheduleError(ValueError):
    """A schedule that cannot run; the message is one line that names the rank, the action and the reason."""


class Kind(StrEnum):
    """What an action does to one microbatch on one chunk."""

    F = "F"  # forward
    B = "B"  # backward of the input: what the previous stage waits for
    W = "W"  # backward of the weights: nobody waits for it
    BW = "BW"  # both halves of the backward in one piece
    U = "U"  # optimizer update with the gradients accumulated since the last one


class Weights(StrEnum):
    """Which weight version a microbatch's forward and backward use on a stage."""

    LATEST = "latest"  # the newest when its forward starts (PipeDream's weight stashing; all synchronous schedules)
    VERTICAL = "vertical"  # the one its forward used on the first stage (PipeDream's vertical sync)
    DOUBLE = "double"  # the one before its batch's newest (PipeDream-2BW)


class Action(NamedTuple):
    """One entry of a rank's row; `chunk` is local to the rank, an update's `microbatch` is the last it includes."""

    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}" + (f" of chunk {self.chunk}" if self.chunk else "")


Row = tuple[Action, ...]
Rows = tuple[Row, ...]


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule: for every rank the order in which it runs its actions.

    Args:
        name: the family's name, for messages and drawings.
        num_stages: p, the number of pipeline ranks.
        num_chunks: v, the model chunks each rank holds; the model has p * v stages in all.
        num_microbatches: m, microbatches per step; a slice of a sequence counts as one.
        placement: `placement[rank][chunk]` is the global stage, 0 to p * v - 1, ascending on every rank.
        rows: the actions of each rank in order, complete from an empty pipeline to an empty pipeline.
        asynchronous: whether updates happen while other microbatches are in flight.
        weights: which weight version a microbatch uses.
        rounds: of asynchronous schedules that do not flush between steps: `(first, next, drain)`, three sets of rows.
            Microbatches are numbered from the first one of the step they run in, so negative ones are in flight from
            earlier steps; `drain` is numbered like the step that would follow. `round_rows` and `drain_rows` select.
        slices: so many consecutive microbatches are the slices of the same sequences. On every stage their forwards run
            in this order, and their backwards in the opposite one (TeraPipe, 2102.07988).
    """

    name: str
    num_stages: int
    num_chunks: int
    num_microbatches: int
    placement: tuple[tuple[int, ...], ...]
    rows: Rows
    asynchronous: bool = False
    weights: Weights = Weights.LATEST
    rounds: tuple[Rows, Rows, Rows] | None = None
    slices: int = 1

    @property
    def total_stages(self) -> int:
        """p * v."""
        return self.num_stages * self.num_chunks

    def stage(self, rank: int, chunk: int) -> int:
        """The global stage that is chunk `chunk` of rank `rank`."""
        return self.placement[rank][chunk]

    def owner(self, stage: int) -> tuple[int, int]:
        """The (rank, chunk) that holds global stage `stage`."""
        for rank, stages in enumerate(self.placement):
            if stage in stages:
                return rank, stages.index(stage)
        raise ValueError(f"stage {stage} does not exist: the schedule has {self.total_stages} stages")


def linear(num_stages: int, num_chunks: int = 1) -> tuple[tuple[int, ...], ...]:
    """Placement with stage `chunk * p + rank` on each rank: PTD-P's interleaving (2104.04473 section 2.2)."""
    return tuple(tuple(chunk * num_stages + rank for chunk in range(num_chunks)) for rank in range(num_stages))


def vee(num_stages: int) -> tuple[tuple[int, ...], ...]:
    """Placement of two chunks per rank down and up again, so rank 0 holds the first and the last stage (ZB-V)."""
    return tuple((rank, 2 * num_stages - 1 - rank) for rank in range(num_stages))


def updates(num_microbatches: int, num_chunks: int = 1) -> Row:
    """The flush of a synchronous schedule: one update per chunk."""
    return tuple(Action(Kind.U, num_microbatches - 1, chunk) for chunk in range(num_chunks))


def backward_order(num_microbatches: int, slices: int) -> list[int]:
    """Microbatches in the order of their backwards: sequence by sequence, the last slice of each first."""
    return [first + slices - 1 - index for first in range(0, num_microbatches, slices) for index in range(slices)]


def label(microbatch: int, slices: int) -> str:
    """How a microbatch is called in drawings: with slices by its sequence and slice, such as 2.0."""
    return str(microbatch) if slices == 1 else "{}.{}".format(*divmod(microbatch, slices))


def shift(rows: Rows, offset: int) -> Rows:
    """The same rows with `offset` added to every microbatch; those that fall before microbatch 0 are left out."""
    return tuple(
        tuple(a._replace(microbatch=a.microbatch + offset) for a in row if a.microbatch + offset >= 0) for row in rows
    )


def keep_before(rows: Rows, num_microbatches: int) -> Rows:
    """The rows without the microbatches from `num_microbatches` on: what is left of a valid schedule is one too."""
    return tuple(tuple(a for a in row if a.microbatch < num_microbatches) for row in rows)


def round_rows(schedule: Schedule, step: int) -> Rows:
    """The rows that step number `step` (0 after start or after a drain) runs, numbered as in `Schedule.rounds`."""
    if schedule.rounds is None:
        return schedule.rows
    start = step * schedule.num_microbatches
    return _existing(schedule.rounds[min(step, 1)], start)


def drain_rows(schedule: Schedule, num_steps: int) -> Rows:
    """The rows that finish what `num_steps` steps left in flight, numbered like the step that would follow."""
    if schedule.rounds is None:
        return tuple(() for _ in range(schedule.num_stages))
    return _existing(schedule.rounds[2], num_steps * schedule.num_microbatches)


def _existing(rows: Rows, start: int) -> Rows:
    """Rows without the microbatches that lie before the first of all, when theirs start at number `start`."""
    return tuple(tuple(a for a in row if a.microbatch + start >= 0) for row in rows)


def unroll(schedule: Schedule, num_steps: int) -> Schedule:
    """`num_steps` steps and the drain as one complete schedule, microbatches numbered from 0."""
    m = schedule.num_microbatches
    parts = [shift(round_rows(schedule, step), step * m) for step in range(num_steps)]
    parts.append(shift(drain_rows(schedule, num_steps), num_steps * m))
    rows = tuple(tuple(a for part in parts for a in part[rank]) for rank in range(schedule.num_stages))
    return Schedule(
        name=schedule.name,
        num_stages=schedule.num_stages,
        num_chunks=schedule.num_chunks,
        num_microbatches=m * num_steps,
        placement=schedule.placement,
        rows=rows,
        asynchronous=schedule.asynchronous or num_steps > 1,
        weights=schedule.weights,
        slices=schedule.slices,
    )


def hand_on_early(schedule: Schedule) -> Schedule:
    """The schedule with every backward that another rank waits for in two halves, one right after the other: its input
    gradient is on its way before its weight gradients are computed, so that rank waits for a B instead of a BW."""

    def split(rank: int, action: Action) -> Row:
        stage = schedule.stage(rank, action.chunk)
        if action.kind is not Kind.BW or stage == 0 or schedule.owner(stage - 1)[0] == rank:
            return (action,)
        return (action._replace(kind=Kind.B), action._replace(kind=Kind.W))

    def split_all(rows: Rows) -> Rows:
        return tuple(tuple(part for action in row for part in split(rank, action)) for rank, row in enumerate(rows))

    rounds = None
    if schedule.rounds is not None:
        first, following, drain = (split_all(rows) for rows in schedule.rounds)
        rounds = first, following, drain
    return replace(schedule, rows=split_all(schedule.rows), rounds=rounds)


def passes(action: Action) -> Iterator[Kind]:
    """The elementary passes an action makes: BW is a B and a W."""
    if action.kind is Kind.BW:
        yield Kind.B
        yield Kind.W
    else:
        yield action.kind
