"""Adam with decoupled weight decay (Kingma and Ba, arXiv 1412.6980; Loshchilov and Hutter, arXiv 1711.05101)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from shardwise.optimizers.optimizer import Fragment, Overrides, Parameters, Sum, alike
from shardwise.optimizers.reference import groups


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay, in torch's fused kernel over a whole flat piece.

    Args:
        lr: learning rate.
        betas: decay rates of the first and second moments.
        eps: added to the root of the second moment.
        weight_decay: multiplied by lr; applied to matrices, not to biases, norms and other vectors.
        overrides: by pattern of parameter names.

    State: two moments, 8 bytes a parameter in float32.

    Raises:
        ValueError: a beta outside [0, 1).
    """

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    overrides: Overrides = field(default_factory=dict)

    elementwise: ClassVar[bool] = True
    factored: ClassVar[Mapping[str, tuple[int, ...]]] = {}

    def __post_init__(self) -> None:
        check_betas(self.betas)

    def state(self, fragment: Fragment) -> dict[str, Tensor]:
        return {name: torch.zeros_like(fragment.parameter) for name in ("first_moment", "second_moment")}

    def update(self, fragments: list[Fragment], *, lr: float | Tensor, step: int, scale: float) -> Iterator[list[Sum]]:
        for (lr_scale, decay), chosen in alike(fragments, self.weight_decay).items():
            apply(
                [fragment.parameter for fragment in chosen],
                [fragment.gradient for fragment in chosen],
                [fragment.state["first_moment"] for fragment in chosen],
                [fragment.state["second_moment"] for fragment in chosen],
                Settings(lr=float(lr) * lr_scale, betas=self.betas, eps=self.eps, weight_decay=decay),
                step,
                scale,
            )
        yield from ()

    def reference(self, decayed: Parameters, others: Parameters) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            groups(self, self.weight_decay, decayed, others), betas=self.betas, eps=self.eps, foreach=False
        )


def check_betas(betas: tuple[float, float]) -> None:
    for value in betas:
        if not 0 <= value < 1:
            raise ValueError(
                f"optimizer.betas = {list(betas)} is out of range; give each at least 0 and below 1, as in [0.9, 0.95]"
            )


class Settings(NamedTuple):
    """Of one group of parameters."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


def apply(
    parameters: list[Tensor],
    gradients: list[Tensor],
    first_moments: list[Tensor],
    second_moments: list[Tensor],
    settings: Settings,
    step: int,
    scale: float,
) -> None:
    """One step in place on lists of tensors of one dtype and device; the gradients end multiplied by `scale`."""
    device = parameters[0].device
    if scale != 1.0 and parameters[0].dtype == torch.float64:
        # The kernel takes its divisor in float32 only.
        torch._foreach_mul_(gradients, scale)
        scale = 1.0
    torch._fused_adamw_(
        parameters,
        gradients,
        first_moments,
        second_moments,
        [],
        [torch.tensor(float(step), device=device)] * len(parameters),
        lr=settings.lr,
        beta1=settings.betas[0],
        beta2=settings.betas[1],
        weight_decay=settings.weight_decay,
        eps=settings.eps,
        amsgrad=False,
        maximize=False,
        # The kernel divides by this and stores the quotient as the gradient.
        grad_scale=None if scale == 1.0 else torch.tensor(1.0 / scale, device=device, dtype=torch.float32),
        found_inf=None,
    )
