"""Adafactor (Shazeer and Stern, arXiv 1804.04235, algorithms 4 to 6) on matrices cut anywhere."""

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from shardwise.layout import Box
from shardwise.optimizers import reference
from shardwise.optimizers.optimizer import Fragment, Overrides, Parameters, Sum
from shardwise.pieces import ranges

# Elements worked on at a time, so that what is read twice is still in the processor's cache.
CHUNK = 1 << 17


@dataclass(frozen=True)
class Adafactor:
    """The second moment of a matrix is kept as its row and column means; steps are clipped by their root mean square,
    and are relative to that of the parameter.

    A matrix's statistics are those of the global one: sums over rows and columns are added up over the ranks that hold
    parts of it. Of a parameter with three dimensions each matrix of the last two is factored by itself; vectors, and
    what has more dimensions, are not factored.

    Args:
        lr: the largest relative step; with `relative_step` = false, the step itself.
        relative_step: the step is min(lr, 1 / sqrt(t)) (section 8).
        scale_parameter: the step is multiplied by max(eps2, RMS(parameter)) (section 8).
        momentum: decay rate of an average of the steps (beta1); 0 keeps none.
        decay_rate: the second moment's decay rate is 1 - t ** -decay_rate (section 7.2).
        clip_threshold: the step's root mean square before lr is at most this (d, section 6).
        eps1: added to the squared gradient.
        eps2: see `scale_parameter`.
        weight_decay: multiplied by the step's lr; on matrices only.
        overrides: by pattern of parameter names.

    State: in float32 4 (n + m) bytes for a matrix of n x m, on every rank that holds a part of it; 4 bytes an element
    of a vector; 4 bytes a parameter more with momentum.

    Raises:
        ValueError: a setting out of its range.
    """

    lr: float = 1e-2
    relative_step: bool = True
    scale_parameter: bool = True
    momentum: float = 0.0
    decay_rate: float = 0.8
    clip_threshold: float = 1.0
    eps1: float = 1e-30
    eps2: float = 1e-3
    weight_decay: float = 0.0
    overrides: Overrides = field(default_factory=dict)

    elementwise: ClassVar[bool] = False
    factored: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "row_moment": (0,),
        "column_moment": (1,),
        "stacked_row_moment": (0, 1),
        "stacked_column_moment": (0, 2),
    }

    def __post_init__(self) -> None:
        if self.clip_threshold <= 0:
            raise ValueError(
                f"optimizer.clip_threshold = {self.clip_threshold} is out of range; give above 0, as the paper's 1.0"
            )
        if not 0 < self.decay_rate <= 1:
            raise ValueError(
                f"optimizer.decay_rate = {self.decay_rate} is out of range; give above 0 and at most 1, as 0.8"
            )

    def state(self, fragment: Fragment) -> dict[str, Tensor]:
        own, shape = fragment.parameter, fragment.shape
        state = {"momentum": torch.zeros_like(own)} if self.momentum else {}
        if len(shape) not in (2, 3):
            return state | {"second_moment": torch.zeros_like(own)}
        rows, columns = _names(shape)
        return state | {rows: own.new_zeros(shape[:-1]), columns: own.new_zeros((*shape[:-2], shape[-1]))}

    def update(self, fragments: list[Fragment], *, lr: float | Tensor, step: int, scale: float) -> Iterator[list[Sum]]:
        if not fragments:
            return
        like = fragments[0].parameter
        scratch = like.new_empty(max(_largest(fragment) for fragment in fragments))
        works = [_Matrix(f, scratch) if len(f.shape) in (2, 3) else _Whole(f, scratch) for f in fragments]
        keep = 1.0 - step**-self.decay_rate  # beta2
        rate = min(float(lr), step**-0.5) if self.relative_step else float(lr)
        eps1 = like.new_tensor(self.eps1)

        statistics = _Sums(like, [part for work in works for part in work.parts])
        parts_of = list(statistics.grouped(len(work.parts) for work in works))
        for work, parts in zip(works, parts_of, strict=True):
            if scale != 1.0:
                work.fragment.gradient.mul_(scale)
            work.sum_up(parts)
            if not work.fragment.counted:
                for part, (_, split) in zip(parts, work.parts, strict=True):
                    if split:
                        part.zero_()
            if work.complete:
                # Others' parts are zeros: go on while the matrix is in the processor's cache.
                work.average(parts, keep, eps1)
                self._step(work, float(work.square()), float(parts[0]), rate)
        yield statistics.requests()

        updates = _Sums(like, [(1, work.fragment.split is not None) for work in works])
        rest = [index for index, work in enumerate(works) if not work.complete]
        for index in rest:
            works[index].average(parts_of[index], keep, eps1)
            if works[index].fragment.counted:
                updates.views[index].copy_(works[index].square())
        yield updates.requests()
        if rest:
            squares = torch.cat([updates.views[index] for index in rest]).tolist()
            weights = torch.cat([parts_of[index][0] for index in rest]).tolist()
            for index, square, weight in zip(rest, squares, weights, strict=True):
                self._step(works[index], square, weight, rate)

    def _step(self, work: "_Matrix | _Whole", square: float, weight: float, rate: float) -> None:
        """Step, given the sums of squares of the update and of the parameter."""
        fragment = work.fragment
        size = max(1, math.prod(fragment.global_shape or fragment.shape))
        rate *= fragment.lr_scale
        decay = rate * fragment.decay_rate(self.weight_decay)
        factor = rate / max(1.0, math.sqrt(square / size) / self.clip_threshold)
        if self.scale_parameter:
            factor *= max(self.eps2, math.sqrt(weight / size))
        if decay:
            fragment.parameter.mul_(1 - decay)
        work.step(factor, self.momentum)

    def reference(self, decayed: Parameters, others: Parameters) -> torch.optim.Optimizer:
        names = ("relative_step", "scale_parameter", "momentum", "decay_rate", "clip_threshold", "eps1", "eps2")
        rule = functools.partial(reference.adafactor, **{name: getattr(self, name) for name in names})
        return reference.Plain(reference.groups(self, self.weight_decay, decayed, others), rule)


