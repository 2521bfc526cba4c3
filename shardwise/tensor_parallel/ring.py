"""Ring attention (arXiv 2310.01889): keys and values travel round the context axis, past every rank's queries.

Backward sends them round again, and behind them the gradients that each rank adds to, until these come home. In the
zigzag order every rank needs half of each block that arrives. Blocks that causality, a window or documents leave empty
are not computed.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardwise.functions import apply
from shardwise.mesh import Axis
from shardwise.tensor_parallel import block_attention
from shardwise.tensor_parallel.block_attention import Hidden
from shardwise.tensor_parallel.zigzag import Spread, check_lengths


class Shift:
    """A flat tensor on its way to the next rank of the ring, and the previous rank's on its way here.

    Args:
        sent: what the next rank gets; left alone until `wait`.
        numel: elements of what the previous rank sends.
        tag: tells apart what travels at the same time.
    """

    def __init__(self, axis: Axis, sent: Tensor, numel: int, tag: int) -> None:
        self._sent, self._received = sent, sent.new_empty(numel)
        following, before = axis.ranks[(axis.rank + 1) % axis.size], axis.ranks[axis.rank - 1]
        operations = []
        if sent.numel():
            operations.append(dist.P2POp(dist.isend, sent, following, axis.group, tag))
        if numel:
            operations.append(dist.P2POp(dist.irecv, self._received, before, axis.group, tag))
        self._works: Sequence[dist.Work] = dist.batch_isend_irecv(operations) if operations else ()

    def wait(self) -> Tensor:
        """The previous rank's tensor, once it is there and this rank's has left."""
        for work in self._works:
            work.wait()
        return self._received


class Block(NamedTuple):
    """What a rank computes with the keys of one rank: which of its queries, which of the keys, and what is hidden."""

    queries: slice
    keys: slice
    causal: bool
    hidden: Hidden | None


def block_of(spread: Spread, rank: int, origin: int, window: int, device: torch.device) -> Block | None:
    """The queries of `rank` that see keys of rank `origin`, and those keys; None if there are none.

    Args:
        spread: the sequences.
        window: positions that a query sees, its own included; 0: all before it.
        device: of the mask.
    """
    zigzag = spread.zigzag
    last = 2 * zigzag.size - 1
    early, _ = zigzag.pieces(rank)
    other_early, _ = zigzag.pieces(origin)
    queries, keys = slice(0, zigzag.count(rank)), slice(0, zigzag.count(origin))
    query_pieces, key_pieces = [rank, last - rank], [origin, last - origin]
    if origin < rank:  # the late piece there comes after both here
        keys, key_pieces = slice(0, other_early[1] - other_early[0]), [origin]
    elif origin > rank:  # both pieces there lie between the two here
        queries, query_pieces = slice(early[1] - early[0], queries.stop), [last - rank]
    if queries.start == queries.stop or keys.start == keys.stop:
        return None
    if not window and spread.documents is None:
        return Block(queries, keys, origin == rank, None)
    query, key = zigzag.positions(rank)[queries], zigzag.positions(origin)[keys]
    meet, alone = spread.documents_meet(query_pieces, key_pieces)
    # Both grow: the nearest pair is the first query and the last key, the farthest the other two.
    if not meet or 0 < window <= int(query[0] - key[-1]):
        return None
    cut = 0 < window <= int(query[-1] - key[0])
    if alone and not cut:
        return Block(queries, keys, origin == rank, None)
    query, key = query.to(device), key.to(device)
    of_queries = of_keys = None
    if not alone:
        assert spread.documents is not None
        of_queries = zigzag.take(spread.documents, rank)[:, queries]
        of_keys = zigzag.take(spread.documents, origin)[:, keys]

    def hidden(rows: slice) -> Tensor:
        found = (key > query[rows, None])[None, None]  # (1, 1, S, T)
        if cut:
            found = found | (key <= query[rows, None] - window)
        if of_queries is not None and of_keys is not None:
            found = found | (of_queries[:, None, rows, None] != of_keys[:, None, None, :])
        return found

    return Block(queries, keys, False, hidden)


class _Parcel(NamedTuple):
    """A rank's keys and values, or their gradients, as one flat tensor."""

    key: tuple[int, ...]  # (B, K, D): all but the positions
    value: tuple[int, ...]  # (B, K, E)

    @staticmethod
    def of(k: Tensor, v: Tensor) -> "_Parcel":
        return _Parcel((*k.shape[:2], k.shape[3]), (*v.shape[:2], v.shape[3]))

    @staticmethod
    def pack(k: Tensor, v: Tensor) -> Tensor:
        return torch.cat((k.reshape(-1), v.reshape(-1)))

    def shapes(self, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (*self.key[:2], count, self.key[2]), (*self.value[:2], count, self.value[2])

    def numel(self, count: int) -> int:
        key, value = (torch.Size(shape).numel() for shape in self.shapes(count))
        return key + value

    def open(self, flat: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Keys and values of `count` positions as views of a flat tensor."""
        key, value = self.shapes(count)
        middle = torch.Size(key).numel()
        return flat[:middle].view(key), flat[middle:].view(value)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, axis: Axis, spread: Spread, window: int, scale: float
    ) -> Tensor:
        count, parcel = spread.zigzag.count, _Parcel.of(k, v)
        kept = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros(*q.shape[:3], v.shape[3], dtype=kept, device=q.device)
        total = torch.zeros(q.shape[:3], dtype=kept, device=q.device)
        held = parcel.pack(k, v)
        for step in range(axis.size):
            origin = (axis.rank - step) % axis.size
            moving = None
            if step < axis.size - 1:
                moving = Shift(axis, held, parcel.numel(count((origin - 1) % axis.size)), tag=0)
            block = block_of(spread, axis.rank, origin, window, q.device) if len(q) else None
            if block is not None:
                keys, values = (t[:, :, block.keys] for t in parcel.open(held, count(origin)))
                part = block_attention.forward(q[:, :, block.queries], keys, values, scale, block.causal, block.hidden)
                if step == 0:  # of all queries, each of which sees itself at least
                    out, total = part[0].to(kept), part[1]
                else:
                    block_attention.merge(out[:, :, block.queries], total[:, :, block.queries], *part)
            if moving is not None:
                held = moving.wait()
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, total)
        ctx.settings = axis, spread, window, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, total = ctx.saved_tensors
        axis, spread, window, scale = ctx.settings
        count, parcel = spread.zigzag.count, _Parcel.of(k, v)
        dq = torch.zeros(q.shape, dtype=total.dtype, device=q.device)
        held = parcel.pack(k, v)
        mine: Tensor | None = None  # the gradients of this rank's own keys and values
        coming: Shift | None = None  # what ranks before this one have found for the keys and values at hand
        for step in range(axis.size):
            origin = (axis.rank - step) % axis.size
            before = (origin - 1) % axis.size
            moving = Shift(axis, held, parcel.numel(count(before)), tag=0) if step < axis.size - 1 else None
            found = held.new_zeros(held.shape, dtype=total.dtype)
            block = block_of(spread, axis.rank, origin, window, q.device) if len(q) else None
            if block is not None:
                rows = (slice(None), slice(None), block.queries)
                keys, values = (t[:, :, block.keys] for t in parcel.open(held, count(origin)))
                parts = block_attention.backward(
                    grad[rows], q[rows], keys, values, out[rows], total[rows], scale, block.causal, block.hidden
                )
                if step == 0:
                    dq = parts[0].to(total.dtype)
                else:
                    dq[rows] += parts[0]
                for whole, part in zip(parcel.open(found, count(origin)), parts[1:], strict=True):
                    whole[:, :, block.keys] = part
            if step == 0:
                mine = found
            else:
                if coming is not None:
                    found += coming.wait()
                coming = Shift(axis, found, parcel.numel(count(before)), tag=1)
            if moving is not None:
                held = moving.wait()
        assert mine is not None
        if coming is not None:
            mine += coming.wait()
        dk, dv = parcel.open(mine, k.shape[2])
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: Axis,
    spread: Spread,
    window: int = 0,
    scale: float | None = None,
) -> Tensor:
    """Causal attention over a sequence that lies on the ranks of an axis. Collective over the axis.

    Args:
        q: (B, N, S of this rank, D).
        k, v: (B, K, S of this rank, D) and (B, K, S of this rank, E); K divides N.
        axis: the ranks.
        spread: how the sequence lies on them, and its documents.
        window: positions that a query sees, its own included; 0: all before it.
        scale: of the scores; by default 1 / sqrt(D).

    Returns:
        (B, N, S of this rank, E).
    """
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return apply(_RingAttention, q, k, v, axis, spread, window, factor)


class RingAttention(nn.Module):
    """Stands in for a module that computes causal attention (q, k, v, documents) -> y.

    Args:
        axis: the ranks that the sequence lies on.
        spread_of: this rank's part of the documents, or None -> how those sequences lie on the ranks.
        window, scale: as for `ring_attention`.
    """

    def __init__(
        self, axis: Axis, spread_of: Callable[[Tensor | None], Spread], window: int = 0, scale: float | None = None
    ) -> None:
        super().__init__()
        self.axis = axis
        self.window = window
        self.scale = scale
        self._spread_of = spread_of

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        """Causal attention of this rank's queries to all ranks' keys.

        Args:
            q, k, v: (B, N, S of this rank, D), (B, K, S of this rank, D) twice.
            documents: this rank's part of the batch's documents.

        Raises:
            ValueError: the lengths are not those of this rank's part, or the documents are not the batch's.
        """
        spread = self._spread_of(documents)
        check_lengths(spread, self.axis, q, k)
        return ring_attention(q, k, v, self.axis, spread, self.window, self.scale)
