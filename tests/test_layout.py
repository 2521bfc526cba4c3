"""Layouts: pieces cover a parameter exactly, and everything drawn from them is the same in any layout."""

import math
from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.initial import Initial
from shardwise.layout import Box, Layout, Split, draw, share

Places = dict[str, SimpleNamespace]


def places(**axes: tuple[int, int]) -> Places:
    return {name: SimpleNamespace(rank=rank, size=size) for name, (rank, size) in axes.items()}


def every_rank(sizes: dict[str, int]) -> Iterator[Places]:
    for ranks in product(*(range(size) for size in sizes.values())):
        yield places(**{name: (rank, sizes[name]) for name, rank in zip(sizes, ranks, strict=True)})


@given(st.integers(0, 200), st.integers(1, 17))
def test_shares_are_consecutive_cover_everything_and_differ_by_one_at_most(length: int, size: int) -> None:
    edges = [share(length, rank, size) for rank in range(size)]
    assert [low for low, _ in edges] == [0, *(high for _, high in edges[:-1])]
    assert edges[-1][1] == length
    lengths = {high - low for low, high in edges}
    assert max(lengths) - min(lengths) <= 1


def test_the_ranks_of_a_global_batch_of_seven_rows_take_what_is_documented() -> None:
    assert [share(7, rank, 3) for rank in range(3)] == [(0, 2), (2, 4), (4, 7)]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    dims=st.sampled_from([(0, None), (1, None), (0, 1), (1, 0), (None, None)]),
    fused=st.integers(0, 2),
)
def test_pieces_of_all_ranks_cover_a_parameter_exactly_once(
    rows: int, columns: int, sizes: tuple[int, int], dims: tuple[int | None, int | None], fused: int
) -> None:
    shape = (rows * (fused + 1), columns)
    splits = []
    for axis, dim in zip(("tensor", "context"), dims, strict=True):
        if dim is not None:
            splits.append(Split(axis, dim, (rows,) * (fused + 1) if dim == 0 and fused else ()))
    layout = Layout(shape, tuple(splits))
    axes = {"tensor": sizes[0], "context": sizes[1]}
    covered = torch.zeros(shape)
    for here in every_rank(axes):
        local = torch.zeros(layout.local_shape(here))
        for source, target in layout.pieces(here):
            source.of(covered).add_(1)
            target.of(local).add_(1)
        assert bool((local == 1).all())
    copies = 1
    for axis, dim in zip(("tensor", "context"), dims, strict=True):
        copies *= axes[axis] if dim is None else 1
    assert bool((covered == copies).all())


def test_fused_matrices_are_divided_one_by_one() -> None:
    layout = Layout((9, 2), (Split("tensor", 0, (6, 3)),))
    found = [list(layout.pieces(places(tensor=(rank, 3)))) for rank in range(3)]
    assert [[(source.offset[0], source.shape[0]) for source, _ in rank] for rank in found] == [
        [(0, 2), (6, 1)],
        [(2, 2), (7, 1)],
        [(4, 2), (8, 1)],
    ]
    assert [target.offset[0] for _, target in found[1]] == [0, 2]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_layout_starts_from_the_same_bits(dim: int, size: int) -> None:
    shape = (300, 250)  # blocks of 262 rows: pieces begin and end within them
    whole = torch.empty(shape)
    draw("w", Layout(shape), Initial("normal", 1.0), 4, {}, whole)
    layout = Layout(shape, (Split("tensor", dim),))
    for rank in range(size):
        here = places(tensor=(rank, size))
        local = torch.empty(layout.local_shape(here), dtype=torch.float64)
        draw("w", layout, Initial("normal", 1.0), 4, here, local)
        low, high = share(shape[dim], rank, size)
        assert torch.equal(local, whole.narrow(dim, low, high - low).double())


def test_scalars_and_empty_parameters_are_drawn_too() -> None:
    scalar = torch.empty(())
    draw("s", Layout(()), Initial("constant", 3.0), 0, {}, scalar)
    assert scalar.item() == 3.0
    draw("e", Layout((0, 4)), Initial("normal", 3.0), 0, {}, torch.empty(0, 4))


def test_one_of_the_ranks_that_hold_a_piece_counts_it() -> None:
    sizes = {"context": 2, "tensor": 3}
    replicated, divided = Layout((6,)), Layout((6,), (Split("tensor", 0),))
    assert sum(replicated.counted_here(here) for here in every_rank(sizes)) == 1
    assert sum(divided.counted_here(here) for here in every_rank(sizes)) == 3


def test_a_box_is_a_view() -> None:
    tensor = torch.arange(12.0).view(3, 4)
    part = Box((1, 2), (2, 1)).of(tensor)
    assert torch.equal(part, torch.tensor([[6.0], [10.0]]))
    assert part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.lists(st.integers(0, 9), min_size=1, max_size=3), st.integers(0, 3))
def test_the_largest_piece_is_the_same_number_on_every_rank(
    parts: int, copies: int, sections: list[int], rows: int
) -> None:
    layout = Layout((rows, sum(sections)), (Split("tensor", 1, tuple(sections), copies),))
    ranks = list(every_rank({"tensor": parts * copies}))
    sizes = [math.prod(layout.local_shape(each)) for each in ranks]
    assert [layout.largest(each) for each in ranks] == [max(sizes)] * len(ranks)
