"""Losses as sums over targets.

A step divides the sum exactly once, by the number of targets of the whole global batch, whatever the microbatches,
ranks, stages or padding (a mean of means is wrong as soon as the counts differ).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.functions import apply

IGNORED = -100


def count_targets(targets: Tensor) -> Tensor:
    """Targets that count: for integer targets those that are not -100, for others the rows. Returns a 0-dim int64
    tensor.

    Raises:
        ValueError: they are no tensor.
    """
    if not isinstance(targets, Tensor):
        raise ValueError(
            f"targets are a {type(targets).__name__}, of which nobody knows how many count; give a tensor, or "
            "shardwise.Loss(sum, count)"
        )
    if targets.is_floating_point() or targets.dtype == torch.bool:
        return torch.tensor(targets.shape[0], device=targets.device)
    return (targets != IGNORED).sum()


@dataclass(frozen=True)
class CrossEntropy:
    """The terms of a cross-entropy.

    Args:
        label_smoothing: the share of the target's weight that is spread over the whole vocabulary (arXiv 1512.00567,
            section 7).
        z_loss: times the squared logarithm of the softmax's denominator (PaLM, arXiv 2204.02311, section 5).
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def sum(self, output: Any, targets: Tensor) -> Tensor:
        """The loss summed over targets.

        Args:
            output: logits (B, S, V), or an object that has them as `logits`, as Hugging Face models return.
            targets: (B, S) int64, -100 where a position does not count.
        """
        logits = logits_of(output)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        flat, targets = logits.reshape(-1, logits.shape[-1]).to(dtype), targets.reshape(-1)
        if flat.device.type == "cpu" and not self.label_smoothing:
            loss: Tensor = apply(_SummedLoss, flat, targets)
        else:
            loss = F.cross_entropy(
                flat, targets, ignore_index=IGNORED, reduction="sum", label_smoothing=self.label_smoothing
            )
        if self.z_loss:
            loss = loss + self.z_loss * flat.logsumexp(-1).square()[targets != IGNORED].sum()
        return loss


# Logits looked at together: small enough for a cache, large enough that the calls cost nothing beside the work.
_CHUNK_ELEMENTS = 1 << 18


class _SummedLoss(torch.autograd.Function):
    """Cross-entropy whose gradient is computed in the memory of its log-probabilities, chunk by chunk; torch's own
    fills two further tensors of that size."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        """(N, V), (N) -> 0-dim."""
        log_probabilities = logits.log_softmax(1)
        counted = targets != IGNORED
        index = torch.where(counted, targets, 0)
        if index.numel() and (int(index.min()) < 0 or int(index.max()) >= logits.shape[1]):
            raise IndexError(f"a target lies outside the {logits.shape[1]} tokens of the vocabulary")
        ctx.save_for_backward(log_probabilities, counted, index)
        picked = log_probabilities.gather(1, index.unsqueeze(1)).squeeze(1)
        return torch.where(counted, -picked, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        gradient, counted, index = ctx.saved_tensors
        scale = torch.where(counted, grad, 0).unsqueeze(1)  # (N, 1)
        rows = max(1, _CHUNK_ELEMENTS // max(1, gradient.shape[1]))
        for low in range(0, gradient.shape[0], rows):
            factor = scale[low : low + rows]
            part = gradient[low : low + rows].exp_().mul_(factor)
            part.scatter_add_(1, index[low : low + rows].unsqueeze(1), -factor)
        return gradient, None


def logits_of(output: Any) -> Tensor:
    """What a model returned as a tensor: itself, or its `logits`."""
    found = getattr(output, "logits", output)
    assert isinstance(found, Tensor), type(found)
    return found


@dataclass(frozen=True)
class Loss:
    """A loss that is a sum over targets.

    Args:
        sum: (output of the model, targets) -> 0-dim tensor, the loss summed over the targets that count.
        count: targets -> 0-dim integer tensor, how many targets count.
        terms: set if `sum` is a cross-entropy of these terms, which can be computed from divided logits as well.
    """

    sum: Callable[[Any, Any], Tensor]
    count: Callable[[Any], Tensor] = count_targets
    terms: CrossEntropy | None = None


def cross_entropy_with(label_smoothing: float = 0.0, z_loss: float = 0.0) -> Loss:
    """`cross_entropy` with further terms.

    Args:
        label_smoothing: the share of the target's weight that is spread over the whole vocabulary, 0 to 1.
        z_loss: factor of the squared logarithm of the softmax's denominator.

    Raises:
        ValueError: a term is out of its range.
    """
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing = {label_smoothing} is not a share; choose one from 0 to 1")
    if z_loss < 0:
        raise ValueError(f"z_loss = {z_loss} would reward large logits; choose 0 or more")
    terms = CrossEntropy(label_smoothing, z_loss)
    return Loss(terms.sum, terms=terms)


cross_entropy = cross_entropy_with()
"""Next-token cross-entropy: logits (B, S, V) and targets (B, S) int64 with -100 where a position does not count; at
least float32."""


def as_loss(loss: Loss | Callable[[Any, Any], Tensor]) -> Loss:
    """A `Loss`, or a plain function that sums over targets, as a `Loss`.

    Raises:
        ValueError: it is neither.
    """
    if not isinstance(loss, Loss) and (isinstance(loss, type) or not callable(loss)):
        what = f"the class {loss.__name__}" if isinstance(loss, type) else f"a {type(loss).__name__}"
        raise ValueError(
            f"loss is {what}, which cannot be called as one; give shardwise.cross_entropy_with(label_smoothing=..., "
            "z_loss=...), a shardwise.Loss, or a function of (output, targets) that sums over targets"
        )
    return loss if isinstance(loss, Loss) else Loss(loss)