def _names(shape: tuple[int, ...]) -> tuple[str, str]:
    return ("row_moment", "column_moment") if len(shape) == 2 else ("stacked_row_moment", "stacked_column_moment")


class _Sums:
    """Small sums laid out in two flat tensors, for those over the ranks of a local tensor and those over the ranks of
    the global one.

    Args:
        like: their dtype and device.
        parts: of each, its length and whether it is of the second kind.
    """

    def __init__(self, like: Tensor, parts: list[tuple[int, bool]]) -> None:
        lengths = {split: [length for length, other in parts if other == split] for split in (False, True)}
        self._flat = {split: like.new_zeros(sum(lengths[split])) for split in (False, True)}
        views = {split: iter(self._flat[split].split_with_sizes(lengths[split])) for split in (False, True)}
        self.views = [next(views[split]) for _, split in parts]

    def requests(self) -> list[Sum]:
        return [Sum(flat, split) for split, flat in self._flat.items() if flat.numel()]

    def grouped(self, counts: Iterable[int]) -> Iterator[list[Tensor]]:
        views = iter(self.views)
        for count in counts:
            yield [next(views) for _ in range(count)]


class _Whole:
    """One fragment whose second moment is kept whole."""

    complete = False

    def __init__(self, fragment: Fragment, scratch: Tensor) -> None:
        self.fragment = fragment
        self.scratch = scratch[: fragment.stop - fragment.start]
        # Squared parameters.
        self.parts = [(1, fragment.split is not None)]

    def sum_up(self, parts: list[Tensor]) -> None:
        parts[0].copy_(_squared(self.fragment.parameter))

    def average(self, parts: list[Tensor], keep: float, eps1: Tensor) -> None:
        self.fragment.state["second_moment"].lerp_(self.fragment.gradient.square().add_(eps1), 1 - keep)

    def square(self) -> Tensor:
        return _squared(self._update())

    def step(self, factor: float, momentum: float) -> None:
        update = self._update().mul_(factor)
        if momentum:
            update = self.fragment.state["momentum"].lerp_(update, 1 - momentum)
        self.fragment.parameter.sub_(update)

    def _update(self) -> Tensor:
        return torch.rsqrt(self.fragment.state["second_moment"], out=self.scratch).mul_(self.fragment.gradient)


