"""Mixed precision (Micikevicius et al., arXiv 1710.03740): passes in 16 bits, updates in 32.

Parameters are computed with in the compute format. Their masters, which the optimizer updates, gradients once they have
landed, sums over ranks and optimizer state are in the master format. fp16, whose smallest numbers gradients fall below,
has its loss scaled up.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Precision:
    """Number formats of passes (`compute`) and of masters, gradients and optimizer state (`master`).

    With `rounds` there are no masters: an update computes with the parameters in the master format, and rounds what it
    has found to the compute format stochastically.
    """

    compute: torch.dtype
    master: torch.dtype
    rounds: bool = False

    @property
    def converts(self) -> bool:
        """Whether the two formats differ."""
        return self.compute != self.master

    @property
    def mixed(self) -> bool:
        """Whether parameters and their masters are two tensors."""
        return self.converts and not self.rounds


PRECISIONS = {
    "fp64": Precision(torch.float64, torch.float64),
    "fp32": Precision(torch.float32, torch.float32),
    "bf16": Precision(torch.bfloat16, torch.float32),
    "fp16": Precision(torch.float16, torch.float32),
    "fp8": Precision(torch.bfloat16, torch.float32),  # of linear layers alone: `shardwise.memory.fp8`
    "bf16-pure": Precision(torch.bfloat16, torch.float32, rounds=True),
}

# Doubled after so many clean steps in a row, halved after one that overflowed, from the largest power of two fp16
# holds.
GROWTH_STEPS, FIRST, SMALLEST, LARGEST = 2000, 2.0**15, 1.0, 2.0**24


class LossScale:
    """The factor on an fp16 loss. All ranks see the same gradient norm, so they change it alike.

    Attributes:
        state: (scale, clean steps in a row) as a float64 tensor, for checkpoints.
    """

    def __init__(self) -> None:
        self.state: Tensor = torch.tensor([FIRST, 0.0], dtype=torch.float64)

    @property
    def value(self) -> float:
        return float(self.state[0])

    def count(self, overflowed: bool) -> None:
        """Take note of a step."""
        scale, clean = self.state.tolist()
        if overflowed:
            scale, clean = max(SMALLEST, scale / 2), 0.0
        else:
            clean += 1
            if clean >= GROWTH_STEPS:
                scale, clean = min(LARGEST, scale * 2), 0.0
        self.state.copy_(torch.tensor([scale, clean]))
