"""GPipe: all forwards, then all backwards (1811.06965 section 2.3)."""

from __future__ import annotations

from shardwise.pipeline_parallel.actions import Action, Kind, Schedule, backward_order, linear, updates


def gpipe(num_stages: int, num_microbatches: int, slices: int = 1) -> Schedule:
    """Every forward before any backward: bubble (p - 1) / m, m microbatches in flight.

    The backwards run in the order of the forwards, so gradients add up in the same order as under 1F1B; of sequences
    cut into `slices` (TeraPipe, 2102.07988 section 3.2) those of the last slice run first.
    """
    m = num_microbatches
    row = (
        *(Action(Kind.F, microbatch) for microbatch in range(m)),
        *(Action(Kind.BW, microbatch) for microbatch in backward_order(m, slices)),
        *updates(m),
    )
    return Schedule("gpipe", num_stages, 1, m, linear(num_stages), (row,) * num_stages, slices=slices)
