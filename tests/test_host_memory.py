"""Memory that ranks of one machine share: the same bits on every rank, and who is gone is noticed."""

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import host_memory
from shardwise.collectives import CACHE_ELEMENTS
from shardwise.host_memory import HostLink, HostMemory
from shardwise.layout import share
from shardwise.mesh import Mesh
from tests.pool import run_ranks
from tests.test_collectives import pattern

SIZES = [0, 1, 3, 7, 1000, CACHE_ELEMENTS * 2 + 5]


def total(num_ranks: int, numel: int, dtype: torch.dtype) -> Tensor:
    """The sum in the order of ranks."""
    found = pattern(0, numel, dtype)
    for rank in range(1, num_ranks):
        found += pattern(rank, numel, dtype)
    return found


def memory_sums(num_ranks: int, dtype: torch.dtype) -> list[bytes]:
    axis = Mesh({"replicate": num_ranks}).axis("replicate")
    link = HostLink.connect(axis)
    assert link is not None
    found = []
    for numel in SIZES:
        memory = HostMemory(link, numel, dtype)
        assert not memory.mine.any()
        for _ in range(2):  # used again and again
            memory.mine.copy_(pattern(axis.rank, numel, dtype))
            start, stop = share(numel, axis.rank, axis.size)
            memory.sum_into(start, stop, [tensor[start:stop] for tensor in memory.tensors])
            assert torch.equal(memory.mine, total(num_ranks, numel, dtype))
        found.append(memory.mine.numpy().tobytes())
        # A rank's own share alone, added to what it has elsewhere.
        memory.mine.copy_(pattern(axis.rank, numel, dtype))
        own = torch.ones(stop - start, dtype=dtype)
        memory.sum_into(start, stop, [own], add=True)
        assert torch.equal(own, 1 + total(num_ranks, numel, dtype)[start:stop])
        assert torch.equal(memory.mine, pattern(axis.rank, numel, dtype))
    link.close()
    return found


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_in_shared_memory_are_bitwise_the_same_everywhere(num_ranks: int, dtype: torch.dtype) -> None:
    found = run_ranks(memory_sums, num_ranks, num_ranks, dtype)
    assert all(bits == found[0] for bits in found)


def leave(how: str) -> tuple[str, float]:
    axis = Mesh({"replicate": 2}).axis("replicate")
    link = HostLink.connect(axis)
    assert link is not None
    memory = HostMemory(link, 5, torch.float32)
    if axis.rank == 1:
        time.sleep(0.2)
        link.close()
        return "left", 0.0
    start = time.perf_counter()
    try:
        memory.sum_into(0, 3, [memory.mine[:3]])
    except RuntimeError as error:
        return str(error), time.perf_counter() - start
    return "no error", 0.0


def test_a_peer_that_is_gone_is_noticed_at_once_by_its_rank() -> None:
    (text, seconds), _ = run_ranks(leave, 2, "close")
    assert "rank 1 is gone" in text or "rank 1 does not answer" in text
    assert seconds < 5


def elsewhere() -> Any:
    """Ranks that do not share a machine find no link, all of them."""
    axis = Mesh({"replicate": 2}).axis("replicate")
    if axis.rank == 1:
        host_memory.machine_identity = lambda: "another machine"
    try:
        return HostLink.connect(axis)
    finally:
        host_memory.machine_identity = IDENTITY


IDENTITY = host_memory.machine_identity


def test_ranks_of_two_machines_do_not_share_memory() -> None:
    assert run_ranks(elsewhere, 2) == [None, None]
