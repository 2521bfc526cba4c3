"""Gradient descent on flat fragments."""

import pytest
import torch

from shardwise.optimizers import SGD
from tests.optimizers.whole import compare, fragment_of


@pytest.mark.parametrize(
    "optimizer",
    [SGD(), SGD(weight_decay=0.2), SGD(momentum=0.9), SGD(momentum=0.8, nesterov=True, weight_decay=0.1)],
    ids=str,
)
@pytest.mark.parametrize("scales", [(1.0, 1.0, 1.0), (0.25, 1.0, 1e-3)])
def test_updates_are_those_of_an_independent_implementation(optimizer: SGD, scales: tuple[float, ...]) -> None:
    compare(optimizer, torch.float64, scales, (1e-2, 3e-2, 1e-3), 1e-13)


def test_without_momentum_there_is_no_state() -> None:
    assert fragment_of(SGD(), torch.zeros(3), torch.zeros(3), decay=False).state == {}
    state = fragment_of(SGD(momentum=0.5), torch.zeros(3), torch.zeros(3), decay=False).state
    assert {name: tensor.shape for name, tensor in state.items()} == {"velocity": (3,)}


def test_looking_ahead_without_momentum_is_refused() -> None:
    with pytest.raises(ValueError, match=r"nesterov = true .* set optimizer\.momentum"):
        SGD(nesterov=True)
