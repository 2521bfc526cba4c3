"""An embedding table divided over the vocabulary (arXiv 1909.08053, section 3): every rank looks up what it holds, and
the rest is zero.

Ranks that do not divide the vocabulary hold one row more or less, so nothing is padded.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardwise.functions import apply
from shardwise.layout import share
from shardwise.tensor_parallel.region import Landing, Region, rows_of


class Table:
    """A divided embedding.

    Args:
        region: the tensor axis.
        module: an `nn.Embedding` whose weight holds this rank's rows of the table.
        num_rows: rows of the whole table.
        whole: whether every rank gets whole sequences even where the stream is split later on.
    """

    def __init__(self, region: Region, module: nn.Embedding, num_rows: int, whole: bool = False) -> None:
        self.region = region
        self.divides = region.sequence and not whole
        self.landing = Landing(module)
        self.num_rows = num_rows
        self.padding = module.padding_idx
        self.start, self.stop = share(num_rows, region.axis.rank, region.axis.size)

    def __call__(self, index: Tensor) -> Tensor:
        """(B, S) indices -> (B, S, H), or this rank's share of the sequence.

        Raises:
            IndexError: an index is outside the table (looked at on the CPU only).
        """
        if index.device.type == "cpu" and index.numel() and (int(index.min()) < 0 or int(index.max()) >= self.num_rows):
            raise IndexError(
                f"index out of range in an embedding of {self.num_rows} rows: {int(index.min())} to {int(index.max())}"
            )
        weight = self.landing.parameter("weight")
        assert weight is not None
        if torch.is_grad_enabled():
            return apply(_Lookup, index, weight, self)
        return _look_up(index, weight, self)


def _look_up(index: Tensor, weight: Tensor, table: Table) -> Tensor:
    buffer = table.region.exchange.buffer((*index.shape, weight.shape[1]), weight)
    flat = buffer.view(-1, weight.shape[1])
    if weight.shape[0]:
        rows = (index - table.start).reshape(-1)
        outside = (rows < 0) | (rows >= weight.shape[0])
        torch.index_select(weight.detach(), 0, rows.clamp(0, weight.shape[0] - 1), out=flat)
        flat.masked_fill_(outside.unsqueeze(1), 0)
    else:
        flat.zero_()
    return table.region.exchange.start_sum(buffer, table.region.scatter if table.divides else None)()


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, index: Tensor, weight: Tensor, table: Table) -> Tensor:
        ctx.save_for_backward(index)
        ctx.table, ctx.length, ctx.rows = table, table.region.length, weight.shape[0]
        return _look_up(index, weight, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        table: Table = ctx.table
        region, slot = table.region, table.landing.direct("weight")
        if slot is None and not ctx.needs_input_grad[1]:
            return None, None, None
        flat = rows_of(region.gather(grad, ctx.length) if table.divides else grad)
        index = index.reshape(-1)
        inside = (index >= table.start) & (index < table.stop)
        if table.padding is not None:
            inside &= index != table.padding
        rows, values = index[inside] - table.start, flat[inside]
        if slot is not None:
            table.landing.tape.run(lambda: slot.add_rows(rows, values), rows, values)
            return None, None, None
        return None, flat.new_zeros(ctx.rows, flat.shape[1]).index_add_(0, rows, values), None
