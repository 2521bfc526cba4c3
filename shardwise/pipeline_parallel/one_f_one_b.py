"""1F1B with a flush: one forward, one backward (PipeDream-Flush, 2006.09503 section 3.2; 2104.04473 section 2.2.1)."""

from __future__ import annotations

from shardwise.pipeline_parallel.actions import Action, Kind, Schedule, backward_order, linear, updates


def one_f_one_b(num_stages: int, num_microbatches: int, slices: int = 1) -> Schedule:
    """Rank i runs p - 1 - i forwards ahead, then alternates: bubble (p - 1) / m, p - i microbatches in flight.

    Of sequences cut into n slices (Seq1F1B, 2406.03488) the last must have been through all stages before any backward,
    so rank i runs n - 1 further ones ahead: p - i + n - 1 slices in flight. A single stage, which no other waits for,
    finishes a sequence before it begins the next: n slices in flight.
    """
    m = num_microbatches
    rows = []
    for rank in range(num_stages):
        ahead = num_stages - 1 - rank + slices - 1
        row: list[Action] = []
        done = 0
        for position, microbatch in enumerate(backward_order(m, slices)):
            wanted = position + ahead + 1 if num_stages > 1 else position // slices * slices + slices
            row += [Action(Kind.F, number) for number in range(done, min(wanted, m))]
            row.append(Action(Kind.BW, microbatch))
            done = min(wanted, m)
        rows.append((*row, *updates(m)))
    return Schedule("1f1b", num_stages, 1, m, linear(num_stages), tuple(rows), slices=slices)
