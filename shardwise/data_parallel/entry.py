"""One parameter as its chunk's buckets know it."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwise.gradient import Slot
from shardwise.layout import Layout


@dataclass
class Entry:
    """One trainable parameter of a chunk.

    Args:
        name: its canonical name in the whole model.
        layout: where its pieces live.
        shape: of this rank's piece.
        decay: whether weight decay applies.
        direct: whether the module that owns it writes its gradient itself (`shardwise.gradient.is_direct`).
        counted: whether this rank counts it in the gradient norm (one of the ranks that hold the same piece does).
        first: whether of the ranks along the tensor axis that hold copies of its piece this is the first.
        largest: elements of the largest piece that any rank has, by which all agree; 0 where all have `shape`.
        unit: which unit of the chunk it is gathered with at ZeRO stage 3; -1 with the whole chunk.
        block: the number of its own loss scale, where every residual block has one.
        extra: names further sums that its gradient must go through, for a parameter whose gradient is partial elsewhere
            too.
    """

    name: str
    layout: Layout
    shape: tuple[int, ...]
    decay: bool
    direct: bool
    counted: bool = True
    first: bool = True
    largest: int = 0
    unit: int = -1
    block: int = 0
    extra: str = ""
    value: Tensor = field(default_factory=lambda: torch.empty(0))  # the view into the bucket's first values
    slot: Slot = field(init=False)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)
