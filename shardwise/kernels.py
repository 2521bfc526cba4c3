"""Matrix products by the quickest kernel there is."""

import platform

import torch
import torch.nn.functional as F
from torch import Tensor

# From so many multiplications on, oneDNN multiplies float32 matrices 3 to 18 % faster than the library torch calls on
# x86 processors (measured on an AMD EPYC 9004 with one thread; docs/benchmarks.md); below, setting it up costs more.
ONEDNN_FROM = 1 << 24
_ONEDNN = (
    platform.machine() in ("x86_64", "AMD64")
    and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, without a graph: (..., in), (out, in), (out) -> (..., out)."""
    if _ONEDNN and x.dtype == torch.float32 and x.device.type == "cpu" and x.numel() * weight.shape[0] >= ONEDNN_FROM:
        with torch.no_grad():
            return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]
    return F.linear(x, weight, bias)
