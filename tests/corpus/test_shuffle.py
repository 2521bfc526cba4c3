import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.corpus.shuffle import derive, permute


@given(size=st.integers(1, 3000), key=st.integers(0, 2**64))
def test_every_index_goes_to_a_place_of_its_own(size: int, key: int) -> None:
    assert sorted(permute(np.arange(size), size, key).tolist()) == list(range(size))


def test_one_index_at_a_time_gives_the_same_order() -> None:
    order = permute(np.arange(500), 500, 7)
    assert [int(permute(np.array([index]), 500, 7)[0]) for index in range(500)] == order.tolist()


def test_no_index_gives_no_place() -> None:
    assert permute(np.arange(0), 10, 1).size == 0


def test_a_trillion_samples_need_no_memory() -> None:
    size = 10**12 + 39
    places = permute(np.arange(10_000), size, 3)
    assert np.unique(places).size == 10_000
    assert places.min() >= 0
    assert places.max() < size
    assert abs(places.mean() / size - 0.5) < 0.02


@pytest.mark.parametrize("size", [2, 3, 4])
def test_small_permutations_are_equally_likely(size: int) -> None:
    factorial = math.factorial(size)
    draws = 60 * factorial
    seen: dict[tuple[int, ...], int] = {}
    for key in range(draws):
        order = tuple(permute(np.arange(size), size, derive(key)).tolist())
        seen[order] = seen.get(order, 0) + 1
    assert len(seen) == factorial
    chi_square = sum((count - 60) ** 2 / 60 for count in seen.values())
    degrees = factorial - 1
    assert chi_square < degrees + 5 * (2 * degrees) ** 0.5 + 5


def test_neighbours_are_parted_and_keys_give_unlike_orders() -> None:
    size = 20_000
    first, second = (permute(np.arange(size), size, key) for key in (1, 2))
    for order in (first, second):
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.03
        assert abs(np.corrcoef(order, np.arange(size))[0, 1]) < 0.03
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.03


def test_the_order_never_changes_between_versions() -> None:
    # A run that resumes under a later version must see the samples it has not seen yet.
    assert permute(np.arange(10), 10, 0).tolist() == [6, 3, 1, 8, 5, 7, 4, 9, 0, 2]
    assert derive(1, 2) == 15555602500777525134
