"""Adam with decoupled weight decay (Kingma and Ba, arXiv 1412.6980; Loshchilov and Hutter, arXiv 1711.05101)."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from shardwise.optimizers.optimizer import Fragment, Sum


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

    elementwise: ClassVar[bool] = True
    factored: ClassVar[Mapping[str, tuple[int, ...]]] = {}

    def state(self, fragment: Fragment) -> dict[str, Tensor]:
        return {name: torch.zeros_like(fragment.parameter) for name in ("first_moment", "second_moment")}

    def update(self, fragments: list[Fragment], *, lr: float, step: int, scale: float) -> Iterator[list[Sum]]:
        for decay in (True, False):
            chosen = [fragment for fragment in fragments if fragment.decay == decay and fragment.stop > fragment.start]
            if chosen:
                self._apply(chosen, self.weight_decay if decay else 0.0, lr, step, scale)
        yield from ()

    def _apply(self, fragments: list[Fragment], weight_decay: float, lr: float, step: int, scale: float) -> None:
        first = fragments[0].parameter
        if scale != 1.0 and first.dtype == torch.float64:
            torch._foreach_mul_([fragment.gradient for fragment in fragments], scale)
            scale = 1.0
        torch._fused_adamw_(
            [fragment.parameter for fragment in fragments],
            [fragment.gradient for fragment in fragments],
            [fragment.state["first_moment"] for fragment in fragments],
            [fragment.state["second_moment"] for fragment in fragments],
            [],
            [torch.tensor(float(step), device=first.device)] * len(fragments),
            lr=lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=None if scale == 1.0 else torch.tensor(1.0 / scale, device=first.device, dtype=torch.float32),
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
