"""DualPipeV: DualPipe (DeepSeek-V3, 2412.19437 section 3.2.1) cut in half, two chunks per rank in a V."""

from __future__ import annotations

from collections import deque

from shardwise.pipeline_parallel.actions import Action, Kind, Row, Schedule, keep_before, updates, vee


def dualpipev(num_stages: int, num_microbatches: int) -> Schedule:
    """Forwards of one chunk beside full backwards of the other; bubble (p - 1)(T_F&B + T_BW - 3 T_W), 2 p + 1 held.

    Times and activations are those of one stage, half a rank. The middle of each row is pairs of a forward and a
    backward that may overlap (F&B); one after the other they hand on the forward's result earlier, and the bubble is
    (p - 1)(T_F + T_BW - 2 T_W) if T_F = T_B. Microbatches that the pattern needs beyond m (it starts with 2 p) are left
    out.
    """
    p = num_stages
    m = max(num_microbatches, 2 * p)
    kept = keep_before(tuple(_row(p, m, rank) for rank in range(p)), num_microbatches)
    flushed = tuple((*row, *updates(num_microbatches, 2)) for row in kept)
    return Schedule("dualpipev", p, 2, num_microbatches, vee(p), flushed)


def _row(p: int, m: int, rank: int) -> Row:
    """One rank with at least 2 p microbatches."""
    count = {(kind, chunk): 0 for kind in (Kind.F, Kind.B) for chunk in (0, 1)}
    late: deque[Action] = deque()
    row: list[Action] = []

    def forward(chunk: int) -> None:
        row.append(Action(Kind.F, count[Kind.F, chunk], chunk))
        count[Kind.F, chunk] += 1

    def backward(chunk: int, split: bool = False) -> None:
        microbatch = count[Kind.B, chunk]
        row.append(Action(Kind.B if split else Kind.BW, microbatch, chunk))
        count[Kind.B, chunk] += 1
        if split:
            late.append(Action(Kind.W, microbatch, chunk))

    behind = p - 1 - rank
    for _ in range(2 * behind):
        forward(0)
    for _ in range(rank + 1):
        forward(0)
        forward(1)
    for _ in range(behind):
        backward(1, split=True)
        row.append(late.popleft())
        forward(1)
    for _ in range(m - 2 * p + rank + 1):
        forward(0)
        backward(1)
        forward(1)
        backward(0)
    for _ in range(behind):
        backward(1)
        forward(1)
        backward(0)
    for number in range(2 * (rank + 1)):  # the second half leaves its weight halves for the end
        backward(1 - number % 2, split=number > rank)
    for _ in range(behind):
        row.append(late.popleft())
        backward(0, split=True)
    return (*row, *late)
