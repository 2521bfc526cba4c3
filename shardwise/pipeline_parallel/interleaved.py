"""Interleaved 1F1B: several non-consecutive chunks per rank (PTD-P, 2104.04473 section 2.2.2)."""

from __future__ import annotations

from itertools import pairwise

from shardwise.pipeline_parallel.actions import Action, Kind, Schedule, linear, updates


def interleaved(num_stages: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """1F1B over v chunks per rank: bubble (p - 1) / (v m), 1 + (p - 1) / (p v) times the activations of 1F1B.

    Microbatches go through a chunk in groups and the groups through all chunks in turn. The original asks for groups of
    exactly p; here m microbatches make groups of p or more as equal as possible, since only a group smaller than p
    makes the first rank wait for the last. Fewer microbatches than stages make one group.
    """
    p, m, v = num_stages, num_microbatches, num_chunks
    num_groups = max(1, m // p)
    bounds = [group * m // num_groups for group in range(num_groups + 1)]
    groups = [range(first, end) for first, end in pairwise(bounds)]
    forwards = [Action(Kind.F, j, chunk) for group in groups for chunk in range(v) for j in group]
    backwards = [Action(Kind.BW, j, chunk) for group in groups for chunk in reversed(range(v)) for j in group]
    largest = max(len(group) for group in groups)
    rows = []
    for rank in range(p):
        ahead = (v - 1) * largest + 2 * (p - 1 - rank)
        row = forwards[:ahead]
        for position, backward in enumerate(backwards):
            row.extend(forwards[ahead + position : ahead + position + 1])
            row.append(backward)
        rows.append((*row, *updates(m, v)))
    return Schedule("interleaved", p, v, m, linear(p, v), tuple(rows))
