"""Sums over data-parallel ranks: beside the computation, the same with and without memory that ranks share."""

import gc
import time

import pytest
import torch
from torch import Tensor

from shardwise.data_parallel.reducer import Flat, Reducer
from shardwise.mesh import Mesh
from tests.pool import run_ranks

CPU = torch.device("cpu")
AXES = [
    ({"replicate": 2}, 2),
    ({"replicate": 3}, 3),
    ({"shard": 2}, 2),
    ({"replicate": 2, "shard": 2}, 4),
]


def value(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


def sums(axes: dict[str, int], link: bool) -> dict[str, Tensor]:
    mesh = Mesh(axes, device="cpu")
    reducer = Reducer(mesh, link=link)
    assert (reducer.link is not None) == link
    rank, size = reducer.axis.rank, reducer.axis.size
    parts = reducer.zero.size
    found: dict[str, Tensor] = {}
    for dtype in (torch.float32, torch.float64):
        for numel in (0, parts, 35 * parts, 70_001 * parts):
            right = sum(value(r, numel, dtype) for r in range(size))
            length = numel // parts
            own = slice(reducer.zero.rank * length, (reducer.zero.rank + 1) * length)
            flat = reducer.allocate(numel, dtype, CPU)
            flat.tensor.copy_(value(rank, numel, dtype))
            reducer.all_reduce(flat).wait()
            found[f"whole {dtype} {numel}"] = flat.tensor.clone()
            flat.tensor.copy_(value(rank, numel, dtype))
            reducer.reduce_scatter(flat).wait()
            found[f"own {dtype} {numel}"] = flat.tensor[own].clone()
            flat.tensor.copy_(value(rank, numel, dtype))
            into = torch.ones(length, dtype=dtype)
            reducer.reduce_scatter(flat, into).wait()
            found[f"added {dtype} {numel}"] = into
            for name, tensor in (("whole", right), ("own", right[own]), ("added", 1 + right[own])):
                torch.testing.assert_close(found[f"{name} {dtype} {numel}"], tensor, rtol=1e-5, atol=1e-5)
    # Fragments of all ranks, put together.
    fragment, full = reducer.allocate(5, torch.float32, CPU), torch.empty(5 * parts)
    fragment.tensor.fill_(reducer.zero.rank)
    whole = reducer.allocate(5 * parts, torch.float32, CPU)
    whole.tensor.view(parts, 5)[reducer.zero.rank].fill_(reducer.zero.rank)
    reducer.meet()
    reducer.gather(fragment, full).wait()
    reducer.refresh(whole)
    expected = torch.arange(parts).float().repeat_interleave(5)
    assert torch.equal(full, expected)
    assert torch.equal(whole.tensor, expected)
    reducer.meet()
    reducer.close()
    return found


@pytest.mark.parametrize(("axes", "num_ranks"), AXES, ids=str)
def test_sums_are_the_same_over_shared_memory_and_over_gloo(axes: dict[str, int], num_ranks: int) -> None:
    shared, elsewhere = (run_ranks(sums, num_ranks, axes, link) for link in (True, False))
    for rank in range(num_ranks):
        for name, tensor in shared[rank].items():
            torch.testing.assert_close(tensor, elsewhere[rank][name], rtol=1e-5, atol=1e-5)
            if num_ranks == 2:  # a sum of two has no order
                assert torch.equal(tensor, elsewhere[rank][name]), name
            if name.startswith("whole"):
                assert torch.equal(tensor, shared[0][name])  # the same bits on every rank
                assert torch.equal(elsewhere[rank][name], elsewhere[0][name])


def beside() -> tuple[bool, list[int]]:
    """A sum runs while this rank goes on, and sums are made in the order in which they begin."""
    reducer = Reducer(Mesh({"replicate": 2}, device="cpu"))
    flats = [reducer.allocate(4, torch.float32, CPU) for _ in range(3)]
    for number, flat in enumerate(flats):
        flat.tensor.fill_(number)
    if reducer.axis.rank == 1:
        time.sleep(0.3)
    start = time.perf_counter()
    pending = [reducer.all_reduce(flat) for flat in flats]
    at_once = time.perf_counter() - start < 0.2
    for one in reversed(pending):
        one.wait()
    reducer.close()
    return at_once, [int(flat.tensor[0]) for flat in flats]


def test_starting_a_sum_does_not_wait_for_the_others() -> None:
    assert run_ranks(beside, 2) == [(True, [0, 2, 4])] * 2


def leaving() -> str:
    reducer = Reducer(Mesh({"replicate": 2}, device="cpu"))
    flat = reducer.allocate(4, torch.float32, CPU)
    if reducer.axis.rank == 1:
        reducer.close()
        return "left"
    pending = [reducer.all_reduce(flat) for _ in range(2)]
    errors = []
    for one in pending:
        try:
            one.wait()
        except RuntimeError as error:
            errors.append(str(error))
    reducer.close()
    return " | ".join(errors)


def test_an_error_on_the_thread_reaches_whoever_waits() -> None:
    text, _ = run_ranks(leaving, 2)
    assert text.count("rank 1 is gone") == 2


def forgotten(link: bool) -> bool:
    reducer = Reducer(Mesh({"replicate": 2}, device="cpu"), link=link)
    assert reducer._sums is not None
    thread = reducer._sums._thread
    assert thread is not None
    flat = reducer.allocate(4, torch.float32, CPU)
    reducer.all_reduce(flat).wait()
    time.sleep(0.05)
    del reducer
    gc.collect()
    thread.join(10)
    assert flat.tensor.tolist() == [0.0] * 4  # the memory outlives it
    return thread.is_alive()


@pytest.mark.parametrize("link", [True, False])
def test_a_reducer_that_nobody_closes_takes_its_thread_with_it(link: bool) -> None:
    assert run_ranks(forgotten, 2, link) == [False] * 2


def test_one_rank_alone_sums_nothing_and_needs_no_thread() -> None:
    reducer = Reducer(Mesh({}, device="cpu"))
    assert reducer.link is None
    flat = reducer.allocate(3, torch.float64, CPU)
    assert isinstance(flat, Flat)
    assert not flat.tensor.any()
    flat.tensor.fill_(2.0)
    reducer.all_reduce(flat).wait()
    reducer.reduce_scatter(flat).wait()
    into = torch.ones(3, dtype=torch.float64)
    reducer.reduce_scatter(flat, into).wait()
    reducer.meet()
    assert flat.tensor.tolist() == [2.0] * 3
    assert into.tolist() == [3.0] * 3
    reducer.close()
