"""Batches: (inputs, targets), where inputs are a dict of keyword tensors, a tensor, or a tuple of tensors; dim 0 of all
is the row."""

from typing import Any

import torch
from torch import Tensor

from shardwise.layout import share

Batch = tuple[Any, Any]


def _map(batch: Any, function: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, batch)


def tensors(batch: Any) -> list[Tensor]:
    """All tensors of a batch, or of a part of one."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]


def microbatch(batch: Batch, index: int, num_microbatches: int) -> Batch:
    """Rows `share(B, index, m)` of a batch (inputs, targets) of B rows."""
    return rows(batch, *share(num_rows(batch), index, num_microbatches))


def rows(batch: Batch, start: int, stop: int) -> Batch:
    """Rows `start` to `stop` of every tensor of a batch."""
    inputs, targets = _map(batch, lambda leaf: leaf[start:stop])
    return inputs, targets


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with every tensor on `device`."""
    inputs, targets = _map(batch, lambda leaf: leaf.to(device, non_blocking=True))
    return inputs, targets


def in_precision(batch: Batch, dtype: torch.dtype) -> Batch:
    """The batch with every floating-point tensor in `dtype`."""
    inputs, targets = _map(batch, lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf)
    return inputs, targets


def signature(inputs: Any) -> tuple[Any, ...]:
    """What the shapes between pipeline stages may depend on: the shapes of a microbatch's inputs, which every rank
    knows."""
    return tuple(tuple(leaf.shape) for leaf in tensors(inputs))


def num_rows(batch: Batch) -> int:
    """How many rows the tensors of a batch have.

    Raises:
        ValueError: they differ.
    """
    lengths = {leaf.shape[0] for leaf in tensors(batch)}
    if len(lengths) != 1:
        raise ValueError(
            f"the tensors of a batch must have the same number of rows (dim 0), not {sorted(lengths)}; correct the "
            "batch"
        )
    return int(lengths.pop())
