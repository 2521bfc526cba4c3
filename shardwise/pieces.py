"""The pieces of a global tensor that a rank holds, in the form in which torch.distributed.checkpoint saves and loads
them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from shardwise.layout import Box, Layout, Place

if TYPE_CHECKING:  # a second of imports that only those who save and load need
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


class Pieces(Tensor):
    """Boxes of a global tensor of `shape`, each with this rank's values (a view, so that loading in place changes the
    model). To torch.distributed.checkpoint it is a tensor that knows what to write and where to read; nothing can be
    computed with it.

    A box that several ranks hold is saved once; a rank may load boxes that no rank saved as such.

    Args:
        shape: of the global tensor.
        boxes: what of it this rank has.
        dtype: of the values.
    """

    boxes: Sequence[tuple[Box, Tensor]]

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], boxes: Sequence[tuple[Box, Tensor]], dtype: torch.dtype) -> Self:
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        made.boxes = boxes
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(
            f"{func} of a tensor of which a rank has pieces only: save and load it with torch.distributed.checkpoint, "
            "or ask for parallel.full_parameters()"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Pieces({tuple(self.shape)}, {[box for box, _ in self.boxes]})"

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                MetadataIndex(fqn, torch.Size(box.offset)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(_chunk(box), TensorProperties.create_from_tensor(tensor), self.shape),
            )
            for box, tensor in self.boxes
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box, _ in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for box, tensor in self.boxes:
            if tuple(index.offset or ()) == box.offset:
                return tensor
        raise KeyError(index)


class Away(Pieces):
    """Pieces that are not in memory: their tensors have no values, and `find` brings the same pieces with theirs, of
    which each stays for as long as anything refers to it."""

    find: Callable[[], Pieces]

    @staticmethod
    def of(pieces: Pieces, find: Callable[[], Pieces]) -> Away:
        """The pieces whose values `find` brings."""
        away = Away(tuple(pieces.shape), pieces.boxes, pieces.dtype)
        away.find = find
        return away

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.find().__get_tensor_shard__(index)


def _chunk(box: Box) -> ChunkStorageMetadata:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))


def ranges(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[Box, int]]:
    """The boxes that make up elements `start` to `stop` of a tensor in row-major order, each with its first element's
    number.

    A matrix gives at most three: the end of a row, whole rows, the beginning of a row.
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ()), 0
        return
    row = math.prod(shape[1:])
    while start < stop:
        index, within = divmod(start, row)
        if within == 0 and stop - start >= row:
            rows = (stop - start) // row
            yield Box((index,) + (0,) * (len(shape) - 1), (rows, *shape[1:])), start
            start += rows * row
            continue
        end = min(stop, (index + 1) * row)
        for box, first in ranges(shape[1:], within, end - index * row):
            yield Box((index, *box.offset), (1, *box.shape)), index * row + first
        start = end


def pieces_of(layout: Layout, places: Mapping[str, Place], fragment: Tensor, start: int, stop: int) -> Pieces:
    """The boxes of the global tensor that elements `start` to `stop` of this rank's local tensor are.

    Args:
        layout, places: which part of the global tensor the local one is.
        fragment: (stop - start,), those elements.
    """
    local_shape = layout.local_shape(places)
    found: list[tuple[Box, Tensor]] = []
    for box, first in ranges(local_shape, start, stop):
        count = math.prod(box.shape)
        values = fragment[first - start : first - start + count].view(box.shape)
        for source, target in layout.pieces(places):
            low = tuple(max(a, b) for a, b in zip(box.offset, target.offset, strict=True))
            high = tuple(
                min(a + n, b + m) for a, n, b, m in zip(box.offset, box.shape, target.offset, target.shape, strict=True)
            )
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            shape = tuple(b - a for a, b in zip(low, high, strict=True))
            inside = Box(tuple(a - b for a, b in zip(low, box.offset, strict=True)), shape)
            where = tuple(s + a - b for s, a, b in zip(source.offset, low, target.offset, strict=True))
            found.append((Box(where, shape), inside.of(values)))
    return Pieces(layout.shape, found, fragment.dtype)