class _Matrix:
    """One fragment of a matrix (N, M), or of a stack of matrices (B, N, M), as blocks of whole rows and parts of rows.

    The root of the second moment R C / mean(R) is an outer product, so its inverse is applied as a factor a row and a
    factor a column.
    """

    def __init__(self, fragment: Fragment, scratch: Tensor) -> None:
        self.fragment = fragment
        shape, split = fragment.shape, fragment.split
        numel = fragment.stop - fragment.start
        whole = numel == math.prod(shape)
        # No other rank has elements of it, and what it comes to is known without a wait for the device.
        self.complete = whole and split is None and fragment.parameter.device.type == "cpu"
        self.rows_split, self.columns_split = split == len(shape) - 2, split == len(shape) - 1
        # As they are broadcast over the matrices.
        self.row_shape, self.column_shape = (*shape[:-1], 1), (*shape[:-2], 1, shape[-1])
        # Squared parameters; squared gradients by row, which are over all columns, and by column.
        self.parts = [
            (1, split is not None),
            (math.prod(self.row_shape), self.columns_split),
            (math.prod(self.column_shape), self.rows_split),
        ]
        momentum = fragment.state.get("momentum")
        self.blocks = []
        for box, start, stop in _boxes(shape, fragment.start, fragment.stop, _limit(fragment)):
            rows = tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))
            self.blocks.append(
                _Block(
                    None if box.shape == shape else (rows[:-1], (*rows[:-2], slice(None), rows[-1])),
                    fragment.gradient[start:stop].view(box.shape),
                    fragment.parameter[start:stop].view(box.shape),
                    None if momentum is None else momentum[start:stop].view(box.shape),
                    scratch[: stop - start].view(box.shape),
                )
            )

    def sum_up(self, parts: list[Tensor]) -> None:
        if not self.blocks:
            return
        parts[0].copy_(_squared(self.fragment.parameter))
        rows, columns = parts[1].view(self.row_shape), parts[2].view(self.column_shape)
        if len(self.blocks) == 1 and self.blocks[0].indices is None:
            block = self.blocks[0]
            square = torch.mul(block.gradient, block.gradient, out=block.scratch)
            torch.sum(square, -1, keepdim=True, out=rows)
            torch.sum(square, -2, keepdim=True, out=columns)
            return
        for block in self.blocks:
            square = torch.mul(block.gradient, block.gradient, out=block.scratch)
            block.rows(rows).add_(square.sum(-1, keepdim=True))
            block.columns(columns).add_(square.sum(-2, keepdim=True))

    def average(self, parts: list[Tensor], keep: float, eps1: Tensor) -> None:
        height, width = (self.fragment.global_shape or self.fragment.shape)[-2:]
        row_name, column_name = _names(self.fragment.shape)
        rows, columns = self.fragment.state[row_name], self.fragment.state[column_name]
        rows.lerp_(torch.add(eps1, parts[1].view_as(rows), alpha=1 / width), 1 - keep)
        columns.lerp_(torch.add(eps1, parts[2].view_as(columns), alpha=1 / height), 1 - keep)
        if not self.blocks:
            return
        # Both have the same mean; it is taken of the one that is whole here.
        mean = (columns if self.rows_split else rows).mean(-1, keepdim=True)
        self.by_row = (rows / mean).rsqrt_().view(self.row_shape)
        self.by_column = columns.rsqrt().view(self.column_shape)

    def square(self) -> Tensor:
        squares = [_squared(self._update(block).mul_(block.columns(self.by_column)).view(-1)) for block in self.blocks]
        return squares[0] if len(squares) == 1 else torch.stack([*squares, self.fragment.parameter.new_zeros(())]).sum()

    def step(self, factor: float, momentum: float) -> None:
        if not self.blocks:
            return
        self.by_row.mul_(factor)
        for block in self.blocks:
            update, by_column = self._update(block), block.columns(self.by_column)
            if block.momentum is not None:
                block.parameter.sub_(block.momentum.lerp_(update.mul_(by_column), 1 - momentum))
            else:
                block.parameter.addcmul_(update, by_column, value=-1)

    def _update(self, block: "_Block") -> Tensor:
        return torch.mul(block.gradient, block.rows(self.by_row), out=block.scratch)


class _Block(NamedTuple):
    """A block of a fragment's matrices.

    Args:
        indices: where it is in what is kept by row (..., N, 1) and by column (..., 1, M); None if it is all of it.
    """

    indices: tuple[tuple[slice, ...], tuple[slice, ...]] | None
    gradient: Tensor
    parameter: Tensor
    momentum: Tensor | None
    scratch: Tensor

    def rows(self, statistic: Tensor) -> Tensor:
        return statistic if self.indices is None else statistic[self.indices[0]]

    def columns(self, statistic: Tensor) -> Tensor:
        return statistic if self.indices is None else statistic[self.indices[1]]


def _boxes(shape: tuple[int, ...], start: int, stop: int, limit: int) -> Iterator[tuple[Box, int, int]]:
    """Elements `start` to `stop` of matrices as boxes of about `limit` elements at most, each with the numbers of its
    first element and the one after its last, counted from `start`."""
    for (offset, size), first in ranges(shape, start, stop):
        begin = first - start
        # Along the first dimension that is not 1: the parts are consecutive.
        dim = next((dim for dim, length in enumerate(size) if length > 1), 0)
        row = math.prod(size[dim + 1 :])
        if row > limit and dim < len(size) - 2:
            for index in range(size[dim]):
                inner = _boxes(shape, first + index * row, first + (index + 1) * row, limit)
                yield from ((box, begin + index * row + a, begin + index * row + b) for box, a, b in inner)
            continue
        count = max(1, limit // row) if dim < len(size) - 1 else size[dim]
        for index in range(0, size[dim], count):
            length = min(count, size[dim] - index)
            box = Box((*offset[:dim], offset[dim] + index, *offset[dim + 1 :]), (*size[:dim], length, *size[dim + 1 :]))
            yield box, begin + index * row, begin + (index + length) * row


def _limit(fragment: Fragment) -> int:
    return CHUNK if fragment.parameter.device.type == "cpu" else CHUNK << 8


def _largest(fragment: Fragment) -> int:
    """What scratch memory a fragment needs, in elements."""
    numel = fragment.stop - fragment.start
    return min(numel, max(_limit(fragment), fragment.shape[-1])) if len(fragment.shape) in (2, 3) else numel


def _squared(flat: Tensor) -> Tensor:
    return torch.dot(flat, flat)
