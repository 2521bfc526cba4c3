"""Zero-bubble schedules: the weight half of the backward fills the bubbles (2401.10241)."""

from __future__ import annotations

from shardwise.pipeline_parallel.actions import Action, Kind, Row, Schedule, keep_before, linear, updates, vee


def zb_h1(num_stages: int, num_microbatches: int) -> Schedule:
    """ZB-H1 (section 2.1): bubble (p - 1)(T_F + T_B - T_W), p microbatches held by every rank, like 1F1B's first."""
    return _handcrafted("zb-h1", num_stages, num_microbatches, depth=1)


def zb_h2(num_stages: int, num_microbatches: int) -> Schedule:
    """ZB-H2 (section 2.2): bubble (p - 1)(T_F + T_B - 2 T_W), 2 p - 1 microbatches held by every rank."""
    return _handcrafted("zb-h2", num_stages, num_microbatches, depth=2)


def _handcrafted(name: str, num_stages: int, num_microbatches: int, depth: int) -> Schedule:
    """1F1B with `depth` times its forwards ahead; rank i's weight backwards lag `depth` * i microbatches behind."""
    p, m = num_stages, num_microbatches
    rows = []
    for rank in range(p):
        ahead, lag = depth * (p - 1 - rank), depth * rank
        row = [Action(Kind.F, j) for j in range(min(ahead, m))]
        for j in range(m + lag):
            if ahead <= j + ahead < m:
                row.append(Action(Kind.F, j + ahead))
            if j < m:
                row.append(Action(Kind.B, j))
            if j >= lag:
                row.append(Action(Kind.W, j - lag))
        rows.append((*row, *updates(m)))
    return Schedule(name, p, 1, m, linear(p), tuple(rows))


def zbv(num_stages: int, num_microbatches: int) -> Schedule:
    """ZB-V (section 6): two chunks per rank in a V, no bubble if T_F = T_B = T_W, p microbatches held by every rank.

    Rank i fills its first chunk, then both in turn, until 2 p passes are held; from there every forward is followed by
    its backward halves. Microbatches that the pattern needs beyond m (it starts with 2 p - 1) are left out.
    """
    p = num_stages
    m = max(num_microbatches, 2 * p - 1)
    rows = [_vee_row(p, m, rank) for rank in range(p)]
    kept = keep_before(tuple(rows), num_microbatches)
    flushed = tuple((*row, *updates(num_microbatches, 2)) for row in kept)
    return Schedule("zbv", p, 2, num_microbatches, vee(p), flushed)


def _vee_row(p: int, m: int, rank: int) -> Row:
    """One rank of ZB-V with at least 2 p - 1 microbatches."""
    count = {(kind, chunk): 0 for kind in (Kind.F, Kind.B, Kind.W) for chunk in (0, 1)}
    row: list[Action] = []

    def add(*actions: tuple[Kind, int]) -> None:
        for kind, chunk in actions:
            row.append(Action(kind, count[kind, chunk], chunk))
            count[kind, chunk] += 1

    full = ((Kind.B, 1), (Kind.W, 1))
    for _ in range(2 * (p - rank) - 1):
        add((Kind.F, 0))
    for _ in range(rank):
        add((Kind.F, 1), (Kind.F, 0))
    for _ in range(p - rank):
        add((Kind.F, 1), *full)
    while count[Kind.F, 1] < m:
        if count[Kind.F, 0] < m:
            add((Kind.F, 0))
        add((Kind.B, 0), (Kind.W, 0), (Kind.F, 1), *full)
    for _ in range(rank):
        add((Kind.B, 0), (Kind.B, 1))
    for _ in range(p - rank):
        add((Kind.B, 0), (Kind.W, 0))
    for chunk in (1, 0):
        while count[Kind.W, chunk] < m:
            add((Kind.W, chunk))
    return tuple(row)
