"""Batches: rows of every tensor go together, whatever holds them."""

import pytest
import torch
from torch import Tensor

from shardwise import batch as batches

TOKENS = torch.arange(14).view(7, 2)
FORMS = {
    "tensor": TOKENS,
    "tuple": (TOKENS, TOKENS.double() / 2),
    "names": {"tokens": TOKENS, "scale": TOKENS.double(), "flag": True},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num", [1, 2, 3, 7, 9])
def test_microbatches_are_consecutive_rows_and_miss_none(form: str, num: int) -> None:
    batch = (FORMS[form], TOKENS[:, 0])
    parts = [batches.microbatch(batch, number, num) for number in range(num)]
    assert torch.equal(torch.cat([targets for _, targets in parts]), TOKENS[:, 0])
    for number, whole in enumerate(batches.tensors(batch[0])):
        assert torch.equal(torch.cat([batches.tensors(inputs)[number] for inputs, _ in parts]), whole)
    sizes = {batches.num_rows(part) for part in parts}
    assert max(sizes) - min(sizes) <= 1
    if form == "names":
        assert all(inputs["flag"] is True for inputs, _ in parts)


def test_rows_are_views() -> None:
    inputs, _ = batches.rows((TOKENS, TOKENS), 2, 5)
    assert isinstance(inputs, Tensor)
    assert inputs.data_ptr() == TOKENS[2:].data_ptr()


def test_precision_is_that_of_floating_point_tensors_alone() -> None:
    (inputs, targets) = batches.in_precision((FORMS["names"], torch.rand(7)), torch.float64)
    assert inputs["tokens"].dtype == torch.int64
    assert targets.dtype == torch.float64


def test_the_signature_is_of_shapes_alone() -> None:
    assert batches.signature(FORMS["names"]) == ((7, 2), (7, 2))
    assert batches.signature(TOKENS[:3]) != batches.signature(TOKENS)


def test_tensors_of_different_numbers_of_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"same number of rows \(dim 0\), not \[3, 7\]"):
        batches.num_rows(({"tokens": TOKENS}, TOKENS[:3]))
