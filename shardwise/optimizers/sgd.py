"""Stochastic gradient descent with momentum (Sutskever et al., ICML 2013, in torch's convention)."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class SGD:
    """Gradient descent, with momentum and Nesterov's look-ahead as options.

    Args:
        lr: learning rate.
        momentum: decay rate of the velocity; 0 keeps none.
        nesterov: step along the velocity the gradient leads to.
        weight_decay: added to the gradient of matrices as weight_decay * parameter.

    State: one velocity, 4 bytes a parameter in float32, none without momentum.

    Raises:
        ValueError: nesterov without momentum.
    """

    lr: float = 0.1
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if self.nesterov and self.momentum == 0:
            raise ValueError(
                "optimizer.nesterov = true looks ahead along the momentum, which is 0: set optimizer.momentum, 0.9 say"
            )

    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        return {"velocity": torch.zeros_like(parameter)} if self.momentum else {}

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
        if scale != 1.0:
            gradient.mul_(scale)
        direction = gradient
        if decay and self.weight_decay:
            direction = gradient.add(parameter, alpha=self.weight_decay)
        if self.momentum:
            velocity = state["velocity"].mul_(self.momentum).add_(direction)
            direction = direction.add(velocity, alpha=self.momentum) if self.nesterov else velocity
        parameter.add_(direction, alpha=-lr)

    def reference(self, decayed: Iterable[nn.Parameter], others: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [
            {"params": list(decayed), "weight_decay": self.weight_decay},
            {"params": list(others), "weight_decay": 0.0},
        ]
        return torch.optim.SGD(
            [group for group in groups if group["params"]],
            lr=self.lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            foreach=False,
        )
