"""What an accelerator does with state in host memory or on disk, tried on CPUs that are told to copy it: the same steps
bit by bit as with the state in memory."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from shardwise.memory import offload_tier
from shardwise.memory.offload import Shelves
from shardwise.memory.offload_shelf import CopiedShelf
from shardwise.memory.offload_tier import Side, Tier, Traffic
from shardwise.training.checkpoint_folder import CheckpointFolder
from tests.memory.test_offload import STEPS, make, states, threads
from tests.pool import apart, run_ranks

CPU = torch.device("cpu")


def own_memory(device: torch.device) -> bool:
    return True


def copied(plan: dict[str, Any], optimizer: str, folder: str, alone: bool) -> list[str]:
    """What differs after a few steps; then after state was saved, loaded into a new model, and a step taken there."""
    kinds, place = plan["kinds"], plan["place"].replace("FOLDER", folder)
    plan = {key: value for key, value in plan.items() if key not in ("kinds", "place")}
    offload = dict.fromkeys(kinds, place)
    with apart(alone), patch.object(offload_tier, "has_own_memory", own_memory):
        with patch("shardwise.assembling.tiers_of", lambda *_: {}):
            here = make(plan, optimizer, offload)
        away, fresh = make(plan, optimizer, offload), make(plan, optimizer, offload)
        bucket = away._assembly.chunks[0].buckets.buckets[0]
        for kind in set(kinds) - {"optimizer"}:
            assert bucket.shelves.copied(kind) is not None
        for batch in STEPS[:3]:
            losses = [parallel.step(parallel.share(batch)).loss for parallel in (here, away)]
            assert losses[0] == losses[1]
        found = differing(here, away)
        assert away.replicas_agree() is None
        with CheckpointFolder(away, folder + "/run", asynchronous=False) as checkpoints:
            checkpoints.save()
            away.step(away.share(STEPS[3]))  # what is being written is what was saved
        with CheckpointFolder(fresh, folder + "/run") as checkpoints:
            assert checkpoints.load() == {}
        fresh.step(fresh.share(STEPS[3]))
        here.step(here.share(STEPS[3]))
        found += differing(here, away) + differing(away, fresh)
        for parallel in (here, away, fresh):
            parallel.close()
    return found


def differing(one: Any, other: Any) -> list[str]:
    """Parameters by bits; gradients, which an update of copies leaves unscaled, by value."""
    theirs = states(other)
    return [
        name
        for name, value in states(one).items()
        if not (
            torch.allclose(value, theirs[name], rtol=1e-6, atol=1e-9)
            if name.startswith("grad ")
            else torch.equal(value, theirs[name])
        )
    ]


EVERY = ("parameters", "gradients", "optimizer")
MIXED = (*EVERY, "master")
LAYOUTS: list[tuple[dict[str, Any], str]] = [
    ({"zero": 3, "kinds": EVERY}, "adamw"),
    ({"zero": 3, "kinds": ("parameters", "gradients"), "microbatches": 2}, "adamw"),
    ({"zero": 2, "kinds": ("gradients",), "shard": 2, "microbatches": 2}, "adamw"),
    ({"zero": 3, "kinds": MIXED, "shard": 2, "precision": "bf16", "recompute": "full"}, "adamw"),
    ({"zero": 3, "kinds": ("parameters", "gradients", "master"), "shard": 2, "precision": "bf16"}, "muon"),
    ({"zero": 3, "kinds": EVERY, "shard": 2, "precision": "bf16-pure", "microbatches": 2}, "adafactor"),
    ({"precision": "bf16", "kinds": ("master",)}, "adamw-8bit"),
    (
        {"zero": 3, "kinds": MIXED, "shard": 2, "pipeline": 2, "microbatches": 3, "precision": "fp16"}
        | {"schedule": "zb-h1"},
        "adamw",
    ),
]


@pytest.mark.parametrize("place", ["cpu", "disk:FOLDER/state"])
@pytest.mark.parametrize(("layout", "optimizer"), LAYOUTS, ids=str)
def test_what_is_copied_changes_no_bit(layout: dict[str, Any], optimizer: str, place: str, tmp_path: Path) -> None:
    sizes = [layout.get(axis, 1) for axis in ("shard", "pipeline")]
    ranks = sizes[0] * sizes[1]
    plan = layout | {"place": place}
    assert run_ranks(copied, ranks, plan, optimizer, str(tmp_path), False) == [[]] * ranks


def test_ranks_of_several_machines_gather_what_is_copied(tmp_path: Path) -> None:
    plan = {"zero": 3, "kinds": MIXED, "shard": 2, "precision": "bf16", "place": "cpu"}
    assert run_ranks(copied, 2, plan, "adamw", str(tmp_path), True) == [[], []]


@patch.object(offload_tier, "has_own_memory", own_memory)
def test_copies_are_there_only_while_they_are_used() -> None:
    reader, writer = threads()
    tier = Tier("gradients", "cpu", CPU, Traffic(), reader, writer, Side(CPU), Side(CPU))
    shelf = CopiedShelf(tier, [torch.empty(5), torch.empty(3, dtype=torch.float64)])
    first, second = shelf.near()
    assert shelf.near()[0] is first
    first.fill_(2.0)
    second.fill_(3.0)
    assert not shelf.give_back_near(changed=False)
    assert shelf.give_back_near()
    assert shelf._near == []
    assert [tensor.sum().item() for tensor in shelf.fetch()] == [10.0, 9.0]
    shelf.give_back(changed=False)
    shelf.near()[0].fill_(7.0)
    shelf.give_back_near(changed=False)
    assert shelf.peek(0).eq(2.0).all()
    shelf.clear()
    assert shelf.near()[1].eq(0.0).all()
    shelf.give_back_near(changed=False)
    assert shelf.fetch()[0].eq(0.0).all()


@patch.object(offload_tier, "has_own_memory", own_memory)
def test_state_that_lives_on_the_host_is_updated_there() -> None:
    reader, writer = threads()
    tiers = {kind: Tier(kind, "cpu", CPU, Traffic(), reader, writer) for kind in MIXED}
    shelves = Shelves(tiers)
    assert shelves.updates_on_host
    places: list[list[torch.Tensor]] = []
    for kind in ("optimizer", "master"):
        shelves.put(kind, [torch.empty(4)], places.append)
    assert shelves.copied("optimizer") is None
    master = shelves.copied("master")
    assert master is not None
    with shelves.here("master", host=True):
        assert places[-1][0].data_ptr() == master.peek(0).data_ptr()
    with shelves.here("master"):
        assert places[-1][0].data_ptr() != master.peek(0).data_ptr()
    assert places[-1][0].is_meta
