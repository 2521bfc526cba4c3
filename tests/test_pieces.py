"""Fragments of parameters as boxes of the global tensor."""

import math
from dataclasses import dataclass

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.layout import Layout, Split, share
from shardwise.pieces import pieces_of, ranges

shapes = st.lists(st.integers(1, 5), max_size=3).map(tuple)


@dataclass(frozen=True)
class At:
    rank: int
    size: int


@given(shapes, st.data())
def test_ranges_are_disjoint_boxes_of_exactly_the_elements(shape: tuple[int, ...], data: st.DataObject) -> None:
    numbers = torch.arange(math.prod(shape)).view(shape)
    stop = data.draw(st.integers(0, numbers.numel()))
    start = data.draw(st.integers(0, stop))
    found = [(box.of(numbers).reshape(-1), first) for box, first in ranges(shape, start, stop)]
    assert torch.cat([torch.arange(0), *(part for part, _ in found)]).tolist() == list(range(start, stop))
    assert all(part[0] == first for part, first in found)


@given(st.integers(1, 7), st.integers(1, 7), st.integers(1, 3), st.integers(1, 3), st.sampled_from([None, 0, 1]))
def test_fragments_of_all_ranks_are_the_whole_tensor(
    rows: int, columns: int, tensor: int, zero: int, dim: int | None
) -> None:
    whole = torch.arange(rows * columns).view(rows, columns)
    length = (rows, columns)[dim or 0]
    sections = (length // 3, length - length // 3) if length >= 3 else ()
    layout = Layout((rows, columns), () if dim is None else (Split("tensor", dim, sections),))
    seen = torch.zeros_like(whole)
    for t in range(tensor):
        places = {"tensor": At(t, tensor)}
        local = torch.empty(layout.local_shape(places), dtype=whole.dtype)
        for source, target in layout.pieces(places):
            target.of(local).copy_(source.of(whole))
        for z in range(zero):
            start, stop = share(local.numel(), z, zero)
            for box, values in pieces_of(layout, places, local.reshape(-1)[start:stop], start, stop).boxes:
                assert torch.equal(box.of(whole), values)
                box.of(seen).add_(1)
    assert bool((seen == (tensor if dim is None else 1)).all())
