"""What a device can do at most, for model-FLOP utilisation."""

from __future__ import annotations

import time

import torch

from shardwise import kernels
from shardwise.training.ranks import Ranks

SECONDS = 0.15


def measured_peak(device: torch.device, dtype: torch.dtype, ranks: Ranks) -> float:
    """FLOP/s of all ranks' devices together: the quickest of some matrix products, on all ranks at once. Collective.

    Ranks that share the cores of one machine slow each other down here as they do in training.

    Args:
        device: of this rank.
        dtype: the number format of the model's products; where it is slow, they are multiplied in float32.
        ranks: those of the job.
    """
    dtype = dtype if kernels.native(dtype, device.type) else torch.float32
    size = 8192 if device.type != "cpu" else 768
    a, b = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty(size, size, device=device, dtype=dtype)
    torch.mm(a, b, out=out)
    ranks.gather(None)
    best, start = float("inf"), time.perf_counter()
    while time.perf_counter() - start < SECONDS:
        best = min(best, _seconds(a, b, out))
    return sum(ranks.gather(2.0 * size**3 / best))


def _seconds(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> float:
    start = time.perf_counter()
    torch.mm(a, b, out=out)
    if a.device.type != "cpu":
        torch.accelerator.synchronize(a.device)
    return time.perf_counter() - start
