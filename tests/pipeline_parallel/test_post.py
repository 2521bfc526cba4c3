"""Messages between ranks of one machine: through shared memory, and with torch.distributed; both do the same."""

import gc
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from shardwise.mesh import Mesh
from shardwise.pipeline_parallel.post import GroupPost, HostPost, Post, connect
from tests.pool import run_ranks

CPU = torch.device("cpu")


def _post(shared: bool) -> Post:
    axis = Mesh({"pipeline": dist.get_world_size()}, device="cpu").axis("pipeline")
    post = connect(axis, CPU)
    assert isinstance(post, HostPost)
    return post if shared else GroupPost(axis)


def _exchange(shared: bool) -> list[bool]:
    """Every rank sends every other rank three tensors, which are awaited in another order; several rounds."""
    post = _post(shared)
    rank, size = dist.get_rank(), dist.get_world_size()
    others = [other for other in range(size) if other != rank]

    def value(source: int, target: int, item: int, number: int) -> torch.Tensor:
        shape, dtype = [((3, 5), torch.float64), ((2,), torch.int64), ((40, 70), torch.float32)][item]
        return torch.full(shape, 1000 * number + 100 * source + 10 * target + item, dtype=dtype)

    found = []
    for number in range(6):
        waits: list[tuple[Callable[[], torch.Tensor], torch.Tensor]] = []
        for other in others:
            for item in range(3):
                expected = value(other, rank, item, number)
                wait = post.receive(tuple(expected.shape), expected.dtype, CPU, other, 3 * number + item)
                waits.append((wait, expected))
        for other in others:
            for item in range(3):
                sent = value(rank, other, item, number)
                post.send(sent.t().contiguous().t() if item == 2 else sent, other, 3 * number + item)
        kept = [(wait(), expected) for wait, expected in reversed(waits)]
        found += [torch.equal(tensor, expected) and tensor.dtype == expected.dtype for tensor, expected in kept]
        post.prune()
        post.flush()
    dist.barrier()
    post.close()
    return found


@pytest.mark.parametrize("shared", [True, False])
def test_everything_arrives_in_any_order(shared: bool) -> None:
    assert run_ranks(_exchange, 3, shared) == [[True] * 36] * 3


def _hold_one() -> list[bool]:
    """A received tensor keeps its values while later messages come and go, and its memory is used again afterwards."""
    post = _post(True)
    assert isinstance(post, HostPost)
    rank = dist.get_rank()
    if rank == 0:
        for number in range(20):
            post.send(torch.full((1000,), float(number)), 1, number)
            post.receive((1,), torch.int64, CPU, 1, number)()
        dist.barrier()
        return [len(post._peers[1]._own) == 2]  # one that is held, one in turn
    held = post.receive((1000,), torch.float32, CPU, 0, 0)()
    part, found = held[10:20], []
    del held
    post.send(torch.zeros(1, dtype=torch.int64), 0, 0)
    for number in range(1, 20):
        found.append(bool((post.receive((1000,), torch.float32, CPU, 0, number)() == number).all()))
        gc.collect()
        post.prune()
        post.send(torch.zeros(1, dtype=torch.int64), 0, number)
    found.append(bool((part == 0).all()))
    dist.barrier()
    return found


def test_memory_goes_back_when_nothing_refers_to_it() -> None:
    assert run_ranks(_hold_one, 2) == [[True], [True] * 20]


def _flood(count: int) -> bool:
    """Both send more notes than a socket has room for before either reads one."""
    post = _post(True)
    other = 1 - dist.get_rank()
    for number in range(count):
        post.send(torch.tensor([number]), other, number)
    good = all(int(post.receive((1,), torch.int64, CPU, other, number)()) == number for number in range(count))
    dist.barrier()
    return good


def test_senders_that_do_not_read_do_not_block_each_other() -> None:
    assert run_ranks(_flood, 2, 1500) == [True, True]


def _leave() -> str:
    post = _post(True)
    if dist.get_rank() == 1:
        post.close()
        return ""
    try:
        post.receive((1,), torch.int64, CPU, 1, 0)()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_a_rank_that_is_gone_is_named() -> None:
    assert run_ranks(_leave, 2)[0] == "rank 1 is gone: it closed its end of the pipeline axis"


def _done_first() -> bool:
    """Rank 1 has done its part, and leaves, when rank 0 still has what it was sent."""
    post = _post(True)
    if dist.get_rank() == 1:
        post.send(torch.tensor([5]), 0, 0)
        post.receive((1,), torch.int64, CPU, 0, 1)()
        post.close()
        dist.barrier()
        return True
    received = post.receive((1,), torch.int64, CPU, 1, 0)()
    post.send(torch.tensor([6]), 1, 1)
    dist.barrier()
    good = int(received) == 5
    del received
    post.prune()
    post.close()
    return good


def test_memory_of_a_rank_that_has_left_is_not_given_back_with_an_error() -> None:
    assert run_ranks(_done_first, 2) == [True, True]
