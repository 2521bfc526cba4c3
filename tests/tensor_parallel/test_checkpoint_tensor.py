"""A checkpoint written at one size of the tensor axis is read at another, moments included."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.models import build
from shardwise.models.config import ModelConfig
from shardwise.optimizers import Adafactor, AdamW
from shardwise.parallel import Parallel
from shardwise.parallelize import parallelize
from shardwise.plan import Plan
from shardwise.training import storage
from shardwise.training.checkpoints import Checkpoints, find
from shardwise.training.config import CheckpointConfig
from shardwise.training.ranks import Ranks
from tests.pool import run_ranks

VOCABULARY = 19


OPTIMIZERS = {"adamw": AdamW(lr=1e-2), "adafactor": Adafactor()}


def make(plan: dict[str, Any], seed: int, optimizer: str) -> Parallel:
    config = ModelConfig(
        family="qwen",
        query_key_norm=True,
        layers=2,
        hidden=24,
        heads=4,
        kv_heads=2,
        intermediate=7,
        sequence=8,
        tied=True,
    )
    full = Plan(precision="fp64", **plan)
    return parallelize(build(config, VOCABULARY), full, optimizer=OPTIMIZERS[optimizer], seed=seed)


def train(parallel: Parallel) -> float:
    tokens = torch.arange(8).view(2, 4) + 7
    return parallel.step(parallel.share(({"tokens": tokens}, tokens.roll(1, 1)))).loss


def save(plan: dict[str, Any], optimizer: str, folder: str) -> tuple[float, dict[str, Tensor]]:
    parallel = make(plan, 0, optimizer)
    train(parallel)
    checkpoints = Checkpoints(
        Path(folder), CheckpointConfig(asynchronous=False), Ranks.world(60), Ranks.world(60), print
    )
    checkpoints.prepare()
    checkpoints.save_last(1, parallel.state_dict(), {})
    checkpoints.close()
    parameters = {name: value.clone() for name, value in parallel.full_parameters().items()}
    loss = [train(parallel), train(parallel)][-1]
    parallel.close()
    return loss, parameters


def load(plan: dict[str, Any], optimizer: str, folder: str) -> tuple[float, dict[str, Tensor]]:
    parallel = make(plan, 1, optimizer)
    train(parallel)
    storage.load(parallel.state_dict(), find(Path(folder), print, Ranks.world(60)), Ranks.world(60))
    parallel.loaded()
    parameters = {name: value.clone() for name, value in parallel.full_parameters().items()}
    loss = [train(parallel), train(parallel)][-1]
    parallel.close()
    return loss, parameters


@pytest.mark.parametrize(
    ("written", "read", "optimizer"),
    [
        ({"tensor": 2}, {}, "adamw"),
        ({}, {"tensor": 2, "sequence": True}, "adamw"),
        ({"tensor": 4, "sequence": True}, {"tensor": 2, "pipeline": 2, "microbatches": 1}, "adamw"),
        ({"tensor": 4}, {"tensor": 2}, "adafactor"),
    ],
    ids=str,
)
def test_another_layout_goes_on_where_one_stopped(
    written: dict[str, Any], read: dict[str, Any], optimizer: str, tmp_path: Path
) -> None:
    loss, parameters = run_ranks(save, Plan(**written).num_ranks, written, optimizer, str(tmp_path))[0]
    for found, held in run_ranks(load, Plan(**read).num_ranks, read, optimizer, str(tmp_path)):
        assert found == pytest.approx(loss, rel=1e-12)
        assert all(torch.equal(held[name], value) for name, value in parameters.items())
        assert held.keys() == parameters.keys()
