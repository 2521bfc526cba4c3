"""Drives an optimizer on cut parameters as the engine does, all ranks in this process: in lock-step, sums added up."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from shardwise.layout import share
from shardwise.optimizers import Fragment, Optimizer
from shardwise.optimizers.optimizer import override_of


@dataclass(frozen=True)
class Parameter:
    """A parameter and how it is cut.

    Args:
        split: the dimension that `Layout.tensor` ranks divide.
        cuts: where, as fractions of a local tensor, its fragments end; as many for every parameter of a layout.
    """

    name: str
    shape: tuple[int, ...]
    split: int | None = None
    cuts: tuple[float, ...] = ()


class Ranks:
    """Parameters on `tensor` x (number of cuts + 1) ranks.

    Args:
        values: whole parameters, in the order of `parameters`.
    """

    def __init__(
        self, optimizer: Optimizer, parameters: Sequence[Parameter], values: Sequence[Tensor], tensor: int
    ) -> None:
        self.optimizer = optimizer
        self.parameters = parameters
        self.tensor = tensor
        self.zero = len(parameters[0].cuts) + 1
        self.ranks = [(t, z) for t in range(tensor) for z in range(self.zero)]
        self.fragments = {
            rank: [self._fragment(p, v, *rank) for p, v in zip(parameters, values, strict=True)] for rank in self.ranks
        }

    def _local(self, parameter: Parameter, value: Tensor, t: int) -> Tensor:
        if parameter.split is None:
            return value
        start, stop = share(parameter.shape[parameter.split], t, self.tensor)
        return value.narrow(parameter.split, start, stop - start)

    def _fragment(self, parameter: Parameter, value: Tensor, t: int, z: int) -> Fragment:
        local = self._local(parameter, value, t)
        numel = local.numel()
        ends = [0, *(round(cut * numel) for cut in parameter.cuts), numel]
        start, stop = list(pairwise(ends))[z]
        if start == stop:
            start = stop = 0
        own = local.reshape(-1)[start:stop].clone()
        override = override_of(self.optimizer.overrides, parameter.name)
        fragment = Fragment(
            parameter.name,
            tuple(local.shape),
            start,
            stop,
            own,
            torch.zeros_like(own),
            len(parameter.shape) >= 2,
            parameter.split,
            parameter.shape,
            lr_scale=override.lr_scale,
            weight_decay=override.weight_decay,
        )
        fragment.state = self.optimizer.state(fragment)
        return fragment

    def step(self, gradients: Sequence[Tensor], step: int, scale: float = 1.0, lr: float | Tensor | None = None) -> int:
        """One update of all ranks. Returns how often sums were asked for."""
        for (t, _), fragments in self.fragments.items():
            for parameter, gradient, fragment in zip(self.parameters, gradients, fragments, strict=True):
                local = self._local(parameter, gradient, t).reshape(-1)
                fragment.gradient.copy_(local[fragment.start : fragment.stop])
        lr = self.optimizer.lr if lr is None else lr
        updates = {
            rank: self.optimizer.update(fragments, lr=lr, step=step, scale=scale)
            for rank, fragments in self.fragments.items()
        }
        phases = 0
        while True:
            asked = {rank: next(update, None) for rank, update in updates.items()}
            if all(sums is None for sums in asked.values()):
                break
            phases += 1
            for group, split in [(self.ranks, True), *((self._sharing(t), False) for t in range(self.tensor))]:
                requests = [
                    [request.tensor for request in asked[rank] or () if request.split == split] for rank in group
                ]
                for tensors in zip(*requests, strict=True):
                    assert tensors[0].ndim == 1
                    total = torch.stack(tensors).sum(0)
                    for tensor in tensors:
                        tensor.copy_(total)
        for (t, _), fragments in self.fragments.items():
            for parameter, gradient, fragment in zip(self.parameters, gradients, fragments, strict=True):
                local = self._local(parameter, gradient, t).reshape(-1)[fragment.start : fragment.stop]
                torch.testing.assert_close(fragment.gradient, local * scale)
        return phases

    def _sharing(self, t: int) -> list[tuple[int, int]]:
        return [rank for rank in self.ranks if rank[0] == t]

    def values(self, moment: str | None = None) -> list[Tensor]:
        """The whole parameters, or a moment as long as they are, put together again."""
        return [self._whole(index, moment) for index in range(len(self.parameters))]

    def _whole(self, index: int, moment: str | None) -> Tensor:
        parameter, locals_ = self.parameters[index], []
        for t in range(self.tensor if parameter.split is not None else 1):
            parts = [self.fragments[t, z][index] for z in range(self.zero)]
            flat = torch.cat([p.state[moment] if moment else p.parameter for p in parts])
            locals_.append(flat.view(parts[0].shape))
        return torch.cat(locals_, parameter.split) if parameter.split is not None else locals_[0]

    def state_bytes(self) -> int:
        return sum(
            t.numel() * t.itemsize for fragments in self.fragments.values() for f in fragments for t in f.state.values()
        )


def whole(
    parameters: Sequence[Parameter], values: Sequence[Tensor]
) -> tuple[list[nn.Parameter], list[tuple[str, nn.Parameter]], list[tuple[str, nn.Parameter]]]:
    """The parameters for `Optimizer.reference`: all, and by name those with weight decay and the others."""
    made = [nn.Parameter(value.clone()) for value in values]
    named = [(p.name, value) for p, value in zip(parameters, made, strict=True)]
    return made, [n for n in named if n[1].ndim >= 2], [n for n in named if n[1].ndim < 2]


def draw(parameters: Sequence[Parameter], seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Values whose columns and rows differ in size, by a factor of up to about 100."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for parameter in parameters:
        value = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        for length, dim in zip(parameter.shape, range(len(parameter.shape)), strict=True):
            shape = [1] * len(parameter.shape)
            shape[dim] = length
            value *= torch.randn(length, generator=generator, dtype=torch.float64).exp().view(shape)
        found.append(value.to(dtype))
    return found


def distance(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest error relative to a tensor's largest value."""
    return max(
        float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-300))
        if math.prod(b.shape)
        else 0.0
        for a, b in zip(found, expected, strict=True)
    )
