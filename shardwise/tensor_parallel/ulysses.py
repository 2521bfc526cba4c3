"""Ulysses attention (arXiv 2309.14509, section 3): between two all-to-alls a rank has whole sequences of some heads."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardwise.functions import apply
from shardwise.mesh import Axis
from shardwise.tensor_parallel.zigzag import Spread, check_lengths


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flat: Tensor, sizes: list[int], received_sizes: list[int], axis: Axis) -> Tensor:
        ctx.settings = sizes, received_sizes, axis
        return _exchange(flat, sizes, received_sizes, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sizes, received_sizes, axis = ctx.settings
        return _exchange(grad.contiguous(), received_sizes, sizes, axis), None, None, None


def _exchange(flat: Tensor, sizes: list[int], received_sizes: list[int], axis: Axis) -> Tensor:
    received = flat.new_empty(sum(received_sizes))
    dist.all_to_all_single(received, flat, received_sizes, sizes, group=axis.group)
    return received


def all_to_all(
    parts: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[Sequence[int]]], axis: Axis
) -> list[list[Tensor]]:
    """Send each rank some tensors, in one message. Differentiable; collective over the axis.

    Args:
        parts: by rank, what it gets.
        shapes: by rank, the shapes of what comes from it.
        axis: the ranks.

    Returns:
        by rank, what came from it.
    """
    sizes = [sum(part.numel() for part in some) for some in parts]
    numels = [[torch.Size(shape).numel() for shape in some] for some in shapes]
    flat = torch.cat([part.reshape(-1) for some in parts for part in some])
    received = apply(_AllToAll, flat, sizes, [sum(some) for some in numels], axis)
    pieces = iter(received.split([numel for some in numels for numel in some]))
    return [[next(pieces).view(tuple(shape)) for shape in some] for some in shapes]


class UlyssesAttention(nn.Module):
    """Runs an attention module (q, k, v, documents) -> y, whose heads do not depend on each other, on whole sequences.

    Args:
        core: the module.
        axis: the ranks that the sequence lies on.
        spread_of: this rank's part of the documents, or None -> how those sequences lie on the ranks.
    """

    def __init__(self, core: nn.Module, axis: Axis, spread_of: Callable[[Tensor | None], Spread]) -> None:
        super().__init__()
        self.core = core
        self.axis = axis
        self._spread_of = spread_of

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        """Attention of this rank's queries to all ranks' keys.

        Args:
            q, k, v: (B, N, S of this rank, D), (B, K, S of this rank, D), (B, K, S of this rank, E).
            documents: this rank's part of the batch's documents.

        Returns:
            (B, N, S of this rank, E).

        Raises:
            ValueError: the ranks do not divide the N heads, the lengths are not those of this rank's part, or the
                documents are not the batch's.
        """
        axis = self.axis
        spread = self._spread_of(documents)
        check_lengths(spread, axis, q, k)
        num_heads, num_shared = q.shape[1], k.shape[1]
        if num_heads % axis.size:
            raise ValueError(
                f'plan.context_method = "ulysses" gives each rank whole heads, and {axis.size} ranks do not divide '
                f'{num_heads}; use "ring", or a plan.context that divides them'
            )
        share = num_heads // axis.size
        group = num_heads // num_shared
        # The key and value heads that each rank's query heads read; several ranks may read the same one.
        read = [slice(rank * share // group, ((rank + 1) * share - 1) // group + 1) for rank in range(axis.size)]
        count = [spread.zigzag.count(rank) for rank in range(axis.size)]
        here, num_read = q.shape[2], read[axis.rank].stop - read[axis.rank].start
        parts = [
            (q[:, rank * share : (rank + 1) * share], k[:, read[rank]], v[:, read[rank]]) for rank in range(axis.size)
        ]
        shapes = [
            tuple((len(q), heads, length, t.shape[3]) for t, heads in ((q, share), (k, num_read), (v, num_read)))
            for length in count
        ]
        whole = [spread.zigzag.join(some, dim=2) for some in zip(*all_to_all(parts, shapes, axis), strict=True)]
        queries, keys, values = whole
        index = [(axis.rank * share + head) // group - read[axis.rank].start for head in range(share)]
        if share % num_read or index != [head * num_read // share for head in range(share)]:
            keys, values = keys[:, index], values[:, index]
        others = () if spread.documents is None else (spread.documents,)
        y = self.core(queries, keys, values, *others)  # (B, N / R, S, E)
        back = all_to_all(
            [(spread.zigzag.take(y, rank, dim=2),) for rank in range(axis.size)],
            [((len(q), share, here, v.shape[3]),)] * axis.size,
            axis,
        )
        return torch.cat([part for (part,) in back], 1)
