"""Named axes of ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.collectives import all_gather_object, all_reduce
from shardwise.mesh import AXES, Mesh
from shardwise.plan import Plan
from tests.pool import run_ranks


def seen(sizes: dict[str, int]) -> dict[str, Any]:
    """What a rank sees of the mesh, and that every axis's group does sum over its ranks."""
    mesh = Mesh(sizes)
    found: dict[str, Any] = {}
    for name in (*AXES, "data", "zero", "gradient", "stage", "world"):
        axis = mesh.axis(name)
        total = all_reduce(torch.tensor([10 ** dist.get_rank()]), axis)
        assert total.item() == sum(10**rank for rank in axis.ranks)
        assert axis.ranks[axis.rank] == dist.get_rank()
        assert axis.size == len(axis.ranks)
        found[name] = axis.ranks
    return found


def test_axes_are_nested_outermost_first() -> None:
    ranks = run_ranks(seen, 4, {"pipeline": 2, "replicate": 2})
    assert [r["pipeline"] for r in ranks] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [r["replicate"] for r in ranks] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [r["data"] for r in ranks] == [r["replicate"] for r in ranks]
    assert all(r["world"] == (0, 1, 2, 3) for r in ranks)
    assert [r["tensor"] for r in ranks] == [(0,), (1,), (2,), (3,)]


def test_folded_axes_span_their_members() -> None:
    ranks = run_ranks(seen, 4, {"replicate": 2, "context": 2})
    assert [r["gradient"] for r in ranks] == [(0, 1, 2, 3)] * 4
    assert [r["data"] for r in ranks] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [r["zero"] for r in ranks] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    ranks = run_ranks(seen, 4, {"replicate": 2, "shard": 2})
    assert [r["data"] for r in ranks] == [(0, 1, 2, 3)] * 4
    assert [r["zero"] for r in ranks] == [(0, 1), (0, 1), (2, 3), (2, 3)]


def test_one_device_needs_no_job() -> None:
    mesh = Mesh(Plan())
    assert mesh.num_ranks == 1
    assert all(mesh.axis(name).size == 1 and mesh.axis(name).ranks == (0,) for name in (*AXES, "data", "world"))
    assert mesh.private_group(mesh.axis("data")) is None
    assert mesh.device() == torch.device(mesh.device_type) or mesh.device().index == 0
    assert repr(mesh) == "Mesh(one device, rank 0 of 1)"


def test_more_ranks_than_the_job_has_are_refused_with_the_mend() -> None:
    with pytest.raises(
        ValueError, match=r"needs 4 ranks \(pipeline 2 x shard 2\), the job has 1; .* start with torchrun"
    ):
        Mesh({"pipeline": 2, "shard": 2})
    for text in run_ranks(another_number, 2):
        assert "needs 3 ranks (replicate 3), the job has 2; change the plan or the launch" in text


def another_number() -> str:
    try:
        Mesh({"replicate": 3})
    except ValueError as error:
        return str(error)
    return "not refused"


def groups() -> tuple[Any, Any, Any]:
    mesh = Mesh({"pipeline": 4})
    ends = mesh.subgroup("pipeline", [3, 0])
    alone = mesh.subgroup("pipeline", [2])
    private = mesh.private_group(mesh.axis("pipeline"))
    total = torch.ones(1)
    dist.all_reduce(total, group=private)
    assert total.item() == 4
    return (
        ends and (ends.rank, ends.ranks, all_gather_object(mesh.rank, ends)),
        alone and (alone.size, alone.group),
        private is not mesh.axis("pipeline").group,
    )


def test_groups_of_some_positions_and_groups_apart() -> None:
    found = run_ranks(groups, 4)
    assert [ends for ends, _, _ in found] == [(0, (0, 3), [0, 3]), None, None, (1, (0, 3), [0, 3])]
    assert [alone for _, alone, _ in found] == [None, None, (1, None), None]
    assert all(apart for _, _, apart in found)
