"""Slices of a sequence in time: what one device holds and how long it takes at growing length, what fits under a
limit, and slices as the grain of a pipeline.

    python -m benchmarks.slices [--quick]

All train the same small Llama on one sequence a step with the same AdamW. The limit of a device that computes all but
the last slice again is 4/3 of its step without; of a pipeline of p ranks with one sequence in n slices, it is
1/p (1 + (p - 1)/n).
"""

import argparse
import resource
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks import harness
from benchmarks.harness import Memory, Step

VOCABULARY = 4096
CHECKED = 2
# Name -> keys of the plan.
ALONE: dict[str, dict[str, Any]] = {
    "whole": {},
    "whole, blocks again": {"recompute": "full"},
    "4 slices": {"slices": 4},
    "4 slices, again": {"slices": 4, "recompute": "full"},
    "16 slices, again": {"slices": 16, "recompute": "full"},
}
PIPELINE: dict[str, dict[str, Any]] = {
    "one device": {},
    "pipeline": {"pipeline": 2, "cut": (2, 2)},
    "pipeline, 2 slices": {"pipeline": 2, "cut": (2, 2), "slices": 2},
    "pipeline, 4 slices": {"pipeline": 2, "cut": (2, 2), "slices": 4},
}


def contenders(plans: dict[str, dict[str, Any]], length: int, layers: int) -> dict[str, Step]:
    """The contenders' steps on this rank. Collective over the world, which this initialises."""
    import torch

    from shardwise import AdamW, Plan, parallelize
    from shardwise.models import build
    from shardwise.models.config import ModelConfig

    torch.set_num_threads(1)
    config = ModelConfig(family="llama", layers=layers, hidden=256, heads=8, kv_heads=4, sequence=length)
    rank, _ = harness.place()

    def batch(number: int) -> Any:
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, VOCABULARY, (1, length + 1), generator=generator)
        return {"tokens": tokens[:, :-1]}, tokens[:, 1:]

    def make(plan: dict[str, Any]) -> Step:
        alone = Plan(**plan).num_ranks == 1
        parallel = parallelize(build(config, VOCABULARY), Plan(**plan), optimizer=AdamW(lr=1e-3))
        return lambda number: parallel.step(batch(number)).loss if rank == 0 or not alone else None

    # One device's before there is a world.
    found = {name: make(plan) for name, plan in plans.items() if Plan(**plan).num_ranks == 1}
    harness.connect()
    found |= {name: make(plan) for name, plan in plans.items() if Plan(**plan).num_ranks > 1}
    return {name: found[name] for name in plans}


def compare(plans: dict[str, dict[str, Any]], length: int, layers: int, rounds: int) -> dict[str, Any]:
    """Runs on every rank: contenders in turn."""
    return asdict(harness.alternate(contenders(plans, length, layers), rounds, warmup=1))


def hold(plan: dict[str, Any], length: int, layers: int) -> list[dict[str, float]]:
    """Runs on every rank: one contender alone, what it holds before its first step and after it."""
    step = contenders({"": plan}, length, layers)[""]
    before = asdict(Memory.here())
    step(0)
    return [before, asdict(Memory.here())]


def fits(plan: dict[str, Any], length: int, layers: int, megabytes: int) -> bool:
    """Whether a step fits into so much memory beyond what the model takes, by the kernel's limit (RLIMIT_DATA)."""
    step = contenders({"": plan}, length, layers)[""]
    taken = harness._kilobytes("/proc/self/status")["VmData"]
    resource.setrlimit(resource.RLIMIT_DATA, (taken * 1024 + megabytes * 2**20, resource.RLIM_INFINITY))
    try:
        step(0)
    except (RuntimeError, MemoryError):  # torch's allocator, or oneDNN, which says no more than that it could not
        return False
    return True


def alone(lengths: Sequence[int]) -> list[str]:
    """Prints what one device takes and holds; returns lines on whether the losses agree."""
    rows, said = [], []
    for length in lengths:
        rounds = max(1, 2**27 // length**2)
        job: dict[str, Any] = {"length": length, "layers": 2}
        times = harness.Times(
            **harness.run_ranks("benchmarks.slices:compare", num_ranks=1, plans=ALONE, rounds=rounds, **job)
        )
        for name, plan in ALONE.items():
            before, after = harness.run_ranks("benchmarks.slices:hold", num_ranks=1, plan=plan, **job)
            beyond = f"{after['own'] - before['own']:.0f}"
            shown = times.show_ratio(name, "whole"), times.show_cpu(name)
            rows.append([str(length), name, f"{times.median(name):.0f}", *shown, beyond, f"{after['own']:.0f}"])
            said.append(
                f"{length} {harness.agreement(name, times.losses[name], times.losses['whole'][:CHECKED], 1e-4)}"
            )
    print(harness.table(["tokens", "step", "median ms", "x whole", "CPU ms", "MB beyond the model", "own MB"], rows))
    return said


def limits(megabytes: Sequence[int], length: int) -> None:
    """Prints which contenders make a step under a limit."""
    print(f"\nOne step of {length} tokens under a limit of so many MB beyond the model (RLIMIT_DATA):\n")
    rows = []
    for name, plan in ALONE.items():
        job: dict[str, Any] = {"plan": plan, "length": length, "layers": 2}
        found = [
            harness.run_ranks("benchmarks.slices:fits", num_ranks=1, **job, megabytes=limit) for limit in megabytes
        ]
        rows.append([name, *("fits" if fit else "does not" for fit in found)])
    print(harness.table(["step", *map(str, megabytes)], rows))


def pipelined(rounds: int, length: int) -> list[str]:
    """Prints what slices do in a pipeline; returns lines on whether the losses agree."""
    print(f"\nTwo pipeline ranks, one sequence of {length} tokens, 4 layers:\n")
    job: dict[str, Any] = {"length": length, "layers": 4, "rounds": rounds}
    times = harness.Times(**harness.run_ranks("benchmarks.slices:compare", plans=PIPELINE, **job))
    rows, said = [], []
    for name, plan in PIPELINE.items():
        limit = 0.5 * (1 + 1 / plan.get("slices", 1)) if "pipeline" in plan else 1.0
        shown = times.show_ratio(name, "one device"), f"{limit:.3f}", times.show_cpu(name)
        rows.append([name, f"{times.median(name):.0f}", *shown])
        said.append(harness.agreement(name, times.losses[name], times.losses["one device"][:CHECKED], 1e-4))
    print(harness.table(["step", "median ms", "x one device", "limit", "CPU ms"], rows))
    return said


def run() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slices", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two minutes instead of eight: fewer rounds and lengths")
    quick = parser.parse_args().quick
    print(f"Slices in time, one sequence a step: {harness.machine()}.\n")
    said = alone((2048, 4096) if quick else (4096, 8192, 16384))
    limits((256, 128, 64) if quick else (512, 256, 128), 2048 if quick else 8192)
    said += pipelined(3 if quick else 8, 4096)
    print()
    print("\n".join(said))


if __name__ == "__main__":
    harness.main(run)
