"""Whole parameters as fragments of one rank, beside an independent implementation."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardwise.optimizers import Optimizer
from shardwise.optimizers.optimizer import Fragment


def fragment_of(optimizer: Optimizer, parameter: Tensor, gradient: Tensor, decay: bool) -> Fragment:
    """A whole parameter as one fragment, with its state."""
    found = Fragment(
        "p",
        tuple(parameter.shape),
        0,
        parameter.numel(),
        parameter.view(-1),
        gradient.view(-1),
        decay,
        None,
        parameter.shape,
    )
    found.state = optimizer.state(found)
    return found


def run(optimizer: Optimizer, fragments: list[Fragment], step: int, lr: float, scale: float = 1.0) -> None:
    """One update on one rank: sums over ranks are of one rank's values."""
    for _ in optimizer.update(fragments, lr=lr, step=step, scale=scale):
        pass


def compare(
    optimizer: Optimizer, dtype: torch.dtype, scales: Sequence[float], lrs: Sequence[float], tolerance: float
) -> None:
    """Some updates of a matrix with decay and a vector without, beside the reference implementation."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((5, 7), (11,))]
    own = [value.to(dtype) for value in values]
    gradients = [torch.zeros_like(value) for value in own]
    fragments = [fragment_of(optimizer, p, g, p.ndim > 1) for p, g in zip(own, gradients, strict=True)]
    plain = [nn.Parameter(value.clone()) for value in values]
    reference = optimizer.reference([plain[0]], [plain[1]])
    for step, (scale, lr) in enumerate(zip(scales, lrs, strict=True)):
        for p, g in zip(plain, gradients, strict=True):
            drawn = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            g.copy_(drawn)
            p.grad = drawn * scale
        for group in reference.param_groups:
            group["lr"] = lr
        run(optimizer, fragments, step + 1, lr, scale)
        reference.step()
        for mine, theirs, gradient in zip(own, plain, gradients, strict=True):
            torch.testing.assert_close(mine.double(), theirs.detach(), rtol=tolerance, atol=tolerance)
            assert theirs.grad is not None
            # The gradient ends multiplied by the factor that clips it.
            torch.testing.assert_close(gradient.double(), theirs.grad, rtol=tolerance, atol=tolerance)
