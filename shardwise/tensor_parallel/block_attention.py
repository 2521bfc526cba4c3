"""Attention of some queries to some keys, with each row's logsumexp, so that it can be merged with attention to others.

FlashAttention-2 (arXiv 2307.08691, section 2): backward needs the output and logsumexp of the whole row alone, so a
block's gradients can be computed from those of all blocks merged.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

# Queries at a time where a mask or the scores are held: what is held then grows with the length, not with its square.
QUERIES = 512

# Rows of queries -> (B or 1, 1, rows, T) bool, the keys that they do not see.
Hidden = Callable[[slice], Tensor]
Gradients = tuple[Tensor, Tensor, Tensor]


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = False, hidden: Hidden | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax attention of a block.

    Args:
        q: (B, N, S, D), S > 0.
        k, v: (B, K, T, D) and (B, K, T, E), T > 0; K divides N.
        scale: of the scores.
        causal: query i sees keys 0 to i only; S = T. Not together with `hidden`.
        hidden: which keys some rows of queries do not see; a row may be hidden whole.

    Returns:
        (B, N, S, E) and the logsumexp (B, N, S) of the scores, in float32 at least; 0 and -inf for rows hidden whole.
    """
    if hidden is None and _is_fused(q, v):
        return _fused(q, k, v, scale, causal)
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    total = q.new_full(q.shape[:3], float("-inf"), dtype=torch.promote_types(q.dtype, torch.float32))
    for rows, keys, mask in _chunks(q, k, causal, hidden):
        part, kept, values = q[:, :, rows], k[:, :, keys], v[:, :, keys]
        if _is_fused(q, v):
            assert mask is not None
            added = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(mask, float("-inf"))
            found, found_total = _fused(part, kept, values, scale, False, added)
            # The kernel gives rows that are hidden whole a logsumexp of 0.
            found_total = found_total.masked_fill(mask.all(-1), float("-inf"))
        else:
            scores = _scores(part, kept, scale, mask)
            found_total = scores.logsumexp(-1)
            weights = (scores - found_total.unsqueeze(-1)).exp().nan_to_num_(0.0)
            found = (weights.to(v.dtype) @ values.unsqueeze(2)).flatten(1, 2)
            found_total = found_total.flatten(1, 2)
        out[:, :, rows], total[:, :, rows] = found, found_total
    return out, total


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    total: Tensor,
    scale: float,
    causal: bool = False,
    hidden: Hidden | None = None,
) -> Gradients:
    """The gradients of q, k and v that come of a block.

    Args:
        grad: (B, N, S, E), of the output.
        out, total: output and logsumexp of the queries over all their blocks together.
        q, k, v, scale, causal, hidden: as for `forward`.
    """
    if hidden is None and _is_fused(q, v):
        return _fused_backward(grad, q, k, v, out, total, scale, causal)
    dq, dk, dv = (torch.zeros(t.shape, dtype=total.dtype, device=t.device) for t in (q, k, v))
    for rows, keys, mask in _chunks(q, k, causal, hidden):
        slope, part, result, sums = (t[:, :, rows] for t in (grad, q, out, total))
        kept, values = k[:, :, keys], v[:, :, keys]
        if _is_fused(q, v):
            assert mask is not None
            added = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(mask, float("-inf"))
            found = _fused_backward(slope, part, kept, values, result, sums, scale, False, added)
        else:
            found = _held_backward(slope, part, kept, values, result, sums, scale, mask)
        dq[:, :, rows] = found[0]
        dk[:, :, keys] += found[1]
        dv[:, :, keys] += found[2]
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def merge(out: Tensor, total: Tensor, other: Tensor, other_total: Tensor) -> None:
    """Add a block to what was found for the same queries before, in place; nothing in it can overflow.

    Args:
        out, total: (B, N, S, E) and the logsumexp (B, N, S), finite.
        other, other_total: those of the block; -inf where it has nothing to add.
    """
    out.add_((other - out).mul_(torch.sigmoid(other_total - total).unsqueeze(-1)))
    total.sub_(torch.nn.functional.logsigmoid(total - other_total))


def _is_fused(q: Tensor, v: Tensor) -> bool:
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1]


def _fused(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, added: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
        q, k, v, 0.0, causal, attn_mask=added, scale=scale
    )


def _fused_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    total: Tensor,
    scale: float,
    causal: bool,
    added: Tensor | None = None,
) -> Gradients:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
        grad, q, k, v, out, total, 0.0, causal, attn_mask=added, scale=scale
    )


def _held_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, scale: float, mask: Tensor | None
) -> Gradients:
    """The same from scores that are held, for devices and sizes without the kernel."""
    slope, part, result, sums = (_grouped(t, k.shape[1]) for t in (grad, q, out, total))
    weights = (_scores(q, k, scale, mask) - sums.unsqueeze(-1)).exp()  # (B, K, N / K, S, T)
    dv = (weights.to(slope.dtype).transpose(-1, -2) @ slope).sum(2)
    inner = (slope @ v.unsqueeze(2).transpose(-1, -2)).to(weights.dtype)
    inner -= (slope.to(weights.dtype) * result).sum(-1, keepdim=True)
    inner = (weights * inner * scale).to(q.dtype)  # of the scores before scaling
    return (inner @ k.unsqueeze(2)).flatten(1, 2), (inner.transpose(-1, -2) @ part).sum(2), dv


def _scores(q: Tensor, k: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """In float32 at least: (B, K, N / K, S, T)."""
    scores: Tensor = _grouped(q, k.shape[1]) @ k.unsqueeze(2).transpose(-1, -2)
    scores = scores.to(torch.promote_types(q.dtype, torch.float32)) * scale
    return scores if mask is None else scores.masked_fill_(mask.unsqueeze(2), float("-inf"))


def _grouped(heads: Tensor, num_shared: int) -> Tensor:
    """(B, N, ...) as (B, K, N / K, ...): query heads by the key head they share."""
    return heads.reshape(heads.shape[0], num_shared, heads.shape[1] // num_shared, *heads.shape[2:])


def _chunks(q: Tensor, k: Tensor, causal: bool, hidden: Hidden | None) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """(rows of queries, the keys that some of them see, those hidden among them); rows that see none are left out."""
    for start in range(0, q.shape[2], QUERIES):
        rows, keys = slice(start, min(start + QUERIES, q.shape[2])), slice(0, k.shape[2])
        mask = None
        if hidden is not None:
            mask = hidden(rows)
        elif causal:
            row = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
            mask = (torch.arange(k.shape[2], device=q.device) > row)[None, None]
        if mask is not None and mask.device.type == "cpu":  # elsewhere the host would have to wait for it
            seen = (~mask).flatten(0, 2).any(0).nonzero()
            if not len(seen):
                continue
            keys = slice(int(seen[0]), int(seen[-1]) + 1)
            mask = mask[..., keys]
        yield rows, keys, mask
