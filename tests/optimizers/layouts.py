"""Random parameters and random ways to cut them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from shardwise.optimizers import Optimizer
from tests.optimizers.fragments import Parameter, Ranks, distance, draw, whole

# Names that overrides and patterns of the tests speak of.
NAMES = ("blocks.0.up.weight", "embedding.weight", "blocks.0.norm.weight", "blocks.1.up.weight")


@dataclass(frozen=True)
class Layout:
    """Parameters on `tensor` ranks by the ranks of ZeRO."""

    parameters: tuple[Parameter, ...]
    tensor: int

    @property
    def uncut(self) -> "Layout":
        return Layout(tuple(replace(p, split=None, cuts=()) for p in self.parameters), 1)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    tensor, zero = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    parameters = []
    for name in draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True)):
        dims = draw(st.sampled_from((2, 2, 2, 3, 1, 0, 4)))
        shape = tuple(draw(st.lists(st.integers(1, 3 if dims == 4 else 9), min_size=dims, max_size=dims)))
        split = draw(st.sampled_from((None, *range(dims)))) if tensor > 1 else None
        cuts = tuple(sorted(draw(st.lists(st.floats(0, 1), min_size=zero - 1, max_size=zero - 1))))
        parameters.append(Parameter(name, shape, split, cuts))
    return Layout(tuple(parameters), tensor)


def train(
    optimizer: Optimizer,
    layout: Layout,
    seed: int,
    steps: int = 3,
    scale: float = 0.7,
    dtype: torch.dtype = torch.float64,
    lr: float | Tensor | None = None,
) -> Ranks:
    """A few steps on the same random parameters and gradients for every layout of the same parameters."""
    ranks = Ranks(optimizer, layout.parameters, draw(layout.parameters, seed, dtype), layout.tensor)
    for step in range(1, steps + 1):
        ranks.step(draw(layout.parameters, seed * 100 + step, dtype), step, scale, lr)
    return ranks


def expected(
    optimizer: Optimizer, parameters: Sequence[Parameter], seed: int, steps: int = 3, scale: float = 0.7
) -> list[Tensor]:
    """The same steps by the optimizer's reference, in float64."""
    made, decayed, others = whole(parameters, draw(parameters, seed))
    reference = optimizer.reference(decayed, others)
    for step in range(1, steps + 1):
        for parameter, gradient in zip(made, draw(parameters, seed * 100 + step), strict=True):
            parameter.grad = gradient * scale
        reference.step()
    return [parameter.detach() for parameter in made]


def update_error(optimizer: Optimizer, layout: Layout, seed: int, steps: int = 3) -> float:
    """The largest error of what the steps changed, relative to the largest change of the same parameter."""
    start = draw(layout.parameters, seed)
    found = [a - b for a, b in zip(train(optimizer, layout, seed, steps).values(), start, strict=True)]
    right = [a - b for a, b in zip(expected(optimizer, layout.parameters, seed, steps), start, strict=True)]
    assert all(change.any() for change in right)
    return distance(found, right)
