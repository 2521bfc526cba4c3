"""The summed cross-entropy, value and gradient, beside torch's."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.loss import IGNORED, cross_entropy


def _reference(logits: Tensor, targets: Tensor) -> Tensor:
    flat = logits.reshape(-1, logits.shape[-1]).double()
    return F.cross_entropy(flat, targets.reshape(-1), ignore_index=IGNORED, reduction="sum")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [1, 7, 300_000])  # one token a chunk, and several
def test_value_and_gradient(dtype: torch.dtype, vocabulary: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 3, vocabulary).to(dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (2, 3))
    targets[0, 1] = IGNORED
    other = logits.detach().clone().requires_grad_()
    loss, expected = cross_entropy.sum(logits, targets), _reference(other, targets)
    (loss / 5).backward()
    (expected / 5).backward()
    accuracy = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(loss.detach().double(), expected.detach(), rtol=min(accuracy, 1e-5), atol=1e-12)
    torch.testing.assert_close(logits.grad, other.grad, rtol=accuracy, atol=1e-8)
    with torch.no_grad():
        assert cross_entropy.sum(logits, targets) == loss.detach()


def test_nothing_counts() -> None:
    logits = torch.randn(2, 5, requires_grad=True)
    loss = cross_entropy.sum(logits, torch.full((2,), IGNORED))
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()
    cross_entropy.sum(torch.randn(0, 5, requires_grad=True), torch.zeros(0, dtype=torch.int64)).backward()


@pytest.mark.parametrize("target", [5, -1])
def test_a_target_outside_the_vocabulary(target: int) -> None:
    with pytest.raises(IndexError, match="outside the 5 tokens"):
        cross_entropy.sum(torch.randn(2, 5), torch.tensor([0, target]))
