"""Ring and Ulysses attention over ranks against plain attention in one place, and the blocks they are made of."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwise.mesh import Mesh
from shardwise.models.attention import Core
from shardwise.tensor_parallel import block_attention, ring
from shardwise.tensor_parallel.ring import RingAttention, block_of
from shardwise.tensor_parallel.ulysses import UlyssesAttention
from shardwise.tensor_parallel.zigzag import Spread, Zigzag
from tests.pool import run_ranks


def inputs(case: dict[str, Any]) -> tuple[list[Tensor], Tensor | None, Tensor]:
    """(q, k, v) of the whole sequence, document ids, and a gradient for the output."""
    generator = torch.Generator().manual_seed(case.get("seed", 0))
    rows, heads, shared, length, size = case["rows"], case["heads"], case["shared"], case["length"], case["size"]
    spread = case.get("spread", 2.0)
    qkv = [
        torch.randn(rows, n, length, size, generator=generator, dtype=torch.float64) * spread
        for n in (heads, shared, shared)
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
            module: torch.nn.Module = RingAttention(axis, lambda own, spread=spread: spread, window)
        else:
            module = UlyssesAttention(Core(window), axis, lambda own, spread=spread: spread)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(block_attention, "QUERIES", case.get("queries", 512))
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
                torch.testing.assert_close(
                    tensor, expected, rtol=1e-10, atol=1e-11, msg=lambda text, n=name, c=case: f"{n} {c}: {text}"
                )


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "method": draw(st.sampled_from(["ring", "ulysses"])),
        "rows": draw(st.integers(0, 2)),
        "heads": draw(st.sampled_from([6, 12])),
        "shared": draw(st.sampled_from([1, 2, 3, 6])),
        "length": draw(st.integers(1, 23)),
        "size": draw(st.integers(1, 5)),
        "window": draw(st.sampled_from([0, 0, 1, 3, 9, 40])),
        "documents": draw(st.sampled_from([None, "packed", "scattered"])),
        "spread": draw(st.sampled_from([1.0, 30.0])),
        "queries": draw(st.sampled_from([3, 512])),
        "seed": draw(st.integers(0, 9)),
    }


@settings(max_examples=2, deadline=None, derandomize=True)
@given(st.lists(cases(), min_size=30, max_size=30))
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_any_sizes_equal_plain_attention(num_ranks: int, drawn: list[dict[str, Any]]) -> None:
    assert_equal(drawn, num_ranks)


def test_key_heads_that_ranks_share_unevenly() -> None:
    # Rank 0's three query heads read key heads 0, 0, 1; rank 1's read 1, 2, 2.
    case = {"method": "ulysses", "rows": 2, "heads": 6, "shared": 3, "length": 7, "size": 4, "documents": "packed"}
    assert_equal([case], 2)


def test_ulysses_refuses_heads_that_ranks_do_not_divide() -> None:
    case = {"method": "ulysses", "rows": 1, "heads": 4, "shared": 4, "length": 7, "size": 4}
    for (error,) in run_ranks(on_ranks, 3, [case]):
        assert isinstance(error, str)
        assert "3 ranks do not divide 4" in error


# What travels


def traffic(case: dict[str, Any]) -> list[tuple[int, int]]:
    """Bytes this rank sends in forward and in backward, for both methods."""
    axis = Mesh({"context": dist.get_world_size()}, "cpu").axis("context")
    sent = [0]
    shift, exchange = dist.batch_isend_irecv, dist.all_to_all_single

    def counted_shift(operations: list[Any]) -> Any:
        sent[0] += sum(o.tensor.numel() * o.tensor.element_size() for o in operations if o.op is dist.isend)
        return shift(operations)

    def counted_exchange(received: Tensor, flat: Tensor, sizes: Any, own_sizes: list[int], **others: Any) -> Any:
        stays = own_sizes[axis.rank]
        sent[0] += (flat.numel() - stays) * flat.element_size()
        return exchange(received, flat, sizes, own_sizes, **others)

    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", counted_shift)
        patch.setattr(dist, "all_to_all_single", counted_exchange)
        spread = Spread(Zigzag(case["length"], axis.size))
        for module in (RingAttention(axis, lambda own: spread), UlyssesAttention(Core(), axis, lambda own: spread)):
            leaves = [spread.zigzag.take(t, axis.rank, 2).float().requires_grad_() for t in inputs(case)[0]]
            sent[0] = 0
            y = module(*leaves)
            forward = sent[0]
            y.sum().backward()
            found.append((forward, sent[0] - forward))
    return found


def test_bytes_sent_are_the_formulas() -> None:
    case = {"rows": 2, "heads": 8, "shared": 4, "length": 48, "size": 3}
    ranks = 4
    for ring_bytes, ulysses_bytes in run_ranks(traffic, ranks, case):
        local = 2 * (48 // ranks) * 3 * 4  # rows, positions and head size, float32
        keys = 2 * 4 * local
        # Keys and values go R - 1 steps in each pass; their gradients R - 1 steps more in backward.
        assert ring_bytes == ((ranks - 1) * keys, 2 * (ranks - 1) * keys)
        # All but one R-th of q, k, v and y leaves in each pass.
        once = (8 + 4 + 4 + 8) * local * (ranks - 1) // ranks
        assert ulysses_bytes == (once, once)


def order_of_events(case: dict[str, Any]) -> list[str]:
    axis = Mesh({"context": dist.get_world_size()}, "cpu").axis("context")
    spread = Spread(Zigzag(case["length"], axis.size))
    events: list[str] = []
    start, wait = ring.Shift.__init__, ring.Shift.wait
    forward, backward = block_attention.forward, block_attention.backward

    def noting(name: str, call: Any) -> Any:
        return lambda *given, **named: (events.append(name), call(*given, **named))[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring.Shift, "__init__", noting("start", start))
        patch.setattr(ring.Shift, "wait", noting("wait", wait))
        patch.setattr(block_attention, "forward", noting("block", forward))
        patch.setattr(block_attention, "backward", noting("block", backward))
        leaves = [spread.zigzag.take(t, axis.rank, 2).requires_grad_() for t in inputs(case)[0]]
        RingAttention(axis, lambda own: spread)(*leaves).sum().backward()
    return events


def test_blocks_are_computed_while_keys_travel() -> None:
    case = {"rows": 1, "heads": 2, "shared": 2, "length": 12, "size": 2}
    for events in run_ranks(order_of_events, 3, case):
        forward = ["start", "block", "wait", "start", "block", "wait", "block"]
        # Gradients of the keys at hand arrive behind the block, and leave before the next keys are waited for.
        backward = ["start", "block", "wait", "start", "block", "start", "wait", "block", "wait", "start", "wait"]
        assert events == forward + backward


# Blocks


def test_ranks_compute_the_same_half_of_every_block() -> None:
    num_ranks, length = 4, 64
    spread = Spread(Zigzag(length, num_ranks))
    for rank in range(num_ranks):
        for origin in range(num_ranks):
            block = block_of(spread, rank, origin, 0, torch.device("cpu"))
            assert block is not None
            assert block.hidden is None
            pairs = (block.queries.stop - block.queries.start) * (block.keys.stop - block.keys.start)
            assert (pairs, block.causal) == ((256, True) if origin == rank else (128, False))


def test_blocks_that_see_nothing_are_left_out() -> None:
    device, zigzag = torch.device("cpu"), Zigzag(64, 4)
    # Pieces of 8: rank 1 has 8 to 15 and 48 to 55. Of rank 0's early piece, a window of 4 reaches 5 to 7.
    found = [block_of(Spread(zigzag), 1, origin, 4, device) for origin in range(4)]
    assert [block is not None for block in found] == [True, True, True, False]
    documents = (torch.arange(64) // 16)[None]
    found = [block_of(Spread(zigzag, documents), 1, origin, 0, device) for origin in range(4)]
    assert [block is not None for block in found] == [True, True, False, False]
    # Its early piece alone would need no mask; with the late one, which begins another document, it does.
    assert found[0] is not None
    assert found[0].hidden is not None
    # Early queries see early keys, all of the same document and earlier; late ones see none of them.
    assert found[0].hidden(slice(0, 8)).sum() == 0
    assert found[0].hidden(slice(8, 16)).sum() == 8 * 8
    whole = [block_of(Spread(zigzag, torch.zeros(1, 64, dtype=torch.int64)), 1, o, 64, device) for o in range(4)]
    assert all(block is not None and block.hidden is None for block in whole)


def blocks(dtype: torch.dtype, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, n, 9, 8, generator=generator).mul(scale).to(dtype) for n in (6, 2, 2))
    hidden = torch.rand(2, 1, 9, 9, generator=generator) < 0.5
    hidden[0, 0, 3] = hidden[1, 0, 8] = True
    return q, k, v, hidden


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("causal", "masked"), [(False, False), (True, False), (False, True)])
def test_held_scores_give_what_the_fused_kernel_does(
    dtype: torch.dtype, causal: bool, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v, hidden = blocks(dtype)
    settings = (0.3, causal, (lambda rows: hidden[:, :, rows]) if masked else None)
    fused = block_attention.forward(q, k, v, *settings)
    # Merged with what a row sees elsewhere, its logsumexp is finite.
    merged = (fused[0], fused[1].clamp(min=-1.0))
    fused_back = block_attention.backward(torch.ones_like(q), q, k, v, *merged, *settings)
    monkeypatch.setattr(block_attention, "_is_fused", lambda q, v: False)
    monkeypatch.setattr(block_attention, "QUERIES", 4)
    held = block_attention.forward(q, k, v, *settings)
    held_back = block_attention.backward(torch.ones_like(q), q, k, v, *merged, *settings)
    assert held[0].dtype == dtype
    assert held[1].dtype == fused[1].dtype == torch.promote_types(dtype, torch.float32)
    near = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    for one, other in zip((*held, *held_back), (*fused, *fused_back), strict=True):
        torch.testing.assert_close(one, other, rtol=near, atol=near)
    if masked:
        assert torch.isneginf(fused[1][0, :, 3]).all()
        assert (fused[0][0, :, 3] == 0).all()


def test_values_of_another_width_than_keys() -> None:
    q, k, _, hidden = blocks(torch.float64)
    hidden[..., 0] = False
    v = torch.randn(2, 2, 9, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    scores = (q @ k.repeat_interleave(3, 1).mT * 0.3).masked_fill(hidden, float("-inf"))
    expected = scores.softmax(-1) @ v.repeat_interleave(3, 1)
    right = torch.autograd.grad(expected.sum(), leaves)
    with torch.no_grad():
        mask = {"hidden": lambda rows: hidden[:, :, rows]}
        out, total = block_attention.forward(*leaves, 0.3, **mask)
        found = block_attention.backward(torch.ones_like(out), *leaves, out, total, 0.3, **mask)
    for one, other in zip((out, *found), (expected, *right), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_merged_halves_are_the_whole(scale: float) -> None:
    q, k, v, hidden = blocks(torch.float64, scale)
    hidden[..., 0] = False  # merging begins with a block in which every query sees something
    expected, expected_total = block_attention.forward(q, k, v, 1.0, hidden=lambda rows: hidden[:, :, rows])
    (out, total), rest = (
        block_attention.forward(
            q, k[:, :, keys], v[:, :, keys], 1.0, hidden=lambda rows, keys=keys: hidden[:, :, rows, keys]
        )
        for keys in (slice(0, 4), slice(4, 9))
    )
    block_attention.merge(out, total, *rest)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(total, expected_total, rtol=1e-12, atol=1e-12)


def test_rows_are_masked_some_at_a_time_with_the_keys_they_see(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, _ = blocks(torch.float64)
    scores: list[int] = []
    fused = block_attention._fused

    def counting(q: Tensor, k: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        scores.append(q.shape[2] * k.shape[2])
        return fused(q, k, *others)

    monkeypatch.setattr(block_attention, "_fused", counting)
    monkeypatch.setattr(block_attention, "QUERIES", 3)
    documents = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2])

    def hidden(rows: slice) -> Tensor:
        return (documents[rows, None] != documents)[None, None]

    out, total = block_attention.forward(q, k, v, 0.3, hidden=hidden)
    assert scores == [9, 9, 9]
    monkeypatch.undo()
    expected, expected_total = block_attention.forward(q, k, v, 0.3, hidden=hidden)
    torch.testing.assert_close((out, total), (expected, expected_total))


def half_precision(case: dict[str, Any]) -> tuple[float, float]:
    """The largest errors of the output and of dk in bfloat16, ring and plain, in the scale of what is right."""
    axis = Mesh({"context": dist.get_world_size()}, "cpu").axis("context")
    spread = Spread(Zigzag(case["length"], axis.size))
    qkv, _, grad = inputs(case)
    exact = [t.to(torch.bfloat16).double().requires_grad_() for t in qkv]
    grad = grad.to(torch.bfloat16)
    y = Core()(*exact)
    right = [y, *torch.autograd.grad(y, exact, grad.double())]
    leaves = [spread.zigzag.take(t.detach().to(torch.bfloat16), axis.rank, 2).requires_grad_() for t in exact]
    y = RingAttention(axis, lambda own: spread)(*leaves)
    found = [y, *torch.autograd.grad(y, leaves, spread.zigzag.take(grad, axis.rank, 2))]
    errors = [
        float((one.double() - spread.zigzag.take(other, axis.rank, 2)).abs().max() / other.abs().max())
        for one, other in zip(found, right, strict=True)
    ]
    return max(errors), float(all(t.dtype == torch.bfloat16 for t in found))


def test_half_precision_is_rounded_once() -> None:
    case = {"rows": 2, "heads": 4, "shared": 2, "length": 32, "size": 8, "spread": 1.0}
    for error, kept in run_ranks(half_precision, 3, case):
        assert error < 2e-2
        assert kept
