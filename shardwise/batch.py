"""Batches: (inputs, targets), where inputs are a dict of keyword tensors, a tensor, or a tuple of tensors; dim 0 of all
is the row."""

from typing import Any

import torch
from torch import Tensor

from shardwise.layout import share

Batch = tuple[Any, Any]


def require(batch: Any) -> None:
    """
    Raises:
        ValueError: it is no pair of inputs, with a tensor among them, and targets, or a tensor has no rows.
    """
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        what = f"{len(batch)} values" if isinstance(batch, tuple | list) else f"a {type(batch).__name__}"
        raise ValueError(f"a batch is a pair, (inputs, targets), and this is {what}")
    if not tensors(batch[0]):
        raise ValueError(f"the inputs of a batch hold no tensor; they are a {type(batch[0]).__name__}")
    if any(leaf.ndim == 0 for leaf in tensors(batch)):
        raise ValueError("a tensor of a batch has no dimension; give every tensor rows (dim 0)")


def as_count(count: Any) -> Tensor:
    """What a `Loss` has counted, a 0-dim int64 tensor in host memory.

    Raises:
        ValueError: it is no whole number, or less than 0.
    """
    if isinstance(count, int):
        count = torch.tensor(count)
    if not isinstance(count, Tensor) or count.numel() != 1 or count.is_floating_point() or int(count) < 0:
        raise ValueError(f"loss.count has returned {count}; give how many targets count, a whole number of 0 or more")
    return count.detach().reshape(()).to("cpu", torch.int64)


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
