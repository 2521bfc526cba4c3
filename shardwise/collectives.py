"""Collectives on a named axis, by torch.distributed, and what ranks agree on. Sums between ranks of one machine go
through memory that they share instead: see `host_memory`.
"""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardwise.mesh import Axis

# Elements added up at a time: the sum is still in the second-level cache when it is copied to the peers.
CACHE_ELEMENTS = 1 << 16
# Tensors that go the same way are put together up to this size.
MESSAGE_BYTES = 4 << 20


def all_reduce(tensor: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """Reduce `tensor` in place over `axis`; op is "sum", "max" or "min". Returns the tensor."""
    if axis.size == 1:
        return tensor
    divides = op == "sum" and tensor.is_contiguous() and tensor.numel() % axis.size == 0 and tensor.numel() > 0
    if divides and _variant("all_reduce", tensor, axis) == "divided":
        flat = tensor.view(-1)
        all_gather(reduce_scatter(flat, axis), flat, axis)
    else:
        dist.all_reduce(tensor, _OPS[op], group=axis.group)
    return tensor


def _variant(collective: str, tensor: Tensor, axis: Axis) -> str:
    """How this axis makes a collective of a tensor."""
    backend = "gloo" if tensor.device.type == "cpu" else "nccl"
    return axis.choices.pick(backend, collective, tensor.dtype, tensor.numel() * tensor.element_size())


# Newer torch's names, and what they were called before.
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def all_gather_object(value: Any, axis: Axis) -> list[Any]:
    """Every rank's picklable `value`, by rank along the axis."""
    if axis.size == 1:
        return [value]
    found: list[Any] = [None] * axis.size
    dist.all_gather_object(found, value, group=axis.group)
    return found


def reduce_scatter(flat: Tensor, axis: Axis) -> Tensor:
    """Sum `flat` (N,), N a multiple of the axis, over its ranks; returns this rank's N / size elements, which may be a
    part of `flat`, whose other elements are then of no use."""
    parts = flat.view(axis.size, -1)
    if axis.size == 1:
        return parts[0]
    return _REDUCE_SCATTER[_variant("reduce_scatter", flat, axis)](flat, axis)


def _own_reduce_scatter(flat: Tensor, axis: Axis) -> Tensor:
    out = torch.empty_like(flat.view(axis.size, -1)[0])
    _reduce_scatter_single(out, flat, group=axis.group)
    return out


def _exchange_and_sum(flat: Tensor, axis: Axis) -> Tensor:
    received = torch.empty_like(flat).view(axis.size, -1)
    dist.all_to_all_single(received.view(-1), flat, group=axis.group)
    return received.sum(0)


def _sum_all(flat: Tensor, axis: Axis) -> Tensor:
    dist.all_reduce(flat, group=axis.group)
    return flat.view(axis.size, -1)[axis.rank]


_REDUCE_SCATTER = {"reduce_scatter": _own_reduce_scatter, "all_to_all": _exchange_and_sum, "all_reduce": _sum_all}


def reduce_scatter_in(flat: Tensor, axis: Axis, dtype: torch.dtype) -> Tensor:
    """As `reduce_scatter`, but every rank's part travels in `dtype`; they are added up in `flat`'s."""
    sent = flat.to(dtype)
    received = torch.empty_like(sent)
    if axis.size > 1:
        dist.all_to_all_single(received, sent, group=axis.group)
    else:
        received = sent
    return received.view(axis.size, -1).to(flat.dtype).sum(0)


def all_reduce_in(tensor: Tensor, axis: Axis, dtype: torch.dtype) -> None:
    """Sum `tensor` (N,) in place over `axis`. The ranks' parts, and the sum, travel in `dtype`; they are added up in
    the tensor's."""
    numel = tensor.numel()
    padded = F.pad(tensor, (0, -numel % axis.size))
    whole = torch.empty(padded.shape, dtype=dtype, device=tensor.device)
    all_gather(reduce_scatter_in(padded, axis, dtype).to(dtype), whole, axis)
    tensor.copy_(whole[:numel])


def all_gather(own: Tensor, full: Tensor, axis: Axis) -> None:
    """Fill `full` (N,) with every rank's `own` (N / size,), which may be a part of it."""
    parts = full.view(axis.size, -1)
    if axis.size > 1 and _variant("all_gather", full, axis) == "all_gather":
        _all_gather_single(full, own, group=axis.group)
        return
    if parts[axis.rank].data_ptr() != own.data_ptr():
        parts[axis.rank].copy_(own)
    if axis.size == 1:
        return
    works = [dist.broadcast(parts[r], axis.ranks[r], group=axis.group, async_op=True) for r in range(axis.size)]
    for work in works:
        assert work is not None
        work.wait()


def broadcast(tensor: Tensor, axis: Axis, source: int) -> Tensor:
    """Copy `tensor` from the rank at position `source` along `axis` to all others, in place. Returns the tensor."""
    if axis.size > 1:
        dist.broadcast(tensor, axis.ranks[source], group=axis.group)
    return tensor


def broadcast_all(tensors: Sequence[Tensor], axis: Axis, source: int) -> None:
    """As `broadcast` of each contiguous tensor, in few messages: what is small travels together."""
    together: list[Tensor] = []

    def send() -> None:
        flat = torch.cat([tensor.view(-1).view(torch.uint8) for tensor in together])
        broadcast(flat, axis, source)
        if axis.rank != source:
            for tensor, sent in zip(together, flat.split([tensor.nbytes for tensor in together]), strict=True):
                tensor.view(-1).view(torch.uint8).copy_(sent)
        together.clear()

    if axis.size == 1:
        return
    for tensor in tensors:
        if tensor.nbytes >= MESSAGE_BYTES:
            broadcast(tensor, axis, source)
            continue
        if sum(other.nbytes for other in together) + tensor.nbytes > MESSAGE_BYTES:
            send()
        together.append(tensor)
    if together:
        send()


def broadcast_object(value: Any, axis: Axis, source: int = 0) -> Any:
    """The picklable `value` of the rank at position `source` along `axis`, on every rank."""
    if axis.size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, axis.ranks[source], group=axis.group)
    return box[0]


def sum_of_squares(tensor: Tensor) -> float:
    """The sum of squares of a flat tensor, added up by blocks; the host waits for a device once."""
    block = CACHE_ELEMENTS if tensor.device.type == "cpu" else CACHE_ELEMENTS << 8
    return math.fsum(torch.stack([torch.dot(part, part) for part in torch.split(tensor, block)]).tolist())


def agree(axis: Axis, facts: dict[str, str], mends: Mapping[str, str] = MappingProxyType({})) -> None:
    """Check that all ranks of `axis` hold the same `facts` (name -> fingerprint).

    Args:
        axis: the ranks.
        facts: those of this rank.
        mends: by the beginning of a name, what to do; else "give all ranks the same".

    Raises:
        ValueError: on every rank, naming the first fact that differs and the ranks that differ from the first one.
    """
    everyone = all_gather_object(facts, axis)
    for name in dict.fromkeys(name for other in everyone for name in other):
        values = [other.get(name, "none") for other in everyone]
        odd = [axis.ranks[position] for position, value in enumerate(values) if value != values[0]]
        if odd:
            others = f" (and ranks {', '.join(map(str, odd[1:]))} differ as well)" if odd[1:] else ""
            mend = next((text for start, text in mends.items() if name.startswith(start)), "give all ranks the same")
            raise ValueError(
                f"the ranks do not hold the same {name}: rank {axis.ranks[0]} has {values[0]}, rank {odd[0]} has "
                f"{values[axis.ranks.index(odd[0])]}{others}; {mend}"
            )
