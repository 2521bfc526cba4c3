"""torch's autograd functions, called with types."""

from typing import Any

from torch import Tensor
from torch.autograd import Function


def apply(function: type[Function], *given: Any) -> Tensor:
    """`function.apply`, for a function that returns one tensor."""
    found: Tensor = function.apply(*given)
    return found


def apply_all(function: type[Function], *given: Any) -> tuple[Any, ...]:
    """`function.apply`, for a function that returns several values."""
    found: tuple[Any, ...] = function.apply(*given)
    return found
