"""Offloading on an emulated accelerator, whose copies and kernels run late and whose freed memory is poison: the same
parameters bit by bit as with the state on the device. After `make emulator`; skipped without."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from shardwise import models
from shardwise.memory import offload_activations
from shardwise.memory.offload_shelf import CopiedShelf
from shardwise.memory.offload_tier import Side, Tier, Traffic
from shardwise.parallelize import parallelize
from shardwise.plan import Plan
from tests import emulator
from tests.memory.test_offload import OPTIMIZERS, threads
from tests.models.cases import CONFIGS, VOCABULARY

pytestmark = emulator.needed

# Microseconds by which copies and the results of kernels are late.
DELAYS = [(2000, 0), (0, 500)]
EVERY = ("parameters", "gradients", "optimizer")
MIXED = (*EVERY, "master")
PLANS: list[tuple[dict[str, Any], str]] = [
    ({"kinds": ("parameters",), "zero": 3}, "adamw"),
    ({"kinds": ("gradients",), "zero": 2, "microbatches": 2}, "adamw"),
    ({"kinds": EVERY, "zero": 3, "microbatches": 2}, "muon"),
    ({"kinds": ("parameters", "gradients"), "zero": 3, "microbatches": 2}, "adafactor"),
    ({"kinds": (*MIXED, "activations"), "zero": 3, "precision": "bf16", "recompute": "full"}, "adamw"),
    ({"kinds": ("parameters", "gradients", "master"), "zero": 3, "precision": "bf16"}, "adamw-8bit"),
    ({"kinds": ("master",), "precision": "bf16"}, "adamw"),
    ({"kinds": EVERY, "zero": 3, "precision": "bf16-pure"}, "lion"),
    ({"kinds": (*MIXED, "activations"), "zero": 3, "precision": "fp16", "microbatches": 2}, "adamw"),
]


def parameters(plan: dict[str, Any], optimizer: str, in_memory: bool) -> tuple[dict[str, Any], Any]:
    """Parameters after three steps, and what the last one moved."""
    kept = patch("shardwise.assembling.tiers_of", lambda *_: {}) if in_memory else patch.dict({})
    offload = dict.fromkeys(plan["kinds"], plan["place"])
    settings = {key: value for key, value in plan.items() if key not in ("kinds", "place")}
    with kept:
        parallel = parallelize(
            models.build(CONFIGS["llama"], VOCABULARY),
            Plan(**settings, offload=offload),
            optimizer=OPTIMIZERS[optimizer],
            clip=0.5,
            bucket_bytes=4000,
        )
    assert parallel.mesh.device_type == emulator.NAME
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        tokens, targets = torch.randint(VOCABULARY, (2, 4, 12), generator=generator)
        batch = ({"tokens": tokens}, targets)
        moved = parallel.step(parallel.share(batch)).offload
    if not in_memory:
        assert {kind for kind, size in parallel.memory().items() if not size} >= {
            kind for kind in ("parameters", "gradients") if kind in plan["kinds"]
        }
    found = {name: value.cpu() for name, value in parallel.full_parameters().items()}
    parallel.close()
    return found, moved


def emulated(plans: list[tuple[dict[str, Any], str]], copies: int, kernels: int) -> list[str]:
    """What goes wrong, in a process of its own."""
    native = emulator.install()
    native.delays(copies, kernels)
    found = []
    with patch.object(offload_activations, "SMALLEST", 1):
        for plan, optimizer in plans:
            here, _ = parameters(plan, optimizer, in_memory=True)
            away, moved = parameters(plan, optimizer, in_memory=False)
            odd = [name for name, value in here.items() if not torch.equal(value, away[name])]
            if odd or not all(value.isfinite().all() for value in away.values()):
                found.append(f"{plan} {optimizer}: {odd}")
            if "parameters" in plan["kinds"] and not (
                moved.read and min(moved.hidden, moved.waited) >= 0 < moved.hidden + moved.waited
            ):
                found.append(f"{plan}: {moved}")
    return found


@pytest.mark.parametrize("place", ["cpu", "disk"])
@pytest.mark.parametrize(("copies", "kernels"), DELAYS)
def test_offloading_on_an_accelerator_changes_no_bit(copies: int, kernels: int, place: str, tmp_path: Path) -> None:
    where = place if place == "cpu" else f"disk:{tmp_path / 'state'}"
    plans = [(plan | {"place": where}, optimizer) for plan, optimizer in PLANS]
    assert emulator.apart(__name__, "emulated", plans, copies, kernels) == []


def shelves(place: str) -> list[str]:
    """What goes wrong between copies that follow each other at once, in a process of its own."""
    emulator.install().delays(20_000, 0)
    device = torch.device(emulator.NAME, 0)
    tier = Tier("gradients", place, device, Traffic(), *threads(), Side(device), Side(device))
    shelf, found = CopiedShelf(tier, [torch.empty(1000)]), []

    def expect(what: str, tensor: torch.Tensor, value: float) -> None:
        if not tensor.cpu().eq(value).all():
            found.append(f"{what}: {tensor.cpu()[0]} instead of {value}")

    shelf.clear()
    for count in (1.0, 2.0, 3.0):
        with shelf.adding() as copy:
            copy += 1.0
            expect("added to", copy, count)
    expect("in host memory", shelf.fetch()[0], 3.0)
    shelf.give_back(changed=False)
    with shelf.filled([copied := torch.empty(1000, device=device)]):
        expect("copied beside", copied, 3.0)
    shelf.fetch()[0].fill_(4.0)  # the copy is over, if it was waited for
    shelf.give_back()
    torch.accelerator.synchronize()
    expect("copied before", copied, 3.0)
    expect("changed on the host", shelf.near()[0], 4.0)
    shelf.give_back_near(changed=False)
    shelf.write([torch.full((1000,), 5.0, dtype=torch.float64, device=device)])
    expect("written", shelf.peek(0), 5.0)
    shelf.prefetch_near()
    shelf.write([torch.full((1000,), 6.0, device=device)])
    expect("read ahead of a write", shelf.near()[0], 6.0)
    return found


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_copies_wait_for_each_other_and_the_host_for_them(place: str, tmp_path: Path) -> None:
    assert emulator.apart(__name__, "shelves", place if place == "cpu" else f"disk:{tmp_path}") == []
