"""Collectives: sums are sums, whatever the number of ranks."""

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import collectives
from shardwise.collectives import CACHE_ELEMENTS
from shardwise.mesh import Mesh
from tests.pool import run_ranks


def pattern(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank + 10), dtype=torch.float64).to(dtype)


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


def test_squares_are_summed_block_by_block() -> None:
    value = pattern(0, 2 * CACHE_ELEMENTS + 5, torch.float64)
    assert collectives.sum_of_squares(value) == pytest.approx(float(value.square().sum()), rel=1e-14)
    assert collectives.sum_of_squares(value[:0]) == 0.0


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
