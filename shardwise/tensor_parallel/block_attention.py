"""Attention of some queries to some keys, with each row's logsumexp, so that it can be merged with attention to others.

FlashAttention-2 (arXiv 2307.08691, section 2): backward needs the output and logsumexp of the whole row alone, so a
block's gradients can be computed from those of all blocks merged.
"""

import torch
from torch import Tensor

# Queries at a time where the scores themselves are held.
QUERIES = 512

Gradients = tuple[Tensor, Tensor, Tensor]


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = False, hidden: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax attention of a block.

    Args:
        q: (B, N, S, D), S > 0.
        k, v: (B, K, T, D) and (B, K, T, E), T > 0; K divides N.
        scale: of the scores.
        causal: query i sees keys 0 to i only; S = T.
        hidden: (B or 1, 1, S, T) bool, what a query does not see; a row may be hidden whole.

    Returns:
        (B, N, S, E) and the logsumexp (B, N, S) of the scores, in float32 at least; 0 and -inf for rows hidden whole.
    """
    if _is_fused(q, v):
        out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=_added(hidden, q.dtype), scale=scale
        )
        if hidden is not None:  # the kernel gives such rows a logsumexp of 0
            total = total.masked_fill(hidden.all(-1), float("-inf"))
        return out, total
    outs, totals = [], []
    for start in range(0, q.shape[2], QUERIES):
        scores = _scores(q, k, scale, causal, hidden, start)
        total = scores.logsumexp(-1)
        weights = (scores - total.unsqueeze(-1)).exp().nan_to_num_(0.0)
        outs.append((weights.to(v.dtype) @ v.unsqueeze(2)).flatten(1, 2))
        totals.append(total.flatten(1, 2))
    return torch.cat(outs, 2), torch.cat(totals, 2)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    total: Tensor,
    scale: float,
    causal: bool = False,
    hidden: Tensor | None = None,
) -> Gradients:
    """The gradients of q, k and v that come of a block.

    Args:
        grad: (B, N, S, E), of the output.
        out, total: output and logsumexp of the queries over all their blocks together.
        q, k, v, scale, causal, hidden: as for `forward`.
    """
    if _is_fused(q, v):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
            grad, q, k, v, out, total, 0.0, causal, attn_mask=_added(hidden, q.dtype), scale=scale
        )
    num_shared = k.shape[1]
    dq, dk, dv = [], torch.zeros_like(k, dtype=total.dtype), torch.zeros_like(v, dtype=total.dtype)
    for start in range(0, q.shape[2], QUERIES):
        rows = slice(start, start + QUERIES)
        part, slope, result = (_grouped(t[:, :, rows], num_shared) for t in (q, grad, out))
        scores = _scores(q, k, scale, causal, hidden, start)
        weights = (scores - _grouped(total[:, :, rows], num_shared).unsqueeze(-1)).exp()
        dv += (weights.to(slope.dtype).transpose(-1, -2) @ slope).sum(2)
        inner = (slope @ v.unsqueeze(2).transpose(-1, -2)).to(weights.dtype)
        inner -= (slope.to(weights.dtype) * result).sum(-1, keepdim=True)
        inner = (weights * inner * scale).to(q.dtype)  # of the scores before scaling
        dq.append((inner @ k.unsqueeze(2)).flatten(1, 2))
        dk += (inner.transpose(-1, -2) @ part).sum(2)
    return torch.cat(dq, 2), dk.to(k.dtype), dv.to(v.dtype)


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


def _added(hidden: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return (
        None
        if hidden is None
        else torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
    )


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool, hidden: Tensor | None, start: int) -> Tensor:
    """Scores of QUERIES queries from `start` on, in float32 at least: (B, K, N / K, s, T)."""
    part = _grouped(q[:, :, start : start + QUERIES], k.shape[1])
    scores: Tensor = (part @ k.unsqueeze(2).transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * scale
    if causal:
        row = torch.arange(start, start + part.shape[3], device=q.device)[:, None]
        scores.masked_fill_(torch.arange(k.shape[2], device=q.device) > row, float("-inf"))
    if hidden is not None:
        scores.masked_fill_(hidden[:, :, start : start + QUERIES].unsqueeze(2), float("-inf"))
    return scores


def _grouped(heads: Tensor, num_shared: int) -> Tensor:
    """(B, N, ...) as (B, K, N / K, ...): query heads by the key head they share."""
    return heads.reshape(heads.shape[0], num_shared, heads.shape[1] // num_shared, *heads.shape[2:])
