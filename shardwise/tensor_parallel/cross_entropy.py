"""Cross-entropy over logits that are divided over the vocabulary, which are never gathered (arXiv 1909.08053, section
3).

Each rank reduces its columns to four numbers a token (largest logit, sum of exponentials, the target's logit, sum of
logits), and one gather of those gives everyone the loss. Tokens are taken in chunks, so that beside the logits and
their gradient nothing of their size is held.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.functions import apply
from shardwise.layout import share
from shardwise.loss import IGNORED, CrossEntropy
from shardwise.tensor_parallel.region import Region, rows_of

# Logits looked at together: small enough for a cache, large enough that the calls cost nothing beside the work.
CHUNK_ELEMENTS = 1 << 18


def divided_cross_entropy(
    logits: Tensor, targets: Tensor, terms: CrossEntropy, region: Region, vocabulary: int
) -> Tensor:
    """The loss summed over targets, the same on every rank.

    Args:
        logits: (..., V / R), this rank's columns: `share(V, r, R)`.
        targets: (...) int64, -100 where a position does not count.
        terms: label smoothing and z-loss.
        vocabulary: V.
    """
    return apply(_CrossEntropy, rows_of(logits), targets.reshape(-1), terms, region, vocabulary)


def _chunks(logits: Tensor) -> list[slice]:
    step = max(1, CHUNK_ELEMENTS // max(1, logits.shape[1]))
    return [slice(low, low + step) for low in range(0, logits.shape[0], step)]


class Shared:
    """The ranks of the tensor axis as holders of the output matrix, whose rows are divided over them (`head.Holders`).

    Args:
        region: the tensor axis.
        vocabulary: rows of the whole matrix.
    """

    def __init__(self, region: Region, vocabulary: int) -> None:
        self.region = region
        self.vocabulary = vocabulary
        self.size = region.axis.size
        self.start = share(vocabulary, region.axis.rank, region.axis.size)[0]

    @property
    def length(self) -> int:
        return self.region.length

    def note(self) -> Callable[[], None]:
        return self.region.note()

    def enter(self, x: Tensor, length: int) -> Tensor:
        return self.region.gather(x, length) if self.region.sequence else x

    def everyone(self, parts: Tensor) -> Tensor:
        return self.region.exchange.gather(parts.unsqueeze(0), 0, self.size)

    def sum(self, part: Tensor) -> Callable[[], Tensor]:
        buffer = self.region.exchange.buffer(tuple(part.shape), part).copy_(part)
        return self.region.exchange.start_sum(buffer, self.region.scatter)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, terms: CrossEntropy, region: Region, vocabulary: int
    ) -> Tensor:
        start, stop = share(vocabulary, region.axis.rank, region.axis.size)
        assert logits.shape[1] == stop - start, (tuple(logits.shape), vocabulary, region.axis)
        counted = targets != IGNORED
        if targets.device.type == "cpu" and bool((counted & ((targets < 0) | (targets >= vocabulary))).any()):
            raise IndexError(f"a target lies outside the {vocabulary} tokens of the vocabulary")
        dtype = torch.promote_types(logits.dtype, torch.float32)
        mine = counted & (targets >= start) & (targets < stop)
        local = torch.where(mine, targets - start, 0)
        parts = logits.new_zeros((4, logits.shape[0]), dtype=dtype)  # (largest, exponentials, target, sum) x tokens
        parts[0] = float("-inf")
        if logits.shape[1]:
            for rows in _chunks(logits):
                chunk = logits[rows].to(dtype)
                largest = chunk.amax(1)
                parts[0, rows] = largest
                parts[2, rows] = torch.where(mine[rows], chunk.gather(1, local[rows].unsqueeze(1)).squeeze(1), 0)
                if terms.label_smoothing:
                    parts[3, rows] = chunk.sum(1)
                parts[1, rows] = (chunk - largest.unsqueeze(1)).exp_().sum(1)
        everyone = region.exchange.gather(parts.unsqueeze(0), 0, region.axis.size)  # (R, 4, N)
        largest = everyone[:, 0].amax(0)
        exponentials = (everyone[:, 1] * (everyone[:, 0] - largest).exp()).sum(0)
        normalizer = exponentials.log() + largest  # (N)
        loss = normalizer - (1 - terms.label_smoothing) * everyone[:, 2].sum(0)
        if terms.label_smoothing:
            loss = loss - terms.label_smoothing / vocabulary * everyone[:, 3].sum(0)
        if terms.z_loss:
            loss = loss + terms.z_loss * normalizer.square()
        ctx.save_for_backward(logits, normalizer, counted, mine, local)
        ctx.terms, ctx.vocabulary = terms, vocabulary
        return torch.where(counted, loss, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, normalizer, counted, mine, local = ctx.saved_tensors
        terms: CrossEntropy = ctx.terms
        scale = torch.where(counted, grad, 0)  # (N)
        softmax_scale = scale * (1 + 2 * terms.z_loss * normalizer) if terms.z_loss else scale
        out = torch.empty_like(logits)
        for rows in _chunks(logits):
            chunk = logits[rows].to(normalizer.dtype)
            chunk = (chunk - normalizer[rows].unsqueeze(1)).exp_().mul_(softmax_scale[rows].unsqueeze(1))
            if terms.label_smoothing:
                chunk.sub_((scale[rows] * (terms.label_smoothing / ctx.vocabulary)).unsqueeze(1))
            if logits.shape[1]:
                target = torch.where(mine[rows], scale[rows] * (1 - terms.label_smoothing), 0)
                chunk.scatter_add_(1, local[rows].unsqueeze(1), -target.unsqueeze(1))
            out[rows] = chunk
        return out, None, None, None, None
