"""Stochastic gradient descent with momentum (Sutskever et al., ICML 2013, in torch's convention)."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from shardwise.optimizers.optimizer import Fragment, Sum


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

    elementwise: ClassVar[bool] = True
    factored: ClassVar[Mapping[str, tuple[int, ...]]] = {}

    def state(self, fragment: Fragment) -> dict[str, Tensor]:
        return {"velocity": torch.zeros_like(fragment.parameter)} if self.momentum else {}

    def update(self, fragments: list[Fragment], *, lr: float, step: int, scale: float) -> Iterator[list[Sum]]:
        for fragment in fragments:
            gradient = fragment.gradient
            if scale != 1.0:
                gradient.mul_(scale)
            direction = gradient
            if fragment.decay and self.weight_decay:
                direction = gradient.add(fragment.parameter, alpha=self.weight_decay)
            if self.momentum:
                velocity = fragment.state["velocity"].mul_(self.momentum).add_(direction)
                direction = direction.add(velocity, alpha=self.momentum) if self.nesterov else velocity
            fragment.parameter.add_(direction, alpha=-lr)
        yield from ()

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
