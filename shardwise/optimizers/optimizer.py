"""What the sharding engine asks of an optimizer, and what it gives it."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from pydantic import ConfigDict
from torch import Tensor, nn

# Parameters, or (name, parameter): an optimizer that goes by names, as one with overrides, needs the latter.
Parameters = Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class Override:
    """What is different for some parameters.

    Args:
        lr_scale: a factor on the learning rate.
        weight_decay: in place of the optimizer's, for vectors too; None leaves it.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    lr_scale: float = 1.0
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        for key in ("lr_scale", "weight_decay"):
            value = getattr(self, key)
            if value is not None and value < 0:
                raise ValueError(f"{key} is {value}; give at least 0")


Overrides = Mapping[str, Override]  # by pattern of parameter names, such as "*.norm.*"


def override_of(overrides: Overrides, name: str) -> Override:
    """What the first pattern that fits `name` asks for."""
    return next((found for pattern, found in overrides.items() if fnmatchcase(name, pattern)), Override())


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns fits a parameter's name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@dataclass
class Fragment:
    """A part of a parameter that this rank updates: consecutive elements, in row-major order, of its local tensor.

    For an optimizer that is `elementwise` it may be a run of several parameters, of one dimension.

    Args:
        name: the parameter's name ("" for a run).
        shape: of the local tensor, of which this rank updates elements `start` to `stop`.
        parameter, gradient: (stop - start,).
        decay: whether weight decay applies.
        split: the dimension that is split over further ranks (tensor parallelism), None if none is.
        global_shape: of the whole parameter.
        counted: whether this rank adds its part to a sum over the ranks of `split`: of those that hold copies of the
            same part one does.
        largest: elements of the largest local tensor that any rank of `split` has, by which all of them agree; 0 where
            all have `shape`.
        state: from the optimizer's `state`.
        lr_scale, weight_decay: as in the optimizer's `Override` for this name; the same for all parameters of a run.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    parameter: Tensor
    gradient: Tensor
    decay: bool
    split: int | None = None
    global_shape: tuple[int, ...] = ()
    counted: bool = True
    largest: int = 0
    state: dict[str, Tensor] = field(default_factory=dict)
    lr_scale: float = 1.0
    weight_decay: float | None = None

    def decay_rate(self, default: float) -> float:
        """The weight decay of this fragment under an optimizer whose own is `default`."""
        if self.weight_decay is not None:
            return self.weight_decay
        return default if self.decay else 0.0


class Sum(NamedTuple):
    """A request to add up `tensor` (1-dimensional, in place) over the ranks that hold other elements of the same local
    tensor, and, if `split`, over the ranks that the parameter's `split` dimension is divided over as well: there a
    fragment that is not `counted` adds zeros."""

    tensor: Tensor
    split: bool


@runtime_checkable
class Optimizer(Protocol):
    """An optimizer as settings and functions: its state belongs to the engine, which places, divides and saves it."""

    @property
    def lr(self) -> float: ...

    @property
    def overrides(self) -> Overrides: ...

    @property
    def elementwise(self) -> bool:
        """Whether every element's update depends on that element alone: parameters can be updated in one run."""

    @property
    def factored(self) -> Mapping[str, tuple[int, ...]]:
        """The moments that are not as long as their fragment: by name, which dimensions of the parameter they keep. All
        ranks that hold elements of the same local tensor hold them alike."""

    def state(self, fragment: Fragment) -> dict[str, Tensor]:
        """Fresh state for a fragment: moments by name, each (stop - start,) unless `factored`."""

    def update(self, fragments: list[Fragment], *, lr: float | Tensor, step: int, scale: float) -> Iterator[list[Sum]]:
        """Apply one step in place. A generator: it yields what it needs summed over ranks, and goes on once it is.

        Args:
            fragments: what this rank updates; their gradients may be overwritten, and end multiplied by `scale`. All
                ranks that share their parameters come with the same list (fragments may be empty), so that they ask for
                the same sums.
            lr: this step's learning rate, a number or a tensor of one element.
            step: 1 for the first update.
            scale: a factor on the gradients (clipping).
        """

    def reference(self, decayed: Parameters, others: Parameters) -> torch.optim.Optimizer:
        """The same rule from an independent implementation, on whole parameters in one process: the oracle of
        `verify`."""


@runtime_checkable
class Packed(Protocol):
    """What an optimizer has besides if its state is not kept in the form in which checkpoints hold it."""

    def moments(self, fragment: Fragment) -> dict[str, Tensor]:
        """A fragment's state as moments, each (stop - start,): copies, or the state itself where it is kept as such."""

    def pack(self, fragment: Fragment, moments: Mapping[str, Tensor]) -> None:
        """Take moments, such as `moments` gave, as the state. What `moments` gave comes back bit by bit."""


def alike(fragments: Iterable[Fragment], weight_decay: float) -> dict[tuple[float, float], list[Fragment]]:
    """The fragments that are not empty, by (lr_scale, weight decay)."""
    found: dict[tuple[float, float], list[Fragment]] = {}
    for fragment in fragments:
        if fragment.stop > fragment.start:
            found.setdefault((fragment.lr_scale, fragment.decay_rate(weight_decay)), []).append(fragment)
    return found
