"""Cross-entropy over divided logits against the dense one (CASES 7 and 8)."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from shardwise.exchange import Exchange
from shardwise.layout import share
from shardwise.loss import CrossEntropy, cross_entropy_with
from shardwise.mesh import Mesh
from shardwise.tensor_parallel import cross_entropy
from shardwise.tensor_parallel.cross_entropy import divided_cross_entropy
from shardwise.tensor_parallel.region import Region
from tests.pool import run_ranks


def example(vocabulary: int, tokens: int, scale: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(1, tokens, vocabulary, generator=generator, dtype=torch.float64) * scale
    targets = torch.randint(0, vocabulary, (1, tokens), generator=generator)
    targets[0, ::3] = -100
    return logits, targets


def divided(
    ranks: int, vocabulary: int, tokens: int, scale: float, terms: CrossEntropy, chunk: int
) -> tuple[Tensor, Tensor]:
    axis = Mesh({"tensor": ranks}).axis("tensor")
    region = Region(axis, False, Exchange(axis, torch.device("cpu")))
    logits, targets = example(vocabulary, tokens, scale)
    start, stop = share(vocabulary, axis.rank, ranks)
    mine = logits[..., start:stop].clone().requires_grad_()
    with patch.object(cross_entropy, "CHUNK_ELEMENTS", chunk):
        loss = divided_cross_entropy(mine, targets, terms, region, vocabulary)
        loss.backward()
    region.exchange.close()
    assert mine.grad is not None
    return loss.detach(), mine.grad


@pytest.mark.parametrize("terms", [CrossEntropy(), CrossEntropy(0.1), CrossEntropy(0.0, 1e-2), CrossEntropy(0.3, 1e-3)])
@pytest.mark.parametrize(
    ("ranks", "vocabulary", "tokens", "scale", "chunk"),
    [(2, 8, 6, 1.0, 1 << 18), (2, 8, 6, 1000.0, 8), (3, 11, 5, 3.0, 1), (4, 3, 7, 1.0, 2), (2, 9, 1, 1.0, 4)],
)
def test_equals_the_dense_loss(
    ranks: int, vocabulary: int, tokens: int, scale: float, chunk: int, terms: CrossEntropy
) -> None:
    logits, targets = example(vocabulary, tokens, scale)
    logits.requires_grad_()
    expected = cross_entropy_with(terms.label_smoothing, terms.z_loss).sum(logits, targets)
    expected.backward()
    results = run_ranks(divided, ranks, ranks, vocabulary, tokens, scale, terms, chunk)
    found = torch.cat([gradient for _, gradient in results], -1)
    assert logits.grad is not None
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found, logits.grad, rtol=1e-12, atol=1e-12)
    for loss, _ in results:
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
        assert torch.equal(loss, results[0][0])


def test_every_shard_gets_softmax_minus_one_hot() -> None:
    logits, targets = example(8, 4, 1.0)
    results = run_ranks(divided, 2, 2, 8, 4, 1.0, CrossEntropy(), 1 << 18)
    expected = logits.softmax(-1)
    counted = targets != -100
    expected[counted, targets[counted]] -= 1
    expected[~counted] = 0
    torch.testing.assert_close(torch.cat([gradient for _, gradient in results], -1), expected)
    assert all(gradient[counted].abs().min() > 0 for _, gradient in results)


def outside() -> str:
    axis = Mesh({"tensor": 2}).axis("tensor")
    region = Region(axis, False, Exchange(axis, torch.device("cpu")))
    try:
        divided_cross_entropy(torch.zeros(1, 4), torch.tensor([8]), CrossEntropy(), region, 8)
    except IndexError as error:
        return str(error)
    return ""


def test_a_target_outside_the_vocabulary_is_an_error_as_on_one_device() -> None:
    assert all("outside the 8 tokens" in text for text in run_ranks(outside, 2))


@pytest.mark.parametrize("wrong", [{"label_smoothing": 1.5}, {"label_smoothing": -0.1}, {"z_loss": -1.0}])
def test_terms_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="choose"):
        cross_entropy_with(**wrong)
