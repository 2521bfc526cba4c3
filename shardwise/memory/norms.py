"""Layer normalisation whose statistics and sums are float32 in every pass.

torch's kernel for CPUs keeps the mean and the reciprocal deviation of a 16-bit input in 16 bits for backward, where
they are off by up to 0.4 %; accelerators' keep them in float32, and so does its RMS normalisation everywhere.
"""

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardwise.functions import apply


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, norm: nn.LayerNorm) -> Tensor:
        shape = list(norm.normalized_shape)
        y, mean, scale = torch.native_layer_norm(x.float(), shape, _wide(weight), _wide(bias), norm.eps)
        ctx.save_for_backward(x, weight, bias, mean, scale)
        ctx.shape = shape
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, scale = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[2]]
        found = torch.ops.aten.native_layer_norm_backward(
            grad.float(), x.float(), ctx.shape, mean, scale, _wide(weight), _wide(bias), wanted
        )
        return *(None if part is None else part.to(x.dtype) for part in found), None


def _wide(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float()


def _forward(self: Any, input: Tensor) -> Tensor:
    if input.dtype not in (torch.bfloat16, torch.float16):
        return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
    if not torch.is_grad_enabled():
        wide = F.layer_norm(input.float(), self.normalized_shape, _wide(self.weight), _wide(self.bias), self.eps)
        return wide.to(input.dtype)
    y: Tensor = apply(_LayerNorm, input, self.weight, self.bias, self)
    return y


def widen(root: nn.Module) -> None:
    """Make the layer normalisations of `root` compute in float32, in place."""
    for module in root.modules():
        if type(module) is nn.LayerNorm and "forward" not in module.__dict__:
            module.forward = MethodType(_forward, module)  # type: ignore[method-assign]
