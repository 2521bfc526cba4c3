"""Stochastic gradient descent with momentum (Sutskever et al., ICML 2013, in torch's convention)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from shardwise.optimizers.optimizer import Fragment, Overrides, Parameters, Sum, alike
from shardwise.optimizers.reference import groups


@dataclass(frozen=True)
class SGD:
    """Gradient descent, with momentum and Nesterov's look-ahead as options.

    Args:
        lr: learning rate.
        momentum: decay rate of the velocity; 0 keeps none.
        nesterov: step along the velocity the gradient leads to.
        weight_decay: added to the gradient of matrices as weight_decay * parameter.
        overrides: by pattern of parameter names.

    State: one velocity, 4 bytes a parameter in float32, none without momentum.

    Raises:
        ValueError: nesterov without momentum.
    """

    lr: float = 0.1
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    overrides: Overrides = field(default_factory=dict)

    elementwise: ClassVar[bool] = True
    factored: ClassVar[Mapping[str, tuple[int, ...]]] = {}

    def __post_init__(self) -> None:
        if self.nesterov and self.momentum == 0:
            raise ValueError(
                "optimizer.nesterov = true looks ahead along the momentum, which is 0; "
                "set optimizer.momentum, to 0.9 say"
            )

    def state(self, fragment: Fragment) -> dict[str, Tensor]:
        return {"velocity": torch.zeros_like(fragment.parameter)} if self.momentum else {}

    def update(self, fragments: list[Fragment], *, lr: float | Tensor, step: int, scale: float) -> Iterator[list[Sum]]:
        for (lr_scale, decay), chosen in alike(fragments, self.weight_decay).items():
            for fragment in chosen:
                gradient = fragment.gradient
                if scale != 1.0:
                    gradient.mul_(scale)
                direction = gradient.add(fragment.parameter, alpha=decay) if decay else gradient
                if self.momentum:
                    velocity = fragment.state["velocity"].mul_(self.momentum).add_(direction)
                    direction = direction.add(velocity, alpha=self.momentum) if self.nesterov else velocity
                fragment.parameter.add_(direction, alpha=-float(lr) * lr_scale)
        yield from ()

    def reference(self, decayed: Parameters, others: Parameters) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            groups(self, self.weight_decay, decayed, others),
            lr=self.lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            foreach=False,
        )
