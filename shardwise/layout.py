"""Where each piece of a parameter lives, declared once per parameter.

Initial values, gradient reduction, norm counting, checkpoint boxes and export are all derived from the `Layout`.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from shardwise.initial import Initial, draw_rows


class Box(NamedTuple):
    """A block of a tensor: where it starts and how long it is, per dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """The view of `tensor` that this box covers."""
        for dim, (start, length) in enumerate(zip(self.offset, self.shape, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor


class Place(Protocol):
    """One rank's position on an axis, as `shardwise.mesh.Axis` gives it."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...


def share(length: int, rank: int, size: int) -> tuple[int, int]:
    """The half-open range of `length` items that `rank` of `size` has; lengths differ by one at most. The only rule for
    uneven shares."""
    return rank * length // size, (rank + 1) * length // size


@dataclass(frozen=True)
class Split:
    """Dimension `dim` is divided over the mesh axis `axis`; `sections` names the lengths of fused matrices that are
    divided one by one.

    With `copies`, so many neighbouring ranks hold the same piece (key and value heads fewer than ranks); it divides the
    axis.
    """

    axis: str
    dim: int
    sections: tuple[int, ...] = ()
    copies: int = 1


@dataclass(frozen=True)
class Layout:
    """Where the pieces of one parameter are.

    Args:
        shape: global shape.
        splits: how dimensions are divided over axes, at most one split a dimension.
        partial: axes, beside the data-parallel ones, over which a rank's gradient is only a part: it is summed over the
            ranks along the axis that hold the same piece.
    """

    shape: tuple[int, ...]
    splits: tuple[Split, ...] = ()
    partial: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        dims = [split.dim for split in self.splits]
        assert len(set(dims)) == len(dims), f"a dimension is split twice: {self.splits}"
        for split in self.splits:
            assert not split.sections or sum(split.sections) == self.shape[split.dim], (self.shape, split)

    def pieces(self, places: Mapping[str, Place]) -> Iterator[tuple[Box, Box]]:
        """Pairs (box in the global tensor, box in this rank's tensor), one for every contiguous piece this rank
        holds."""
        ranges = [self._ranges(dim, places) for dim in range(len(self.shape))]
        for combination in itertools.product(*ranges):
            shape = tuple(stop - start for start, stop, _ in combination)
            yield (
                Box(tuple(start for start, _, _ in combination), shape),
                Box(tuple(local for _, _, local in combination), shape),
            )

    def local_shape(self, places: Mapping[str, Place]) -> tuple[int, ...]:
        """The shape of this rank's tensor."""
        return tuple(
            sum(stop - start for start, stop, _ in self._ranges(dim, places)) for dim in range(len(self.shape))
        )

    def largest(self, places: Mapping[str, Place]) -> int:
        """How many elements the largest piece of any rank has: the same number on every rank."""
        lengths = list(self.shape)
        for split in self.splits:
            parts = places[split.axis].size // split.copies
            sections = split.sections or (self.shape[split.dim],)
            lengths[split.dim] = max(
                sum(stop - start for start, stop in (share(length, rank, parts) for length in sections))
                for rank in range(parts)
            )
        return math.prod(lengths)

    def counted_here(self, places: Mapping[str, Place], axes: tuple[str, ...] = ("context", "tensor")) -> bool:
        """Whether this rank counts the parameter in a sum over all parameters: one of the ranks that hold the same
        piece does."""
        copies = {split.axis: split.copies for split in self.splits}
        return all(places[axis].rank % copies.get(axis, places[axis].size) == 0 for axis in axes)

    def _ranges(self, dim: int, places: Mapping[str, Place]) -> list[tuple[int, int, int]]:
        """(global start, global stop, local start) of the pieces along one dimension."""
        split = next((split for split in self.splits if split.dim == dim), None)
        if split is None:
            return [(0, self.shape[dim], 0)]
        place = places[split.axis]
        found, start, local = [], 0, 0
        for length in split.sections or (self.shape[dim],):
            low, high = share(length, place.rank // split.copies, place.size // split.copies)
            found.append((start + low, start + high, local))
            local += high - low
            start += length
        return found


def draw(name: str, layout: Layout, initial: Initial, seed: int, places: Mapping[str, Place], out: Tensor) -> None:
    """Write this rank's initial values of parameter `name` into `out` (its local shape, any dtype and device); draws
    only what it holds."""
    with torch.no_grad():
        for source, target in layout.pieces(places):
            if not layout.shape:
                out.copy_(draw_rows(name, (), initial, seed, 0, 1).reshape(()))
                continue
            start, rows = source.offset[0], source.shape[0]
            values = draw_rows(name, layout.shape, initial, seed, start, start + rows)
            columns = Box((0, *source.offset[1:]), source.shape)
            target.of(out).copy_(columns.of(values))
