"""What the sharding engine asks of an optimizer."""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor, nn


class Optimizer(Protocol):
    """An optimizer as settings and functions: its state belongs to the engine, which places, divides and saves it."""

    @property
    def lr(self) -> float: ...

    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Fresh state for a flat piece of parameters (N,): moments by name, each (N,)."""

    def update(
        self,
        parameter: Tensor,
        gradient: Tensor,
        state: dict[str, Tensor],
        *,
        lr: float,
        step: int,
        decay: bool,
        scale: float,
    ) -> None:
        """Apply one step in place to a flat piece (N,).

        Args:
            parameter, gradient: (N,); the gradient may be overwritten, and ends multiplied by `scale`.
            state: from `state`, updated in place.
            lr: this step's learning rate.
            step: 1 for the first update.
            decay: whether weight decay applies to this piece.
            scale: a factor on the gradient (clipping).
        """

    def reference(self, decayed: Iterable[nn.Parameter], others: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The same rule from an independent implementation, on whole parameters in one process: the oracle of
        `verify`."""
