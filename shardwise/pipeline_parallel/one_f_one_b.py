"""1F1B with a flush: one forward, one backward (PipeDream-Flush, 2006.09503 section 3.2; 2104.04473 section 2.2.1)."""

from __future__ import annotations

from shardwise.pipeline_parallel.actions import Action, Kind, Schedule, linear, updates


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """Rank i runs p - 1 - i forwards ahead, then alternates: bubble (p - 1) / m, p - i microbatches in flight."""
    m = num_microbatches
    rows = []
    for rank in range(num_stages):
        ahead = min(num_stages - 1 - rank, m)
        row = [Action(Kind.F, microbatch) for microbatch in range(ahead)]
        for microbatch in range(m):
            if microbatch + ahead < m:
                row.append(Action(Kind.F, microbatch + ahead))
            row.append(Action(Kind.BW, microbatch))
        rows.append((*row, *updates(m)))
    return Schedule("1f1b", num_stages, 1, m, linear(num_stages), tuple(rows))
