"""AdamW on flat fragments."""

import pytest
import torch

from shardwise.optimizers import AdamW
from tests.optimizers.whole import compare, fragment_of, run


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
@pytest.mark.parametrize("scales", [(1.0, 1.0, 1.0, 1.0), (0.25, 1.0, 0.5, 1e-3)])
def test_updates_are_those_of_an_independent_implementation(
    dtype: torch.dtype, tolerance: float, scales: tuple[float, ...]
) -> None:
    compare(AdamW(betas=(0.8, 0.97), eps=1e-6, weight_decay=0.3), dtype, scales, (1e-2, 3e-2, 0.0, 1e-3), tolerance)


def test_the_first_step_moves_by_the_learning_rate_however_long_the_state_has_been_there() -> None:
    """CASES 18: not by 0.744 of it, which is what a step counter that began with the allocation gives."""
    parameter, gradient = torch.zeros(6), torch.tensor([3.0, -2.0, 1e-3, -1e3, 5.0, 7.0])
    optimizer = AdamW(eps=0.0, weight_decay=0.0)
    fragment = fragment_of(optimizer, parameter, gradient, decay=True)
    assert all(not moment.any() for moment in fragment.state.values())
    run(optimizer, [fragment], step=1, lr=0.01)
    torch.testing.assert_close(parameter, -0.01 * gradient.sign(), rtol=1e-6, atol=0)


def test_decay_applies_where_it_belongs_and_moments_take_no_notice() -> None:
    optimizer = AdamW(weight_decay=0.5)
    parameters = [torch.ones(3), torch.ones(3)]
    fragments = [
        fragment_of(optimizer, p, torch.zeros(3), decay) for p, decay in zip(parameters, (True, False), strict=True)
    ]
    run(optimizer, fragments, step=1, lr=0.1)
    assert parameters[0].tolist() == pytest.approx([0.95] * 3)
    assert parameters[1].tolist() == [1.0] * 3
    assert not any(moment.any() for fragment in fragments for moment in fragment.state.values())


def test_an_empty_fragment_is_left_out() -> None:
    optimizer = AdamW()
    fragment = fragment_of(optimizer, torch.zeros(0), torch.zeros(0), decay=True)
    run(optimizer, [fragment], step=1, lr=0.1)
    assert fragment.state["first_moment"].shape == (0,)
