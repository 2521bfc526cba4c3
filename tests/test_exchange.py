"""Sums within a pass, with and without memory that ranks share."""

import pytest
import torch
from torch import Tensor

from shardwise.exchange import Exchange, Totals
from shardwise.layout import share
from shardwise.mesh import Mesh
from tests.pool import run_ranks
from tests.test_collectives import pattern


def exchanges(num_ranks: int, shared: bool) -> list[Tensor]:
    axis = Mesh({"tensor": num_ranks}).axis("tensor")
    exchange = Exchange(axis, torch.device("cpu"))
    if not shared and exchange._link is not None:
        exchange._link.close()
        exchange._link = None
    found = []
    for repeat, shape in enumerate([(3, 5), (2, 7, 4), (1, 3), (6, 9)]):
        values = pattern(axis.rank + 100 * repeat, torch.Size(shape).numel()).view(shape)
        for dim in (None, 0, len(shape) - 1):
            buffer = exchange.buffer(shape, values)
            buffer.copy_(values)
            found.append(exchange.start_sum(buffer, dim)())
        low, high = share(shape[-1], axis.rank, axis.size)
        found.append(exchange.gather(values[..., low:high], len(shape) - 1, shape[-1]))
    exchange.close()
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_exchanges_within_a_pass_are_the_same_with_and_without_shared_memory(num_ranks: int) -> None:
    shared, elsewhere = (run_ranks(exchanges, num_ranks, num_ranks, how) for how in (True, False))
    for rank in range(num_ranks):
        for left, right in zip(shared[rank], elsewhere[rank], strict=True):
            torch.testing.assert_close(left, right)
    whole = sum(pattern(rank, 15).view(3, 5) for rank in range(num_ranks))
    torch.testing.assert_close(shared[0][0], whole)
    assert all(torch.equal(shared[rank][0], shared[0][0]) for rank in range(num_ranks))
    torch.testing.assert_close(torch.cat([shared[rank][1] for rank in range(num_ranks)]), whole)
    torch.testing.assert_close(torch.cat([shared[rank][2] for rank in range(num_ranks)], 1), whole)


def late_totals(num_ranks: int) -> list[list[float]]:
    axis = Mesh({"replicate": num_ranks}).axis("replicate")
    totals = Totals(axis)
    waits = [totals.start(torch.tensor([float(axis.rank), float(number)])) for number in range(5)]
    found = [wait().tolist() for wait in reversed(waits)]
    found.append(waits[2]().tolist())
    totals.close()
    return found


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_totals_are_read_late_and_often(num_ranks: int) -> None:
    ranks = sum(range(num_ranks))
    expected = [[ranks, number * num_ranks] for number in (4, 3, 2, 1, 0, 2)]
    assert run_ranks(late_totals, num_ranks, num_ranks) == [expected] * num_ranks
