"""Adafactor: its reference, what it asks other ranks for, and what they keep alike."""

import itertools
import math

import pytest
import torch
from torch import nn

from shardwise.optimizers import Adafactor
from shardwise.optimizers.adafactor import _boxes
from tests.optimizers.fragments import Parameter, Ranks, draw
from tests.optimizers.layouts import Layout, train

MATRIX = Parameter("up", (12, 10), None, (0.2, 0.55))
STACK = Parameter("experts", (3, 5, 4), 1, (0.2, 0.2))
VECTOR = Parameter("norm", (9,), None, (0.1, 0.8))


def test_the_reference_is_torchs_rule_where_the_two_say_the_same() -> None:
    values = draw([MATRIX, VECTOR], 0)
    ours, theirs = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
    reference = Adafactor(lr=1e-2).reference(ours, [])
    torchs = torch.optim.Adafactor(theirs, lr=1e-2, eps=(1e-30, 1e-3), weight_decay=0.0)
    for step in range(5):
        for mine, other, gradient in zip(ours, theirs, draw([MATRIX, VECTOR], step + 1), strict=True):
            mine.grad, other.grad = gradient, gradient.clone()
        reference.step()
        torchs.step()
    for mine, other, value in zip(ours, theirs, values, strict=True):
        torch.testing.assert_close(mine - value, other - value, rtol=1e-10, atol=0)


def test_one_step_is_what_the_paper_says() -> None:
    value = torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.float64)
    parameter = Parameter("x", (2, 2))
    ranks = Ranks(Adafactor(), [parameter], [value], 1)
    ranks.step([torch.tensor([[1.0, 2.0], [3.0, 6.0]], dtype=torch.float64)], 1)
    # The gradient is of rank one: its factored second moment is its square, so the update is one, and is not clipped.
    rms = (25 / 4) ** 0.5
    torch.testing.assert_close(ranks.values()[0], value - rms * 1e-2)


def test_large_updates_are_clipped_over_the_whole_matrix() -> None:
    layout = Layout((Parameter("x", (8, 6), 0, (0.3,)),), 2)
    optimizer = Adafactor(scale_parameter=False, relative_step=False, lr=1.0, clip_threshold=0.25)
    start = draw(layout.parameters, 0)[0]
    change = train(optimizer, layout, 0, steps=1).values()[0] - start
    assert float(change.square().mean().sqrt()) == pytest.approx(0.25, rel=1e-12)


def test_a_matrix_without_gradient_stays_and_is_finite() -> None:
    parameters = [MATRIX, VECTOR]
    values = draw(parameters, 0, torch.float32)
    ranks = Ranks(Adafactor(), parameters, values, 1)
    for step in (1, 2):
        ranks.step([torch.zeros_like(value) for value in values], step)
    assert all(torch.equal(found, value) for found, value in zip(ranks.values(), values, strict=True))
    # A row of zeros divides by the root of eps1 alone.
    gradient = torch.ones_like(values[0])
    gradient[3] = 0
    ranks.step([gradient, torch.zeros_like(values[1])], 3)
    found = ranks.values()[0]
    assert found.isfinite().all()
    assert torch.equal(found[3], values[0][3])
    assert not torch.equal(found[4], values[0][4])


def test_two_sums_a_step_however_many_parameters_of_the_size_of_the_statistics() -> None:
    parameters = [MATRIX, STACK, VECTOR, *(Parameter(f"w{i}", (7, 5), 0, (0.5, 0.9)) for i in range(10))]
    optimizer = Adafactor()
    ranks = Ranks(optimizer, parameters, draw(parameters, 0), 2)
    assert ranks.step(draw(parameters, 1), 1) == 2
    uncut = [Parameter("a", (6, 9)), Parameter("b", (4,))]
    fragments = Ranks(optimizer, uncut, draw(uncut, 0), 1).fragments[0, 0]
    asked = list(optimizer.update(fragments, lr=1e-2, step=1, scale=1.0))
    assert [[(len(s.tensor), s.split) for s in sums] for sums in asked] == [[(6 + 9 + 1 + 1, False)], [(2, False)]]


def test_ranks_that_share_a_tensor_keep_the_same_statistics() -> None:
    # Of the last, one rank has all, and updates it before the sums.
    ranks = train(Adafactor(), Layout((MATRIX, STACK, Parameter("down", (8, 6), None, (0.0, 1.0))), 2), 0)
    for t, index in itertools.product(range(2), range(3)):
        states = [ranks.fragments[t, z][index].state for z in range(3)]
        for name in states[0]:
            assert all(torch.equal(state[name], states[0][name]) for state in states), name
    rows = torch.cat([ranks.fragments[t, 0][1].state["stacked_row_moment"] for t in range(2)], 1)
    whole = train(Adafactor(), Layout((MATRIX, STACK), 2).uncut, 0).fragments[0, 0][1].state
    torch.testing.assert_close(rows, whole["stacked_row_moment"], rtol=1e-12, atol=0)
    column = ranks.fragments[1, 2][1].state["stacked_column_moment"]
    torch.testing.assert_close(column, whole["stacked_column_moment"], rtol=1e-12, atol=0)


@pytest.mark.parametrize("setting", [{"clip_threshold": 0.0}, {"decay_rate": 0.0}, {"decay_rate": 1.5}])
def test_settings_out_of_range_are_refused(setting: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"optimizer.{next(iter(setting))} = .* is out of range; give above 0"):
        Adafactor(**setting)


def test_boxes_cover_a_fragment_once_and_are_no_larger_than_asked() -> None:
    for shape, start, stop, limit in [
        ((7, 5), 3, 33, 10),
        ((4, 3, 5), 7, 52, 16),
        ((4, 3, 5), 0, 60, 40),
        ((2, 2, 40), 5, 155, 8),
        ((1, 60), 2, 59, 8),
        ((3, 1, 4), 1, 12, 4),
        ((5, 6), 9, 9, 4),
    ]:
        numbers = torch.arange(math.prod(shape)).view(shape)
        seen: list[int] = []
        for box, first, last in _boxes(shape, start, stop, limit):
            assert last - first <= max(limit, shape[-1])
            assert box.of(numbers).reshape(-1).tolist() == list(range(first + start, last + start))
            seen.extend(range(first + start, last + start))
        assert seen == list(range(start, stop))
