"""What is kept for backward and what is sent, counted, against the formulas of arXiv 1909.08053 and 2205.05198."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.models import build
from shardwise.models.config import ModelConfig
from shardwise.optimizers import SGD
from shardwise.parallelize import parallelize
from shardwise.plan import Plan
from tests.pool import run_ranks

ROWS, LENGTH, HIDDEN, HEADS, VOCABULARY = 2, 64, 256, 4, 8


def counts(layers: int, tensor: int, sequence: bool) -> tuple[float, float]:
    """Bytes kept by the forward of a model, and elements sent by a step of it."""
    config = ModelConfig(
        family="gpt2", layers=layers, hidden=HIDDEN, heads=HEADS, sequence=LENGTH, dropout=0.1, tied=False
    )
    model = build(config, VOCABULARY)
    for block in model.blocks:
        block.attention.core.dropout = (
            0.0  # the fused attention, which keeps no weights: the selective case of the paper
        )
    parallel = parallelize(model, Plan(tensor=tensor, sequence=sequence), optimizer=SGD(lr=0.1))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, tuple[int, Tensor]] = {}

    def pack(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        parallel.step(({"tokens": tokens}, tokens))
    division = next(iter(parallel._assembly.closes), None)
    elements = division.region.exchange.elements if division is not None else 0.0
    parallel.close()
    return float(sum(size for size, _ in kept.values())), elements


def a_layer(tensor: int, sequence: bool) -> list[tuple[float, float]]:
    """What one more layer adds, by rank."""
    found = [run_ranks(counts, tensor, layers, tensor, sequence) for layers in (1, 2)]
    return [(more[0] - less[0], more[1] - less[1]) for less, more in zip(*found, strict=True)]


def formula(tensor: int, sequence: bool, itemsize: int = 4) -> float:
    """sbh (34), (10 + 24 / t) or 34 / t bytes, without attention weights: 2 bytes an activation become `itemsize`, and
    so does the byte of a dropout mask, which the CPU keeps as a number."""
    whole, divided = (
        4 + 2,
        12,
    )  # elements a position and channel: norms' and layers' inputs and masks; inside attention and feed-forward
    per_channel = (whole + divided) / tensor if sequence else whole + divided / tensor
    return ROWS * LENGTH * HIDDEN * per_channel * itemsize


@pytest.mark.parametrize(("tensor", "sequence"), [(1, False), (2, False), (2, True), (4, False), (4, True)])
def test_activation_memory_is_that_of_the_formulas(tensor: int, sequence: bool) -> None:
    for kept, _ in a_layer(tensor, sequence):
        assert kept == pytest.approx(formula(tensor, sequence), rel=0.01)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("tensor", [2, 4])
def test_what_is_sent_is_that_of_the_formulas(tensor: int, sequence: bool) -> None:
    # With the sequence split, inputs of column layers are gathered once more in backward (2205.05198, section 4.2.2).
    times = 8 + (2 if sequence else 0)
    for _, elements in a_layer(tensor, sequence):
        assert elements == times * ROWS * LENGTH * HIDDEN * (tensor - 1) / tensor


def exchanges(sequence: bool) -> Any:
    """The sizes of the exchanges of a step of one layer, forward and backward."""
    config = ModelConfig(family="llama", layers=1, hidden=8, heads=2, intermediate=8, sequence=LENGTH)
    parallel = parallelize(build(config, VOCABULARY), Plan(tensor=2, sequence=sequence), optimizer=SGD(lr=0.1))
    (division,) = parallel._assembly.closes
    exchange, sizes = division.region.exchange, []
    start_sum, gather = exchange.start_sum, exchange.gather

    def summed(buffer: Tensor, dim: int | None = None) -> Any:
        sizes.append(("sum", buffer.numel()))
        return start_sum(buffer, dim)

    def gathered(shard: Tensor, dim: int, length: int) -> Tensor:
        sizes.append(("gather", shard.numel()))
        return gather(shard, dim, length)

    exchange.start_sum, exchange.gather = summed, gathered
    tokens = torch.zeros(1, LENGTH, dtype=torch.int64)
    parallel.step(({"tokens": tokens}, tokens))
    parallel.close()
    return sizes


def test_logits_are_never_gathered_and_queries_keys_and_values_share_one_exchange() -> None:
    for sizes in run_ranks(exchanges, 2, False):
        # The embedding, two sums forward, four numbers a token for the loss; the head's gradient, two sums backward.
        assert sizes == [("sum", LENGTH * 8)] * 3 + [("gather", 4 * LENGTH)] + [("sum", LENGTH * 8)] * 3
