"""Which update includes a microbatch, and which weight version it uses, when updates overtake microbatches."""

from collections.abc import Callable

from shardwise.pipeline_parallel.schedule import (
    Kind,
    Schedule,
    unroll,
    versions,
)


def update_groups(schedule: Schedule) -> list[int]:
    """By microbatch of a step, which of the step's updates includes it: all of an update's microbatches share one
    divisor."""
    marks = sorted({action.microbatch for row in schedule.rows for action in row if action.kind is Kind.U})
    return [sum(mark < number for mark in marks) for number in range(schedule.num_microbatches)]


def version_table(schedule: Schedule) -> Callable[[int, int], int] | None:
    """(microbatch since the pipeline was empty, stage) -> the weight version it uses; None for synchronous schedules.

    The table of a few steps is computed from the rows; beyond, it repeats from step to step.
    """
    if not schedule.asynchronous:
        return None
    m = schedule.num_microbatches
    num_steps = 2 + -(-2 * schedule.total_stages // m)
    table = versions(unroll(schedule, num_steps))
    updates_a_step = max(update_groups(schedule)) + 1
    last = (num_steps - 1) * m

    def look_up(number: int, stage: int) -> int:
        beyond = max(0, -(-(number - last - m + 1) // m)) if number >= last + m else 0
        return table[number - beyond * m][stage] + beyond * updates_a_step

    return look_up
