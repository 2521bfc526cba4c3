"""Adam with decoupled weight decay (Kingma and Ba, arXiv 1412.6980; Loshchilov and Hutter, arXiv 1711.05101)."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay, in torch's fused kernel over a whole flat piece.

    Args:
        lr: learning rate.
        betas: decay rates of the first and second moments.
        eps: added to the root of the second moment.
        weight_decay: multiplied by lr; applied to matrices, not to biases, norms and other vectors.

    State: two moments, 8 bytes a parameter in float32.
    """

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1

    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        return {"first_moment": torch.zeros_like(parameter), "second_moment": torch.zeros_like(parameter)}

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
        device = parameter.device
        if scale != 1.0 and parameter.dtype == torch.float64:
            # The kernel takes its divisor in float32 only.
            gradient.mul_(scale)
            scale = 1.0
        torch._fused_adamw_(
            [parameter],
            [gradient],
            [state["first_moment"]],
            [state["second_moment"]],
            [],
            [torch.tensor(float(step), device=device)],
            lr=lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=self.weight_decay if decay else 0.0,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
            # The kernel divides by this and stores the quotient as the gradient.
            grad_scale=None if scale == 1.0 else torch.tensor(1.0 / scale, device=device, dtype=torch.float32),
            found_inf=None,
        )

    def reference(self, decayed: Iterable[nn.Parameter], others: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [
            {"params": list(decayed), "weight_decay": self.weight_decay},
            {"params": list(others), "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=self.lr, betas=self.betas, eps=self.eps, foreach=False
        )
