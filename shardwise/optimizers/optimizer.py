"""What the sharding engine asks of an optimizer, and what it gives it."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn


@dataclass
class Fragment:
    """A part of a parameter that this rank updates: consecutive elements, in row-major order, of its local tensor."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    parameter: Tensor
    gradient: Tensor
    decay: bool
    split: int | None = None
    global_shape: tuple[int, ...] = ()
    state: dict[str, Tensor] = field(default_factory=dict)


class Sum(NamedTuple):
    tensor: Tensor
    split: bool


class Optimizer(Protocol):
    @property
    def lr(self) -> float: ...

    @property
    def elementwise(self) -> bool: ...

    @property
    def factored(self) -> Mapping[str, tuple[int, ...]]: ...

    def state(self, fragment: Fragment) -> dict[str, Tensor]: ...

    def update(self, fragments: list[Fragment], *, lr: float, step: int, scale: float) -> Iterator[list[Sum]]: ...

    def reference(self, decayed: Iterable[nn.Parameter], others: Iterable[nn.Parameter]) -> torch.optim.Optimizer: ...
