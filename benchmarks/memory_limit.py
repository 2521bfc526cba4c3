"""How large a model trains under one memory limit: plainly (zero = 0, fp32, AdamW) and divided (zero = 3, bf16,
Adafactor).

    python -m benchmarks.memory_limit [--megabytes 800] [--ranks 8]

Every process may map so much memory beyond what it has when torch is imported (RLIMIT_AS). The deepest plain model that
trains is searched for; then one with four times as many parameters trains divided over the ranks, each under the same
limit and as on a machine of its own: memory that ranks share is one for all, but the limit would count it on each.

The limit counts what is mapped, used or not, so for both the stack of a thread is 1 MB (gloo starts two dozen threads,
of 8 MB each by default) and blocks from 256 kB on go back to the system when they are freed.
"""

import argparse
import os
import resource
import sys
import time
import uuid
from typing import Any

from benchmarks import harness

STEPS = 3
TOO_LARGE = 17  # exit status
SEQUENCE = 32
WIDTH = {"family": "llama", "hidden": 384, "heads": 6, "sequence": SEQUENCE}
VOCABULARY = 512


def _mapped(which: str) -> int:
    """Bytes this process maps: "VmSize" now, "VmPeak" at most up to now."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(which)) * 1024


def train(layers: int, divided: bool, megabytes: int) -> dict[str, Any]:
    """Runs on every rank: some steps under the limit. Ends with `TOO_LARGE` if they do not fit."""
    import torch

    from shardwise import Adafactor, AdamW, Plan, host_memory, models, parallelize

    host_memory.machine_identity = lambda: uuid.uuid4().hex
    rank, num_ranks = harness.place()
    harness.connect() if num_ranks > 1 else torch.set_num_threads(1)
    torch.ones(64, 64) @ torch.ones(64, 64)  # the libraries' own memory
    before = _mapped("VmSize")
    limit = before + (megabytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    plan = Plan(recompute="full")
    if divided:
        plan = Plan(shard=num_ranks, zero=3, precision="bf16", recompute="full")
    try:
        model = models.build(models.ModelConfig(layers=layers, **WIDTH), VOCABULARY)
        parallel = parallelize(model, plan, optimizer=Adafactor() if divided else AdamW(lr=1e-3))
        num_parameters = sum(entry.numel for chunk in parallel.chunks for _, entry in chunk.buckets)
        tokens = torch.arange(num_ranks * (SEQUENCE + 1)).view(num_ranks, -1)[[rank]] * 7 % VOCABULARY
        start = time.perf_counter()
        losses = [parallel.step((tokens[:, :-1], tokens[:, 1:])).loss for _ in range(STEPS)]
    except (MemoryError, RuntimeError, OSError) as error:
        if "memory" not in str(error).lower() and not isinstance(error, MemoryError):
            raise
        print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
        os._exit(TOO_LARGE)  # the others fail with it
    return {
        "parameters": num_parameters,
        "losses": losses,
        "seconds": (time.perf_counter() - start) / STEPS,
        "mapped": [mapped / 2**20 for mapped in _of_all(_mapped("VmPeak") - before, num_ranks)],
    }


def _of_all(value: int, num_ranks: int) -> list[int]:
    import torch.distributed as dist

    found: list[Any] = [value] * num_ranks
    if num_ranks > 1:
        dist.all_gather_object(found, value)
    return found


def run() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_limit", description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=800, help="that a process may map beyond its libraries")
    parser.add_argument("--ranks", type=int, default=8, help="over which the larger model is divided")
    parser.add_argument("--quick", action="store_true", help="a smaller limit and four ranks")
    given = parser.parse_args()
    os.environ["MALLOC_ARENA_MAX"] = "1"  # each further one would take 64 MB of the limit
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(256 << 10)
    resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    megabytes = given.megabytes
    about = harness.machine()

    def attempt(layers: int, divided: bool) -> dict[str, Any] | None:
        ranks = given.ranks if divided else 1
        try:
            return harness.run_ranks(  # type: ignore[no-any-return]
                "benchmarks.memory_limit:train", ranks, layers=layers, divided=divided, megabytes=megabytes
            )
        except RuntimeError as error:
            if str(TOO_LARGE) in str(error).splitlines()[0]:
                return None
            raise

    low, high = 1, 2
    fits = attempt(low, divided=False)
    assert fits is not None, "not even one layer fits: raise --megabytes"
    while (found := attempt(high, divided=False)) is not None:
        low, fits, high = high, found, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        found = attempt(middle, divided=False)
        low, high, fits = (middle, high, found) if found else (low, middle, fits)
    layers = 4 * low
    while (large := attempt(layers, divided=True)) is not None and large["parameters"] < 4 * fits["parameters"]:
        layers += 1
    print(f"{megabytes} MB a process beyond its libraries: {about}.\n")
    rows = []
    for name, depth, result in (
        ("zero=0, fp32, AdamW", low, fits),
        (f"zero=3, bf16, Adafactor, {given.ranks} ranks", layers, large),
    ):
        if result is None:
            rows.append([name, str(depth), "-", "does not fit", "-", "-"])
            continue
        losses = " ".join(f"{loss:.3f}" for loss in result["losses"])
        mapped = f"{max(result['mapped']):.0f}"
        millions = f"{result['parameters'] / 1e6:.1f}"
        rows.append([name, str(depth), millions, mapped, losses, f"{result['seconds']:.1f}"])
    print(harness.table(["plan", "layers", "M parameters", "MB mapped at most", "losses", "s a step"], rows))


if __name__ == "__main__":
    harness.main(run)
