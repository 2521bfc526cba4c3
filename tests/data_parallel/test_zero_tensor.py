"""ZeRO with tensor parallelism: a parameter's piece is divided once more, and every optimizer sees the whole matrix."""

import tempfile
from typing import Any

import pytest
import torch

from shardwise.models import ModelConfig, build
from shardwise.optimizers import Adafactor, AdamW, Lion, Muon
from shardwise.plan import Plan
from shardwise.verify import Report, verify
from tests.pool import apart, run_ranks
from tests.tensor_parallel.test_division import GPT2_SIX, LLAMA, VOCABULARY, make_batches

OPTIMIZERS = {
    "adamw": AdamW(lr=1e-2, weight_decay=0.3),
    "adafactor": Adafactor(momentum=0.9),
    "muon": Muon(lr=1e-2, weight_decay=0.1),
    "lion": Lion(lr=1e-2, weight_decay=0.1),
}
ONE_HEAD = {**LLAMA, "kv_heads": 1}
UNEVEN = {**LLAMA, "heads": 3, "kv_heads": 3, "intermediate": 20}
DISK = {"optimizer": f"disk:{tempfile.gettempdir()}/shardwise-tests"}


def check(plan: dict[str, Any], model: dict[str, Any], optimizer: str, own_machines: bool) -> Report:
    full = Plan(**{"precision": "fp64", **plan})
    torch.manual_seed(3)
    with apart(own_machines):
        return verify(
            build(ModelConfig(**{"layers": 2, "sequence": 16, **model}), VOCABULARY),
            full,
            make_batches(2, full.data_parallel * full.microbatches + 1, 7),
            optimizer=OPTIMIZERS[optimizer],
            clip=0.5,
            bucket_bytes=600,
        )


@pytest.mark.parametrize(
    ("plan", "model", "optimizer", "own_machines"),
    [
        ({"shard": 2, "zero": 1}, LLAMA, "adafactor", False),
        ({"shard": 2, "zero": 1, "sequence": True}, GPT2_SIX, "adamw", True),
        ({"shard": 2, "zero": 2, "microbatches": 2}, LLAMA, "adafactor", False),
        ({"shard": 2, "zero": 2, "sequence": True}, LLAMA, "muon", False),
        ({"shard": 2, "zero": 3}, LLAMA, "adafactor", False),
        ({"shard": 2, "zero": 3, "sequence": True, "microbatches": 2}, LLAMA, "adafactor", True),
        ({"shard": 2, "zero": 3, "sequence": True}, LLAMA, "muon", False),
        ({"shard": 2, "zero": 3}, LLAMA, "lion", True),
        ({"shard": 2, "zero": 3, "microbatches": 2}, GPT2_SIX, "adamw", False),
    ],
    ids=str,
)
def test_tensor_and_zero_equal_one_device(
    plan: dict[str, Any], model: dict[str, Any], optimizer: str, own_machines: bool
) -> None:
    plan = {"tensor": 2, **plan}
    reports = run_ranks(check, Plan(**plan).num_ranks, plan, model, optimizer, own_machines)
    assert all(report.agrees for report in reports), reports[0].describe()


@pytest.mark.parametrize(
    ("plan", "model", "optimizer"),
    [
        ({"tensor": 2}, ONE_HEAD, "muon"),
        ({"tensor": 2}, ONE_HEAD, "adafactor"),
        ({"tensor": 6}, {**LLAMA, "kv_heads": 3}, "muon"),
        ({"tensor": 2, "shard": 2, "zero": 3, "sequence": True}, ONE_HEAD, "muon"),
    ],
    ids=str,
)
def test_a_head_that_several_ranks_hold_counts_once_in_the_sums_of_an_update(
    plan: dict[str, Any], model: dict[str, Any], optimizer: str
) -> None:
    reports = run_ranks(check, Plan(**plan).num_ranks, plan, model, optimizer, False)
    assert all(report.agrees for report in reports), reports[0].describe()


@pytest.mark.parametrize(
    ("plan", "optimizer"),
    [
        ({"precision": "bf16-pure"}, "muon"),
        ({"offload": DISK}, "adafactor"),
        ({"offload": DISK, "shard": 2, "zero": 1}, "muon"),
    ],
    ids=str,
)
def test_ranks_with_pieces_of_different_sizes_update_the_same_buckets_together(
    plan: dict[str, Any], optimizer: str
) -> None:
    plan = {"tensor": 3, **plan}
    reports = run_ranks(check, Plan(**plan).num_ranks, plan, UNEVEN, optimizer, False)
    assert all(report.agrees for report in reports), reports[0].describe()
