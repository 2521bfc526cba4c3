"""Collectives: sums are sums, the same bits on every rank, with and without memory that ranks share."""

import math
import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import collectives
from shardwise.collectives import CACHE_ELEMENTS, HostLink, HostMemory
from shardwise.exchange import Exchange, Totals
from shardwise.layout import share
from shardwise.mesh import Mesh
from tests.pool import run_ranks

SIZES = [0, 1, 3, 7, 1000, CACHE_ELEMENTS * 2 + 5]


def pattern(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank + 10), dtype=torch.float64).to(dtype)


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


def many(rank: int) -> list[torch.Tensor]:
    """Of several types and sizes, of which some travel together and one is larger than a message."""
    shapes = [(2, 3), (), (0, 4), (5,), (3, 70), (1,), (2, 2)]
    types = [torch.float32, torch.int64, torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.float16]
    return [(pattern(rank, math.prod(shape)) * 7).to(t).view(shape) for shape, t in zip(shapes, types, strict=True)]


def plain(num_ranks: int) -> None:
    """Every collective over an axis against what it says."""
    axis = Mesh({"shard": num_ranks}).axis("shard")
    rank = axis.rank
    values = [pattern(r, 4 * num_ranks) for r in range(num_ranks)]
    for op, expected in (
        ("sum", torch.stack(values).sum(0)),
        ("max", torch.stack(values).amax(0)),
        ("min", torch.stack(values).amin(0)),
    ):
        torch.testing.assert_close(collectives.all_reduce(values[rank].clone(), axis, op), expected)
    own = collectives.reduce_scatter(values[rank].clone(), axis)
    torch.testing.assert_close(own, torch.stack(values).sum(0)[4 * rank : 4 * rank + 4])
    full = torch.empty(4 * num_ranks)
    collectives.all_gather(values[rank][:4].clone(), full, axis)
    assert torch.equal(full, torch.cat([value[:4] for value in values]))
    full[4 * rank : 4 * rank + 4] = -rank  # the rank's own part may lie in the whole
    collectives.all_gather(full[4 * rank : 4 * rank + 4], full, axis)
    assert torch.equal(full, torch.arange(num_ranks).neg().float().repeat_interleave(4))
    for source in range(num_ranks):
        assert torch.equal(collectives.broadcast(values[rank].clone(), axis, source), values[source])
        assert collectives.broadcast_object({"rank": rank}, axis, source) == {"rank": source}
        with patch.object(collectives, "MESSAGE_BYTES", 40 * num_ranks):
            mixed = [many(r) for r in range(num_ranks)]
            collectives.broadcast_all(mixed[rank], axis, source)
            assert all(torch.equal(sent, own) for sent, own in zip(mixed[rank], many(source), strict=True))
    assert collectives.all_gather_object((rank, "x"), axis) == [(r, "x") for r in range(num_ranks)]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_collective_does_what_it_says(num_ranks: int) -> None:
    run_ranks(plain, num_ranks, num_ranks)


def test_an_axis_of_one_rank_needs_no_message() -> None:
    axis = Mesh({}).axis("shard")
    value = torch.arange(3.0)
    assert torch.equal(collectives.all_reduce(value.clone(), axis), value)
    assert torch.equal(collectives.reduce_scatter(value.clone(), axis), value)
    full = torch.empty(3)
    collectives.all_gather(value, full, axis)
    assert torch.equal(full, value)
    assert collectives.all_gather_object(1, axis) == [1]
    assert collectives.broadcast_object("x", axis) == "x"


def mean() -> float:
    """CASES 5: gloo has no average."""
    axis = Mesh({"replicate": 2}).axis("replicate")
    value = torch.tensor([float(1 + 3 * axis.rank)])
    return float(collectives.all_reduce(value, axis) / axis.size)


def test_a_mean_is_a_mean_on_gloo() -> None:
    assert run_ranks(mean, 2) == [2.5, 2.5]


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


def facts(by_rank: list[dict[str, str]]) -> str:
    axis = Mesh({"replicate": len(by_rank)}).axis("world")
    try:
        collectives.agree(axis, by_rank[axis.rank])
    except ValueError as error:
        return str(error)
    return "agreed"


def test_ranks_agree_or_all_say_what_differs_first() -> None:
    same = {"plan": "a", "seed": "1"}
    assert run_ranks(facts, 3, [same] * 3) == ["agreed"] * 3
    line = "the ranks do not hold the same seed: rank 0 has 1, rank 1 has 2 (and ranks 2 differ as well); "
    assert (
        run_ranks(facts, 3, [same, {**same, "seed": "2"}, {**same, "seed": "3"}])
        == [line + "give all ranks the same"] * 3
    )
    # Those who lack a fact must not be the only ones that do not notice.
    line = "the ranks do not hold the same extra: rank 0 has none, rank 1 has x; give all ranks the same"
    assert run_ranks(facts, 2, [same, {**same, "extra": "x"}]) == [line] * 2


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


def test_squares_are_summed_block_by_block() -> None:
    value = pattern(0, SIZES[-1], torch.float64)
    assert collectives.sum_of_squares(value) == pytest.approx(float(value.square().sum()), rel=1e-14)
    assert collectives.sum_of_squares(value[:0]) == 0.0


def elsewhere() -> Any:
    """Ranks that do not share a machine find no link, all of them."""
    axis = Mesh({"replicate": 2}).axis("replicate")
    if axis.rank == 1:
        collectives.machine_identity = lambda: "another machine"
    try:
        return HostLink.connect(axis)
    finally:
        collectives.machine_identity = IDENTITY


IDENTITY = collectives.machine_identity


def test_ranks_of_two_machines_do_not_share_memory() -> None:
    assert run_ranks(elsewhere, 2) == [None, None]


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


class _Reads(TorchDispatchMode):
    """Counts the numbers that the host waits for one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += operator is torch.ops.aten._local_scalar_dense.default
        return operator(*args, **(kwargs or {}))


def test_a_sum_of_squares_is_read_once_and_not_block_by_block() -> None:
    tensor = torch.randn(3 * collectives.CACHE_ELEMENTS + 7, dtype=torch.float64)
    with _Reads() as reads:
        found = collectives.sum_of_squares(tensor)
    assert reads.count == 0
    assert found == pytest.approx(float(tensor.square().sum()), rel=1e-12)
