"""A loss scale for every residual block (Ramesh et al., arXiv 2102.12092, appendix D.1).

What flows along the identity path of a residual network shrinks and grows with depth beyond what one scale can bring
into fp16's range. Here that path is float32 and not scaled. A gradient is multiplied by its block's scale where it
enters one of the block's branches, from behind, and divided by it where it leaves; values that are not finite end
there. The gradients of the block's parameters keep the scale until their update, and a block whose gradients are not
finite is left out of the step by itself. What is outside of blocks, the embedding and the head, has one scale together.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardwise.pipeline_parallel.stages import Part, parts_of

# Times the number of data-parallel ranks. Multiplied by GROWTH after a clean step, divided by BACKOFF after one that
# overflowed, unless that has been done less than PAUSE steps ago.
FIRST, SMALLEST, LARGEST = 2.0**13, 2.0**7, 2.0**24
GROWTH, BACKOFF, PAUSE = 2 ** (1 / 1000), 2**0.5, 125


class BlockScales:
    """The scales of all blocks of a model, the same on all ranks.

    Args:
        num: how many there are; number 0 is that of everything outside of blocks.
        num_ranks: data-parallel ranks, each of which has its part of a gradient.

    Attributes:
        state: (num, 2) float64, scale and steps since it was last divided, for checkpoints.
    """

    def __init__(self, num: int, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.state = torch.tensor([[FIRST * num_ranks, float(PAUSE)]] * num, dtype=torch.float64)
        self._stuck = 0

    @property
    def value(self) -> float:
        """That of the loss: number 0."""
        return self[0]

    def __getitem__(self, number: int) -> float:
        return float(self.state[number, 0])

    def count(self, overflowed: Tensor) -> None:
        """Take note of a step.

        Args:
            overflowed: (num,) bool.

        Raises:
            RuntimeError: every block overflows, for the second time in a row, with the smallest scale.
        """
        scale, since = self.state[:, 0], self.state[:, 1] + 1
        least, most = SMALLEST * self.num_ranks, LARGEST * self.num_ranks
        self._stuck = self._stuck + 1 if bool((overflowed & (scale <= least)).all()) else 0
        if self._stuck > 1:
            raise RuntimeError(
                f"the gradients of every block overflow fp16 even with the smallest loss scale, {least:g}, so every "
                'step is skipped; set plan.precision = "bf16" or "fp32", or lower optimizer.lr'
            )
        divided = overflowed & (since >= PAUSE)
        grown = torch.where(overflowed, scale, scale * GROWTH)
        self.state[:, 0] = torch.where(divided, scale / BACKOFF, grown).clamp(least, most)
        self.state[:, 1] = torch.where(divided, 0.0, since)


class _Enter(torch.autograd.Function):
    """Where the stream enters a branch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, scales: BlockScales, number: int) -> Tensor:
        ctx.scales, ctx.number = scales, number
        return x.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        found = grad.float().div_(ctx.scales[ctx.number])
        return found.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0), None, None, None


class _Leave(torch.autograd.Function):
    """Where a branch is added to the stream."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scales: BlockScales, number: int) -> Tensor:
        ctx.scales, ctx.number, ctx.dtype = scales, number, x.dtype
        return x.float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (grad * ctx.scales[ctx.number]).to(ctx.dtype), None, None


def check(model: nn.Module) -> None:
    """See that `apply` knows where the model's residual blocks begin and end.

    Raises:
        ValueError: it does not.
    """
    _blocks(model)


def _blocks(model: nn.Module) -> list[Part]:
    mend = 'or set plan.loss_scaling to "dynamic"'
    try:
        parts = parts_of(model)
    except ValueError as error:
        raise ValueError(
            f"the model's blocks are not known ({str(error).removeprefix('plan.pipeline: ').partition('; ')[0]}); give "
            f"it an attribute `stages`, {mend}"
        ) from None
    blocks = [part.block for part in parts]
    first = blocks.index(True) if True in blocks else len(blocks)
    last = len(blocks) - blocks[::-1].index(True) if True in blocks else 0
    if first == 0 or last == len(blocks) or not all(blocks[first:last]):
        raise ValueError(
            f"its residual blocks must stand between an embedding and a head; list them so in `stages`, {mend}"
        )
    for part in parts[first:last]:
        branches = _branches(part)
        if not branches or any(part.module._modules.get(name) is None for pair in branches for name in pair):
            raise ValueError(
                f"block {part.path!r} ({type(part.module).__name__}) does not say where its residual branches begin "
                'and end; give it an attribute `branches`, such as (("attention_norm", "attention"), '
                f'("feed_forward_norm", "feed_forward")), {mend}'
            )
    return parts


def _tensor(module: nn.Module, *found: Any) -> Tensor:
    if len(found) != 1 or not isinstance(found[0], Tensor):
        raise ValueError(
            f"{type(module).__name__} at the edge of a residual branch takes or returns other than one tensor, and a "
            'loss scale for each block is for tensors; set plan.loss_scaling to "dynamic"'
        )
    return found[0]


def _branches(part: Part) -> Sequence[tuple[str, str]]:
    found: Any = getattr(part.module, "branches", ())
    return found if isinstance(found, Sequence) else ()


def apply(model: nn.Module, dtype: torch.dtype, num_ranks: int) -> tuple[BlockScales, dict[int, int]]:
    """Hook the branches of a model's residual blocks, and what is before and behind the blocks.

    Args:
        dtype: that branches compute in.
        num_ranks: data-parallel ranks.

    Returns:
        the scales, and by id of parameter the number of its own (0 where there is none).
    """
    enter: Callable[..., Tensor] = _Enter.apply
    leave: Callable[..., Tensor] = _Leave.apply
    parts = _blocks(model)
    blocks = [part for part in parts if part.block]
    scales = BlockScales(1 + len(blocks), num_ranks)

    def hook(first: nn.Module | None, last: nn.Module | None, number: int) -> None:
        if first is not None:
            first.register_forward_pre_hook(
                lambda module, given: (enter(_tensor(module, *given[:1]), dtype, scales, number), *given[1:])
            )
        if last is not None:
            last.register_forward_hook(lambda module, given, output: leave(_tensor(module, output), scales, number))

    where = parts.index(blocks[0])
    hook(None, parts[where - 1].module, 0)
    hook(parts[where + len(blocks)].module, None, 0)
    of: dict[int, int] = {}
    for number, part in enumerate(blocks, 1):
        for first, last in _branches(part):
            hook(part.module.get_submodule(first), part.module.get_submodule(last), number)
        of.update((id(parameter), number) for parameter in part.module.parameters())
    return scales, of
