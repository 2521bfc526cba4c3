"""Losses are sums over targets, divided once by how many there are."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise.loss import IGNORED, CrossEntropy, Loss, as_loss, count_targets, cross_entropy, cross_entropy_with


def sample(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn((3, 5, 11), generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(11, (3, 5), generator=generator)
    targets[0, 2:] = IGNORED
    targets[2] = IGNORED
    return logits.requires_grad_(), targets


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_cross_entropy_and_its_gradient_are_torchs_summed(smoothing: float, z_loss: float) -> None:
    logits, targets = sample()
    loss = cross_entropy_with(smoothing, z_loss)
    found = loss.sum(logits, targets)
    (gradient,) = torch.autograd.grad(found, logits, torch.tensor(0.3, dtype=torch.float64))
    flat, flat_targets = logits.reshape(-1, 11), targets.reshape(-1)
    expected = F.cross_entropy(flat, flat_targets, reduction="sum", label_smoothing=smoothing)
    expected = expected + z_loss * (flat.logsumexp(1) ** 2)[flat_targets != IGNORED].sum()
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(gradient, torch.autograd.grad(0.3 * expected, logits)[0], rtol=1e-12, atol=1e-15)
    assert int(loss.count(targets)) == 7


def test_a_loss_over_more_elements_than_a_chunk_is_whole() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn((9, 100_000), generator=generator, requires_grad=True)  # three rows to a chunk
    targets = torch.randint(100_000, (9,), generator=generator)
    (gradient,) = torch.autograd.grad(cross_entropy.sum(logits, targets), logits)
    expected = torch.autograd.grad(F.cross_entropy(logits, targets, reduction="sum"), logits)[0]
    torch.testing.assert_close(gradient, expected)


def test_half_precision_logits_are_summed_in_float32() -> None:
    logits, targets = sample(torch.bfloat16)
    found = cross_entropy.sum(logits, targets)
    assert found.dtype == torch.float32
    expected = F.cross_entropy(logits.float().reshape(-1, 11), targets.reshape(-1), reduction="sum")
    torch.testing.assert_close(found, expected)


def test_a_batch_without_targets_has_loss_zero_and_no_gradient() -> None:
    logits, targets = sample()
    targets.fill_(IGNORED)
    found = cross_entropy.sum(logits, targets)
    assert found.item() == 0.0
    assert not torch.autograd.grad(found, logits)[0].any()
    assert cross_entropy.sum(logits[:0], targets[:0]).item() == 0.0


def test_a_target_outside_the_vocabulary_is_an_error_and_not_a_wrong_number() -> None:
    logits, targets = sample()
    targets[0, 0] = 11
    with pytest.raises(IndexError, match="outside the 11 tokens"):
        cross_entropy.sum(logits, targets)


def test_logits_of_an_output_object_are_found() -> None:
    logits, targets = sample()
    assert torch.equal(cross_entropy.sum(SimpleNamespace(logits=logits), targets), cross_entropy.sum(logits, targets))


def test_targets_that_count() -> None:
    assert int(count_targets(torch.tensor([[1, IGNORED], [IGNORED, 0]]))) == 2
    assert int(count_targets(torch.rand(5, 3))) == 5  # values to predict: rows
    assert int(count_targets(torch.ones(4, 2, dtype=torch.bool))) == 4
    assert int(count_targets(torch.empty(0, 3, dtype=torch.int64))) == 0


def test_a_plain_function_is_a_loss() -> None:
    loss = as_loss(lambda output, targets: (output - targets).square().sum())
    assert isinstance(loss, Loss)
    assert loss.sum(torch.ones(2), torch.zeros(2)).item() == 2.0
    assert as_loss(cross_entropy) is cross_entropy


@pytest.mark.parametrize(
    ("loss", "what"), [(CrossEntropy(0.1), "a CrossEntropy"), (CrossEntropy, "the class"), (3.0, "a float")]
)
def test_what_is_no_loss_is_refused_with_what_to_give(loss: Any, what: str) -> None:
    with pytest.raises(ValueError, match=rf"^loss is {what}.*; give shardwise.cross_entropy_with\(.*$"):
        as_loss(loss)


@pytest.mark.parametrize(("terms", "line"), [((1.5, 0.0), "label_smoothing = 1.5"), ((0.0, -1.0), "z_loss = -1.0")])
def test_terms_out_of_range_are_refused(terms: tuple[float, float], line: str) -> None:
    with pytest.raises(ValueError, match=f"{line} .*; choose"):
        cross_entropy_with(*terms)
