"""Between pipeline stages on different machines each tensor rank sends its share, and the receivers gather."""

from typing import Any

import pytest
from torch import Tensor

from shardwise.models import build
from shardwise.models.config import ModelConfig
from shardwise.optimizers import SGD
from shardwise.pipeline_parallel import post
from shardwise.plan import Plan
from shardwise.verify import verify
from tests.pool import run_ranks
from tests.tensor_parallel.test_division import LLAMA, VOCABULARY, make_batches

ROWS, LENGTH, MICROBATCHES = 4, 5, 2


def sent(plan: dict[str, Any]) -> tuple[bool, str, int]:
    """Whether the plan agrees with one device, in words, and the floating-point elements this rank sent to others."""
    numbers: list[int] = []

    class Counted(post.GroupPost):
        def send(self, tensor: Tensor, peer: int, tag: int) -> None:
            numbers.append(tensor.numel() if tensor.is_floating_point() else 0)
            super().send(tensor, peer, tag)

    connect = post.connect
    post.connect = lambda axis, device: Counted(axis)  # as if the stages were on different machines
    try:
        full = Plan(precision="fp64", microbatches=MICROBATCHES, **plan)
        model = build(ModelConfig(**{**LLAMA, "layers": 4, "sequence": 16}), VOCABULARY)
        report = verify(model, full, make_batches(1, ROWS, LENGTH), optimizer=SGD(lr=0.1), clip=1.0)
    finally:
        post.connect = connect
    return report.agrees, report.describe(), sum(numbers)


@pytest.mark.parametrize(
    "plan",
    [
        {"tensor": 2, "pipeline": 2},
        {"tensor": 2, "pipeline": 2, "sequence": True},
        {"tensor": 2, "pipeline": 2, "chunks": 2, "schedule": "interleaved"},
    ],
    ids=str,
)
def test_a_tensor_rank_sends_its_share_only(plan: dict[str, Any]) -> None:
    results = run_ranks(sent, 4, plan)
    assert all(agrees for agrees, _, _ in results), results[0][1]
    # Activations one way and gradients the other, at every boundary.
    boundaries = 2 * plan.get("chunks", 1) - 1
    assert sum(numbers for _, _, numbers in results) == 2 * boundaries * ROWS * LENGTH * LLAMA["hidden"]
