"""Context parallelism against one device: ring and Ulysses, whatever the lengths, heads, documents and other axes."""

from typing import Any

import pytest
import torch

from shardwise.models import build
from shardwise.models.config import ModelConfig
from shardwise.optimizers import SGD, AdamW
from shardwise.plan import Plan
from shardwise.verify import Report, verify
from tests.pool import run_ranks

VOCABULARY = 23


def make_batches(lengths: list[int], rows: int, documents: bool, positions: bool = False) -> list[Any]:
    """Global batches whose lengths change from step to step, with ignored targets."""
    generator = torch.Generator().manual_seed(sum(lengths))
    found = []
    for length in lengths:
        tokens, targets = torch.randint(0, VOCABULARY, (2, rows, length), generator=generator)
        targets[torch.rand(targets.shape, generator=generator) < 0.3] = -100
        inputs = {"tokens": tokens}
        if documents:
            inputs["documents"] = torch.randint(0, 2, (rows, length), generator=generator).cumsum(1) // 2
        if positions:
            inputs["positions"] = torch.randint(0, 16, (rows, length), generator=generator)
        found.append((inputs, targets))
    return found


def check(plan: dict[str, Any], model: dict[str, Any], job: dict[str, Any]) -> Report:
    config = ModelConfig(**{"layers": 2, "hidden": 24, "heads": 6, "intermediate": 20, "sequence": 64, **model})
    full = Plan(precision="fp64", **plan)
    rows = full.data_parallel * full.microbatches + job.get("more", 0)
    return verify(
        build(config, VOCABULARY),
        full,
        make_batches(job.get("lengths", [13, 8]), rows, job.get("documents", False), job.get("positions", False)),
        optimizer=AdamW(lr=1e-2, eps=1e-3) if job.get("adamw") else SGD(lr=0.5, momentum=0.9),
        clip=job.get("clip", 1.0),
    )


def assert_agrees(plan: dict[str, Any], model: dict[str, Any], job: dict[str, Any]) -> None:
    reports = run_ranks(check, Plan(**plan).num_ranks, plan, model, job)
    assert all(report.agrees for report in reports), reports[0].describe()
    assert {difference.kind for difference in reports[0].differences} >= {"loss", "gradient", "parameter"}


@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize(
    ("plan", "model", "job"),
    [
        ({"context": 2}, {}, {"adamw": True}),
        ({"context": 2}, {"family": "llama", "kv_heads": 2}, {"documents": True}),
        ({"context": 2}, {"family": "mistral", "kv_heads": 3, "window": 4}, {"documents": True, "lengths": [31]}),
        ({"context": 3}, {"family": "llama", "kv_heads": 2}, {"documents": True}),
        ({"context": 3}, {"family": "qwen", "window": 3}, {"lengths": [1, 2, 5]}),
        ({"context": 2, "pipeline": 2, "microbatches": 3}, {"family": "llama", "kv_heads": 3}, {"documents": True}),
        ({"context": 2, "pipeline": 2, "schedule": "zb-h1", "microbatches": 2}, {"tied": True}, {"lengths": [9]}),
        ({"context": 2, "pipeline": 2, "schedule": "pipedream", "microbatches": 3}, {"tied": False}, {}),
        ({"context": 2, "replicate": 2}, {"family": "llama", "kv_heads": 1}, {"documents": True, "more": 1}),
        ({"context": 2, "shard": 2, "microbatches": 2}, {}, {"more": 1, "positions": True}),
    ],
    ids=str,
)
def test_equals_one_device(plan: dict[str, Any], model: dict[str, Any], job: dict[str, Any], method: str) -> None:
    assert_agrees({**plan, "context_method": method}, model, job)
