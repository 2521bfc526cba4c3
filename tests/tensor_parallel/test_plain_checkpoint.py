"""`Parallel.state_dict()` through torch.distributed.checkpoint itself, with no help of ours."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from shardwise.models import build
from shardwise.models.config import ModelConfig
from shardwise.optimizers import AdamW
from shardwise.parallel import Parallel
from shardwise.parallelize import parallelize
from shardwise.plan import Plan
from tests.pool import run_ranks

CONFIG = ModelConfig(family="llama", layers=1, hidden=12, heads=2, intermediate=7, sequence=8)


def made(plan: dict[str, Any], seed: int) -> Parallel:
    return parallelize(build(CONFIG, 11), Plan(precision="fp64", **plan), optimizer=AdamW(lr=1e-2), seed=seed)


def tensors(parallel: Parallel) -> dict[str, Tensor]:
    """All parameters, whole, and this rank's part of the moments of one divided matrix, whole on no rank."""
    found = parallel.full_parameters()
    tokens = torch.arange(8).view(2, 4)
    parallel.step(parallel.share(({"tokens": tokens}, tokens)))  # what the moments lead to
    return {**found, **{f"after {name}": value for name, value in parallel.full_parameters().items()}}


def save(plan: dict[str, Any], folder: str) -> dict[str, Tensor]:
    parallel = made(plan, 1)
    tokens = torch.arange(8).view(2, 4)
    parallel.step(parallel.share(({"tokens": tokens}, tokens)))
    dcp.save(parallel.state_dict(), checkpoint_id=folder)
    found = tensors(parallel)
    parallel.close()
    return found


def load(plan: dict[str, Any], folder: str) -> dict[str, Tensor]:
    parallel = made(plan, 2)
    dcp.load(parallel.state_dict(), checkpoint_id=folder)
    parallel.loaded()
    found = tensors(parallel)
    parallel.close()
    return found


@pytest.mark.parametrize("plan", [{"tensor": 2}, {"shard": 2, "zero": 3}], ids=str)
def test_divided_parameters_are_saved_and_loaded_by_torch_itself(tmp_path: Path, plan: dict[str, Any]) -> None:
    before = run_ranks(save, 2, plan, str(tmp_path))[0]
    for after in run_ranks(load, 2, {"tensor": 2, "sequence": True}, str(tmp_path)):
        for name, value in before.items():
            torch.testing.assert_close(after[name], value, rtol=0 if "after" not in name else 1e-9, atol=1e-12)


def computed() -> str:
    parallel = made({"tensor": 2}, 1)
    try:
        parallel.state_dict()["model/head.output.weight"] + 1
    except RuntimeError as error:
        return str(error)
    finally:
        parallel.close()
    return ""


def test_computing_with_pieces_says_what_they_are() -> None:
    assert all("parallel.full_parameters()" in text for text in run_ranks(computed, 2))
