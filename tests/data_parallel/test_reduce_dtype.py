"""Gradients that travel in another number format than they are kept in."""

from typing import Any

import pytest
import torch

from shardwise.data_parallel.reducer import Reducer
from shardwise.mesh import Mesh
from shardwise.optimizers import SGD, AdamW
from shardwise.parallelize import parallelize
from shardwise.plan import Plan
from shardwise.verify import verify
from tests.pool import run_ranks
from tests.small_models import build, make_batches
from tests.test_verify import apart

# In bf16, 256 + 1 is 256; added up in float32 the three make 258, which bf16 holds.
PARTS = (256.0, 1.0, 1.0)


def summed(link: bool) -> list[torch.Tensor]:
    found = []
    for sizes in ({"replicate": 3}, {"shard": 3}):
        mesh = Mesh(sizes)
        reducer = Reducer(mesh, link=link, sent=torch.bfloat16)
        flat = reducer.allocate(6, torch.float32, torch.device("cpu"))
        flat.tensor.fill_(PARTS[mesh.rank])
        flat.tensor[3] += 2**-10  # what bf16 cannot hold is lost on the way
        pending = reducer.all_reduce(flat) if "replicate" in sizes else reducer.reduce_scatter(flat)
        pending.wait()
        own = flat.tensor if "replicate" in sizes else flat.tensor.view(3, -1)[mesh.rank]
        found.append(own.clone())
        into = torch.ones(2)
        flat.tensor.fill_(PARTS[mesh.rank])
        if "shard" in sizes:
            reducer.reduce_scatter(flat, into).wait()
            found.append(into.clone())
        reducer.close()
    return found


@pytest.mark.parametrize("link", [True, False])
def test_parts_are_added_up_in_float32_whatever_they_travel_in(link: bool) -> None:
    for whole, own, added in run_ranks(summed, 3, link):
        assert torch.equal(whole, torch.full((6,), 258.0))
        assert torch.equal(own, torch.full((2,), 258.0))
        assert torch.equal(added, torch.full((2,), 259.0))


def differences(plan: dict[str, Any], own_machines: bool) -> tuple[str, float]:
    with apart(own_machines):
        report = verify(
            build({"num_blocks": 4, "tied": True}),
            Plan(**plan),
            make_batches(3, 12, 4),
            optimizer=AdamW(lr=1e-2),
            clip=1.0,
            bucket_bytes=600,
        )
    return "" if report.agrees else report.describe(), report.worst["gradient"].error


@pytest.mark.parametrize("own_machines", [False, True])
@pytest.mark.parametrize(
    "plan",
    [
        {"replicate": 2, "precision": "fp64", "reduce_dtype": "bf16"},
        {"shard": 3, "zero": 2, "microbatches": 2, "precision": "fp64", "reduce_dtype": "bf16"},
        {"shard": 2, "replicate": 2, "zero": 3, "precision": "fp16", "reduce_dtype": "fp16"},
        {"shard": 2, "zero": 1, "precision": "bf16", "reduce_dtype": "bf16"},
    ],
    ids=str,
)
def test_gradients_sent_in_16_bits_stay_within_their_bound(plan: dict[str, Any], own_machines: bool) -> None:
    for problem, error in run_ranks(differences, Plan(**plan).num_ranks, plan, own_machines):
        assert problem == ""
        assert error > 1e-4  # they were rounded


def moved(plan: dict[str, Any], own_machines: bool) -> tuple[float, int]:
    with apart(own_machines):
        parallel = parallelize(build({"num_blocks": 4}), Plan(**plan), optimizer=SGD(lr=0.1))
    parallel.step(parallel.share(make_batches(1, 6, 4)[0]))
    reducer = parallel.chunks[0].buckets.reducer
    found = reducer.gradient_bytes, sum(bucket.numel for bucket in parallel.chunks[0].buckets.buckets)
    parallel.close()
    return found


@pytest.mark.parametrize("own_machines", [False, True])
@pytest.mark.parametrize(("zero", "times"), [(0, 2), (1, 1), (3, 1)])
def test_bytes_of_gradients_are_those_of_the_format_they_travel_in(zero: int, times: int, own_machines: bool) -> None:
    for reduce_dtype, each in (("master", 4), ("bf16", 2)):
        plan = {"shard": 2, "zero": zero, "reduce_dtype": reduce_dtype}
        for found, numel in run_ranks(moved, 2, plan, own_machines):
            assert found == times * each * numel / 2


def test_what_cannot_gain_is_refused_with_the_reason() -> None:
    (problem,) = Plan(pipeline=2, reduce_dtype="bf16").check()
    assert problem.key == "plan.reduce_dtype"
    assert "there is one" in problem.reason
    (problem,) = Plan(replicate=2, reduce_dtype="fp16").check()
    assert "loses gradients below 6e-8" in problem.reason
    assert Plan(replicate=2, reduce_dtype="fp16", precision="fp16").check() == []
