"""Context parallelism: ring and Ulysses on two ranks beside one device, at growing sequence length, in time and memory.

    python -m benchmarks.context [--quick]

All train the same small Llama on one sequence a step with the same AdamW. One device has all of it; two ranks have half
of it each, so with nothing lost they take half the time (the limit) and hold half the activations.
"""

import argparse
from dataclasses import asdict
from typing import Any

from benchmarks import harness
from benchmarks.harness import Step

ALONE, RING, ULYSSES = "one device", "ring", "ulysses"
VOCABULARY = 1024
CHECKED = 3


def contenders(names: list[str], length: int) -> dict[str, Step]:
    """The contenders' steps on this rank. Collective over the world, which this initialises."""
    import torch

    from shardwise import AdamW, Plan, parallelize
    from shardwise.models import build
    from shardwise.models.config import ModelConfig

    torch.set_num_threads(1)
    config = ModelConfig(family="llama", layers=2, hidden=256, heads=8, kv_heads=4, sequence=length)
    rank, num_ranks = harness.place()

    def batch(number: int) -> Any:
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, VOCABULARY, (1, length + 1), generator=generator)
        return {"tokens": tokens[:, :-1]}, tokens[:, 1:]

    def make(plan: Plan) -> Any:
        return parallelize(build(config, VOCABULARY), plan, optimizer=AdamW(lr=1e-3))

    found: dict[str, Step] = {}
    if ALONE in names:  # before there is a world
        alone = make(Plan())
        found[ALONE] = lambda number: alone.step(batch(number)).loss if rank == 0 else None
    harness.connect()
    for method in (RING, ULYSSES):
        if method in names:
            divided = make(Plan(context=num_ranks, context_method=method))
            found[method] = lambda number, divided=divided: divided.step(batch(number)).loss  # type: ignore[misc]
    return {name: found[name] for name in names}


def compare(names: list[str], length: int, rounds: int) -> dict[str, Any]:
    """Runs on every rank: contenders in turn."""
    return asdict(harness.alternate(contenders(names, length), rounds, warmup=2))


def hold(name: str, length: int) -> list[dict[str, float]]:
    """Runs on every rank: one contender alone, for what it holds in memory."""
    return harness.held(contenders([name], length)[name], 2)


def run() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.context", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two minutes instead of fifteen: fewer rounds and lengths")
    quick = parser.parse_args().quick
    names = [ALONE, RING, ULYSSES]
    print(f"Context parallelism on two ranks, one sequence a step: {harness.machine()}.")
    print("The limit is 0.5 x one device.\n")
    rows, said = [], []
    for length in (512, 2048, 4096) if quick else (512, 1024, 2048, 4096, 8192, 16384):
        rounds = max(4, min(40, 65536 // length)) // (4 if quick else 1)
        times = harness.Times(
            **harness.run_ranks("benchmarks.context:compare", names=names, length=length, rounds=rounds)
        )
        for name in names:
            ranks = harness.run_ranks("benchmarks.context:hold", name=name, length=length)
            ratio = times.show_ratio(name, ALONE)
            ranks = ranks[:1] if name == ALONE else ranks
            memory = harness.megabytes(ranks, "own")
            rows.append([str(length), name, f"{times.median(name):.0f}", ratio, times.show_cpu(name), memory])
        expected = times.losses[ALONE][:CHECKED]
        said += [f"{length} {harness.agreement(name, times.losses[name], expected, 1e-4)}" for name in (RING, ULYSSES)]
    print(harness.table(["tokens", "step", "median ms", "x one device", "CPU ms", "own MB"], rows))
    print()
    print("\n".join(said))


if __name__ == "__main__":
    harness.main(run)
