"""Losses as sums over targets.

A step divides the sum exactly once, by the number of targets of the whole global batch, whatever the microbatches, ranks, stages
or padding (a mean of means is wrong as soon as the counts differ).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100


def count_targets(targets: Tensor) -> Tensor:
    """Targets that count: for integer targets those that are not -100, for others the rows. Returns a 0-dim int64 tensor."""
    if targets.is_floating_point() or targets.dtype == torch.bool:
        return torch.tensor(targets.shape[0], device=targets.device)
    return (targets != IGNORED).sum()


@dataclass(frozen=True)
class Loss:
    """A loss that is a sum over targets.

    Args:
        sum: (output of the model, targets) -> 0-dim tensor, the loss summed over the targets that count.
        count: targets -> 0-dim integer tensor, how many targets count.
    """

    sum: Callable[[Any, Any], Tensor]
    count: Callable[[Any], Tensor] = count_targets


def _cross_entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    flat = logits.reshape(-1, logits.shape[-1]).to(dtype)
    return F.cross_entropy(flat, targets.reshape(-1), ignore_index=IGNORED, reduction="sum")


cross_entropy = Loss(_cross_entropy_sum)
"""Next-token cross-entropy: logits (B, S, V) and targets (B, S) int64 with -100 where a position does not count; at least float32."""


def as_loss(loss: Loss | Callable[[Any, Any], Tensor]) -> Loss:
    """A `Loss`, or a plain function that sums over targets, as a `Loss`."""
    return loss if isinstance(loss, Loss) else Loss(loss)
