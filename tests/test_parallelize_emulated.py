"""Plans over two ranks whose accelerators are emulated: what they compute is what CPUs do, and with state elsewhere the
same bits. After `make emulator`; skipped without."""

import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from shardwise import models
from shardwise.mesh import Mesh
from shardwise.optimizers import SGD
from shardwise.parallelize import parallelize
from shardwise.plan import Plan
from tests import emulator
from tests.emulator import group
from tests.models.cases import CONFIGS, VOCABULARY

pytestmark = emulator.needed

EVERY = ("parameters", "gradients", "optimizer")
PLANS: list[dict[str, Any]] = [
    {"replicate": 2},
    {"shard": 2, "zero": 2, "microbatches": 2},
    {"shard": 2, "zero": 3},
    {"pipeline": 2, "microbatches": 4, "schedule": "zb-h1"},
    {"tensor": 2, "sequence": True},
    {"context": 2, "zero": 3},
    {"shard": 2, "zero": 3, "precision": "bf16", "kinds": (*EVERY, "master")},
    {"shard": 2, "zero": 3, "microbatches": 2, "kinds": ("parameters", "gradients")},
    {"shard": 2, "zero": 2, "microbatches": 2, "kinds": ("gradients", "optimizer")},
    {"pipeline": 2, "microbatches": 4, "schedule": "zb-h1", "zero": 3, "kinds": EVERY},
]


def parameters(plan: dict[str, Any], device: str, in_memory: bool) -> dict[str, torch.Tensor]:
    settings = {key: value for key, value in plan.items() if key != "kinds"}
    built = Plan(**settings, offload=dict.fromkeys(plan.get("kinds", ()), "cpu"))
    with patch("shardwise.assembling.tiers_of", lambda *_: {}) if in_memory else patch.dict({}):
        model, mesh = models.build(CONFIGS["llama"], VOCABULARY), Mesh(built, device=device)
        parallel = parallelize(
            model, built, mesh=mesh, optimizer=SGD(lr=0.1, momentum=0.9), clip=0.5, bucket_bytes=4000
        )
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        tokens, targets = torch.randint(VOCABULARY, (2, 4, 12), generator=generator)
        parallel.step(parallel.share(({"tokens": tokens}, targets)))
    assert parallel.replicas_agree() is None
    found = {name: value.cpu() for name, value in parallel.full_parameters().items()}
    parallel.close()
    return found


def rank_of_two(rank: int, copies: int, kernels: int, store: str) -> list[str]:
    """What differs, on one of the ranks."""
    emulator.install().delays(copies, kernels)
    group.register()
    dist.init_process_group(group.NAME, store=dist.FileStore(store, 2), rank=rank, world_size=2)
    found = []
    for plan in PLANS:
        away = "kinds" in plan
        one = parameters(plan, emulator.NAME, in_memory=False)
        other = parameters(plan, emulator.NAME if away else "cpu", in_memory=away)
        same = torch.equal if away else lambda x, y: torch.allclose(x, y, rtol=1e-4, atol=1e-6)
        odd = [name for name, value in one.items() if not same(value, other[name])]
        found += [f"{plan}: {odd}"] if odd else []
    return found


@pytest.mark.parametrize(("copies", "kernels"), [(500, 0), (0, 200)])
def test_two_emulated_ranks_compute_what_two_cpus_do(copies: int, kernels: int, tmp_path: Path) -> None:
    with patch.dict(os.environ, GLOO_SOCKET_IFNAME="lo" if sys.platform == "linux" else ""):
        each = [[rank, copies, kernels, str(tmp_path / "store")] for rank in range(2)]
        assert emulator.apart_together(__name__, "rank_of_two", each) == [[], []]
