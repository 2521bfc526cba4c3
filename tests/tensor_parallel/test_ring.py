"""Ring and Ulysses attention over ranks against plain attention in one place, and the blocks they are put together from."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwise.mesh import Mesh
from shardwise.models.attention import Core
from shardwise.tensor_parallel import block_attention
from shardwise.tensor_parallel.ring import RingAttention, block_of, ring_attention
from shardwise.tensor_parallel.ulysses import UlyssesAttention
from shardwise.tensor_parallel.zigzag import Spread, Zigzag
from tests.pool import run_ranks


def inputs(case: dict[str, Any]) -> tuple[list[Tensor], Tensor | None, Tensor]:
    """(q, k, v) of the whole sequence, document ids, and a gradient for the output."""
    generator = torch.Generator().manual_seed(case.get("seed", 0))
    rows, heads, shared, length, size = case["rows"], case["heads"], case["shared"], case["length"], case["size"]
    spread = case.get("spread", 2.0)
    qkv = [
        torch.randn(rows, n, length, size, generator=generator, dtype=torch.float64) * spread for n in (heads, shared, shared)
    ]
    documents = None
    if case.get("documents"):
        documents = torch.randint(0, 2, (rows, length), generator=generator).cumsum(1) // 2
        if case["documents"] == "scattered":
            documents = torch.randint(0, 3, (rows, length), generator=generator)
    return qkv, documents, torch.randn(rows, heads, length, size, generator=generator, dtype=torch.float64)


def plain(case: dict[str, Any]) -> list[Tensor]:
    """Output and gradients of q, k, v in one place."""
    qkv, documents, grad = inputs(case)
    leaves = [t.requires_grad_() for t in qkv]
    y = Core(case.get("window", 0))(*leaves, documents)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


def on_ranks(cases: list[dict[str, Any]]) -> list[list[Tensor] | str]:
    """For each case: output and gradients, put together from all ranks."""
    mesh = Mesh({"context": dist.get_world_size()}, "cpu")
    axis = mesh.axis("context")
    found: list[list[Tensor] | str] = []
    for case in cases:
        qkv, documents, grad = inputs(case)
        zigzag = Zigzag(case["length"], axis.size)
        leaves = [zigzag.take(t, axis.rank, 2).requires_grad_() for t in qkv]
        own = None if documents is None else zigzag.take(documents, axis.rank)
        window, spread = case.get("window", 0), Spread(zigzag, documents)
        if case["method"] == "ring":
            module: torch.nn.Module = RingAttention(axis, lambda spread=spread: spread, window)
        else:
            module = UlyssesAttention(Core(window), axis, lambda spread=spread: spread)
        try:
            y = module(*leaves, own)
        except ValueError as error:
            found.append(str(error))
            continue
        mine = [y.detach(), *torch.autograd.grad(y, leaves, zigzag.take(grad, axis.rank, 2))]
        everyone: list[Any] = [None] * axis.size
        dist.all_gather_object(everyone, mine)
        found.append([zigzag.join(list(parts), 2) for parts in zip(*everyone, strict=True)])
    return found


def assert_equal(cases: list[dict[str, Any]], num_ranks: int) -> None:
    for found in run_ranks(on_ranks, num_ranks, cases):
        for case, tensors in zip(cases, found, strict=True):
            assert not isinstance(tensors, str), (case, tensors)
            for name, tensor, expected in zip(("y", "dq", "dk", "dv"), tensors, plain(case), strict=True):
                torch.testing.assert_close(tensor, expected, rtol=1e-10, atol=1e-11, msg=lambda text, n=name, c=case: f"{n} {c}: {text}")


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    groups, per_rank = draw(st.sampled_from([1, 2, 3])), draw(st.integers(1, 2))
    method = draw(st.sampled_from(["ring", "ulysses"]))
    return {
        "method": method,
        "rows": draw(st.integers(0, 2)),
        "heads": groups * per_rank * 6,
        "shared": per_rank * draw(st.sampled_from([1, 2, 6])),
        "length": draw(st.integers(1, 23)),
        "size": draw(st.integers(1, 5)),
        "window": draw(st.sampled_from([0, 0, 1, 3, 9, 40])),
        "documents": draw(st.sampled_from([None, "packed", "scattered"])),
        "spread": draw(st.sampled_from([1.0, 30.0])),
        "seed": draw(st.integers(0, 9)),
    }


@settings(max_examples=3, deadline=None, derandomize=True)
@given(st.lists(cases(), min_size=30, max_size=30))
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_any_sizes_equal_plain_attention(num_ranks: int, drawn: list[dict[str, Any]]) -> None:
    assert_equal(drawn, num_ranks)
