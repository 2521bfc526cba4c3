"""The optimizers' rules once more, on whole parameters and as plainly as the papers state them: the oracles of
`verify`."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.optimizers import quantization
from shardwise.optimizers.optimizer import Optimizer, Parameters, override_of

State = dict[str, Tensor]


class Plain(torch.optim.Optimizer):
    """A torch optimizer from the rule for one parameter.

    Args:
        groups: from `groups`.
        rule: called as rule(parameter, gradient=, state=, step=, lr=, weight_decay=, name=); changes parameter and
            state in place.
    """

    def __init__(self, groups: list[dict[str, Any]], rule: Callable[..., None]) -> None:
        super().__init__(groups, {})
        self._rule = rule

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                kept = self.state[parameter]
                kept["step"] = kept.get("step", 0) + 1
                self._rule(
                    parameter,
                    gradient=parameter.grad,
                    state=kept.setdefault("moments", {}),
                    step=kept["step"],
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    name=group["name"],
                )


def groups(optimizer: Optimizer, weight_decay: float, decayed: Parameters, others: Parameters) -> list[dict[str, Any]]:
    """A torch optimizer's groups, one for every parameter, each with name, lr and weight_decay.

    Args:
        optimizer: whose lr and overrides hold.
        weight_decay: of `decayed`.
        decayed, others: parameters, or (name, parameter).
    """
    found = []
    for parameters, decay in ((decayed, weight_decay), (others, 0.0)):
        for item in parameters:
            name, parameter = item if isinstance(item, tuple) else ("", item)
            override = override_of(optimizer.overrides, name)
            group = {"params": [parameter], "name": name, "lr": optimizer.lr * override.lr_scale}
            found.append(group | {"weight_decay": decay if override.weight_decay is None else override.weight_decay})
    return found


def adamw(
    parameter: Tensor,
    *,
    gradient: Tensor,
    state: State,
    step: int,
    lr: float,
    weight_decay: float,
    name: str,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """arXiv 1711.05101, algorithm 2."""
    m = state.setdefault("m", torch.zeros_like(parameter))
    v = state.setdefault("v", torch.zeros_like(parameter))
    m.copy_(betas[0] * m + (1 - betas[0]) * gradient)
    v.copy_(betas[1] * v + (1 - betas[1]) * gradient**2)
    corrected_m, corrected_v = m / (1 - betas[0] ** step), v / (1 - betas[1] ** step)
    parameter.sub_(lr * weight_decay * parameter + lr * corrected_m / (corrected_v.sqrt() + eps))


def adamw_8bit(parameter: Tensor, *, state: State, block: int, **settings: Any) -> None:
    """`adamw`, whose moments are rounded to 8 bits after every step, in blocks of `block` elements of the whole
    parameter (0: not at all)."""
    adamw(parameter, state=state, **settings)
    if not block:
        return
    for name, signed in (("m", True), ("v", False)):
        table = quantization.values(signed).to(parameter)
        flat = state[name].view(-1)
        for start in range(0, len(flat), block):
            values = flat[start : start + block]
            largest = values.abs().max()
            if largest < quantization.SMALLEST:
                values.zero_()
                continue
            ratio = values / largest
            nearest = torch.bucketize(ratio, (table[1:] + table[:-1]) / 2)
            # A second moment above zero, which divides, is never rounded to it.
            nearest = nearest if signed else nearest.clamp(min=1).where(ratio > 0, 0)
            values.copy_(table[nearest] * largest)


def lion(
    parameter: Tensor,
    *,
    gradient: Tensor,
    state: State,
    step: int,
    lr: float,
    weight_decay: float,
    name: str,
    betas: tuple[float, float],
) -> None:
    """arXiv 2302.06675, algorithm 2."""
    m = state.setdefault("m", torch.zeros_like(parameter))
    c = betas[0] * m + (1 - betas[0]) * gradient
    parameter.sub_(lr * (torch.sign(c) + weight_decay * parameter))
    m.copy_(betas[1] * m + (1 - betas[1]) * gradient)


def adafactor(
    parameter: Tensor,
    *,
    gradient: Tensor,
    state: State,
    step: int,
    lr: float,
    weight_decay: float,
    name: str,
    relative_step: bool,
    scale_parameter: bool,
    momentum: float,
    decay_rate: float,
    clip_threshold: float,
    eps1: float,
    eps2: float,
) -> None:
    """arXiv 1804.04235, algorithms 4 to 6, with sums over rows and columns as means."""

    def average(key: str, value: Tensor) -> Tensor:
        before = state.setdefault(key, torch.zeros_like(value))
        return before.copy_(beta2 * before + (1 - beta2) * value)

    beta2 = 1 - step**-decay_rate
    rho = min(lr, 1 / math.sqrt(step)) if relative_step else lr
    alpha = max(eps2, float(parameter.square().mean().sqrt())) * rho if scale_parameter else rho
    squared = gradient**2 + eps1
    if parameter.ndim in (2, 3):
        r, c = average("r", squared.mean(-1, keepdim=True)), average("c", squared.mean(-2, keepdim=True))
        v = r @ c / r.mean(-2, keepdim=True)
    else:
        v = average("v", squared)
    u = gradient / v.sqrt()
    u = alpha * u / max(1.0, float(u.square().mean().sqrt()) / clip_threshold)
    if momentum:
        m = state.setdefault("m", torch.zeros_like(parameter))
        u = m.copy_(momentum * m + (1 - momentum) * u)
    parameter.sub_(rho * weight_decay * parameter + u)


def muon(
    parameter: Tensor,
    *,
    gradient: Tensor,
    state: State,
    step: int,
    lr: float,
    weight_decay: float,
    name: str,
    momentum: float,
    nesterov: bool,
    iterations: int,
    coefficients: tuple[float, float, float],
    eps: float,
    adjustment: Callable[[int, int], float],
) -> None:
    """Jordan's "Muon: an optimizer for hidden layers" and arXiv 2502.16982, section 2; a stack (B, N, M) matrix by
    matrix."""
    m = state.setdefault("m", torch.zeros_like(parameter))
    m.copy_(momentum * m + gradient)
    direction = gradient + momentum * m if nesterov else m
    a, b, c = coefficients
    update = []
    for x in direction.reshape(-1, *parameter.shape[-2:]):
        x = x / (x.norm() + eps)
        for _ in range(iterations):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        update.append(x)
    step_size = lr * adjustment(*parameter.shape[-2:])
    parameter.sub_(lr * weight_decay * parameter + step_size * torch.stack(update).view_as(parameter))
