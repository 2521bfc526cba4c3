"""Lion (Chen et al., arXiv 2302.06675, algorithm 2)."""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from shardwise.optimizers import reference
from shardwise.optimizers.adamw import check_betas
from shardwise.optimizers.optimizer import Fragment, Overrides, Parameters, Sum, alike


@dataclass(frozen=True)
class Lion:
    """Steps of one size: the sign of the momentum mixed with the gradient.

    Args:
        lr: learning rate; the paper advises a third to a tenth of AdamW's.
        betas: share of the momentum in the step's direction, and its decay rate.
        weight_decay: multiplied by lr, so as many times larger than AdamW's as lr is smaller; on matrices only.
        overrides: by pattern of parameter names.

    State: one momentum, 4 bytes a parameter in float32.

    Raises:
        ValueError: a beta outside [0, 1).
    """

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.3
    overrides: Overrides = field(default_factory=dict)

    elementwise: ClassVar[bool] = True
    factored: ClassVar[Mapping[str, tuple[int, ...]]] = {}

    def __post_init__(self) -> None:
        check_betas(self.betas)

    def state(self, fragment: Fragment) -> dict[str, Tensor]:
        return {"momentum": torch.zeros_like(fragment.parameter)}

    def update(self, fragments: list[Fragment], *, lr: float | Tensor, step: int, scale: float) -> Iterator[list[Sum]]:
        for (lr_scale, decay), chosen in alike(fragments, self.weight_decay).items():
            rate = float(lr) * lr_scale
            for fragment in chosen:
                gradient, momentum = fragment.gradient, fragment.state["momentum"]
                if scale != 1.0:
                    gradient.mul_(scale)
                direction = torch.lerp(momentum, gradient, 1 - self.betas[0]).sign_()
                momentum.lerp_(gradient, 1 - self.betas[1])
                if decay:
                    fragment.parameter.mul_(1 - rate * decay)
                fragment.parameter.add_(direction, alpha=-rate)
        yield from ()

    def reference(self, decayed: Parameters, others: Parameters) -> torch.optim.Optimizer:
        rule = functools.partial(reference.lion, betas=self.betas)
        return reference.Plain(reference.groups(self, self.weight_decay, decayed, others), rule)
