"""Zigzag order: every position once, ranks alike, and what documents say of pieces."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.tensor_parallel.zigzag import Spread, Zigzag

ZIGZAGS = st.builds(Zigzag, st.integers(1, 60), st.integers(1, 7))


@given(ZIGZAGS)
def test_every_position_is_on_one_rank(zigzag: Zigzag) -> None:
    positions = [zigzag.positions(rank).tolist() for rank in range(zigzag.size)]
    assert [len(some) for some in positions] == [zigzag.count(rank) for rank in range(zigzag.size)]
    assert all(some == sorted(some) for some in positions)
    assert sorted(sum(positions, [])) == list(range(zigzag.length))


@given(ZIGZAGS)
def test_join_undoes_take(zigzag: Zigzag) -> None:
    whole = torch.arange(2 * zigzag.length * 3).view(2, zigzag.length, 3)
    parts = [zigzag.take(whole, rank) for rank in range(zigzag.size)]
    assert [part[0, :, 0].tolist() for part in parts] == [
        (3 * zigzag.positions(rank)).tolist() for rank in range(zigzag.size)
    ]
    assert torch.equal(zigzag.join(parts), whole)
    turned = [zigzag.take(whole.mT.contiguous(), rank, dim=2) for rank in range(zigzag.size)]
    assert torch.equal(zigzag.join(turned, dim=2), whole.mT)


@given(ZIGZAGS)
def test_ranks_differ_by_a_position_a_piece(zigzag: Zigzag) -> None:
    counts = [zigzag.count(rank) for rank in range(zigzag.size)]
    assert max(counts) - min(counts) <= 2
    keys_seen = [int((zigzag.positions(rank) + 1).sum()) for rank in range(zigzag.size)]
    assert max(keys_seen) - min(keys_seen) <= 4 * zigzag.length  # without the order: a fraction of length squared


def test_documents_say_which_pieces_meet() -> None:
    spread = Spread(Zigzag(8, 2), torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [5, 5, 5, 5, 5, 5, 6, 6]]))
    assert spread.documents_meet([0], [0]) == (True, True)
    assert spread.documents_meet([0], [1]) == (True, False)
    assert spread.documents_meet([0], [3]) == (False, False)
    assert spread.documents_meet([0], [2]) == (True, False)  # in the second row
    assert spread.undivided().documents_meet([0], [3]) == (True, True)
    empty = Spread(Zigzag(1, 2), torch.tensor([[3]]))
    assert empty.documents_meet([0], [3]) == (False, False)
