"""Your own module over two ranks, and the proof that they compute what one device would.

torchrun --nproc-per-node 2 examples/own_module.py [pipeline]
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import shardwise


def classifier() -> nn.Module:
    """Any module will do. On the meta device it holds no values: a rank draws what it needs, the same in any layout."""
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))


def batch(step: int, rows: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step, the same on every rank: which quadrant the first two features point to."""
    inputs = torch.randn(rows, 16, generator=torch.Generator().manual_seed(step))
    return inputs, 2 * (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()


def main(plan: shardwise.Plan, steps: int = 200) -> float:
    """Verifies the plan, trains, and returns the last loss."""
    optimizer = shardwise.AdamW(lr=3e-3)
    exact = plan.replace(precision="fp64")
    report = shardwise.verify(classifier(), exact, [batch(step) for step in range(3)], optimizer=optimizer)
    parallel = shardwise.parallelize(classifier(), plan, optimizer=optimizer)
    if parallel.mesh.rank == 0:
        print(report.describe())
    for step in range(steps):
        metrics = parallel.step(parallel.share(batch(step)))
        loss = metrics.loss
        if parallel.mesh.rank == 0 and (step + 1) % 50 == 0:
            print(f"step {step + 1}: loss {loss:.4f}")
    parallel.close()
    return loss


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    world = dist.get_world_size() if dist.is_initialized() else 1
    how = "pipeline" if sys.argv[1:] == ["pipeline"] else "replicate"
    main(shardwise.Plan(**{how: world}, microbatches=2))
    if dist.is_initialized():
        dist.destroy_process_group()
