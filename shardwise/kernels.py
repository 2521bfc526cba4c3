"""Matrix products by the quickest kernel there is."""

import functools
import platform
import time

import torch
import torch.nn.functional as F
from torch import Tensor

# From so many multiplications on, oneDNN multiplies float32 matrices 3 to 18 % faster than the library torch calls on
# x86 processors (measured on an AMD EPYC 9004 with one thread; docs/benchmarks.md); below, setting it up costs more.
ONEDNN_FROM = 1 << 24
_ONEDNN = (
    platform.machine() in ("x86_64", "AMD64")
    and torch.backends.mkldnn.is_available()
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
)


# A processor without instructions for a 16-bit format takes up to 90 times as long with it as in float32 (fp16 on an
# AMD EPYC 9004); one that has them a third. Products are multiplied in whichever is quicker, by a measurement.
_MEASURED_SIZE = 256


@functools.cache
def native(dtype: torch.dtype, device_type: str = "cpu") -> bool:
    """Whether products of this format are at least half as quick as float32's here."""
    if device_type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return True

    def seconds(of: torch.dtype) -> float:
        matrix = torch.ones(_MEASURED_SIZE, _MEASURED_SIZE, dtype=of)
        torch.mm(matrix, matrix)
        found = []
        for _ in range(3):
            start = time.perf_counter()
            torch.mm(matrix, matrix.t())
            torch.mm(matrix.t(), matrix)
            found.append(time.perf_counter() - start)
        return min(found)

    with torch.no_grad():
        return seconds(dtype) < 2 * seconds(torch.float32)


def product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right, in float32 where the format of the two is slow here."""
    if native(left.dtype, left.device.type):
        return left @ right
    return left.float() @ right.float()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, without a graph: (..., in), (out, in), (out) -> (..., out)."""
    if not native(x.dtype, x.device.type):
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
    if _ONEDNN and x.dtype == torch.float32 and x.device.type == "cpu" and x.numel() * weight.shape[0] >= ONEDNN_FROM:
        with torch.no_grad():
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
            return out
    return F.linear(x, weight, bias)
