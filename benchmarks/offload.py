"""Offloading: our step with state on disk beside the same step without, and DeepSpeed's ZeRO-Offload on this CPU.

    python -m benchmarks.offload [--quick] [--folder FOLDER]

All train the model of the peers' `common.py` with the same AdamW on the same rows. What the disk does is
measured beside.
"""

import argparse
import os
import tempfile
import time
from dataclasses import asdict
from typing import Any

from benchmarks import harness
from benchmarks.data_parallel import _settings
from benchmarks.harness import Step

# By name: the stage of ZeRO, and what lives on disk.
OURS: dict[str, tuple[int, tuple[str, ...]]] = {
    "zero 2, in memory": (2, ()),
    "zero 2, optimizer on disk": (2, ("optimizer",)),
    "zero 2, optimizer and gradients": (2, ("optimizer", "gradients")),
    "zero 2, activations": (2, ("activations",)),
    "zero 3, in memory": (3, ()),
    "zero 3, optimizer, parameters, gradients": (3, ("optimizer", "parameters", "gradients")),
    "zero 3, everything": (3, ("optimizer", "parameters", "gradients", "activations")),
}
# Peers: DeepSpeed's offload to host memory, and the same stage without, for what offloading costs there.
PEERS = ("zero2", "zero2_offload", "zero3", "zero3_offload")
MEASURED_BYTES = 256 << 20


def in_memory(name: str) -> str:
    """The contender of the same stage without offloading."""
    return f"{name[:6]}, in memory"


def steps_of(names: list[str], folder: str, moved: dict[str, Any] | None = None) -> dict[str, Step]:
    """The contenders' steps on this rank; what the last step of each moved goes to `moved`. Collective."""
    from shardwise import AdamW, Plan, parallelize

    common = harness.peers_common()
    settings = _settings(common)
    rank, num_ranks = harness.place()
    harness.connect()

    def make(name: str) -> Step:
        stage, kinds = OURS[name]
        plan = Plan(shard=num_ranks, zero=stage, offload={kind: f"disk:{folder}" for kind in kinds})
        # torch's own defaults, with which the peers run: weight decay on every parameter.
        optimizer = AdamW(lr=settings.lr, betas=(0.9, 0.999), weight_decay=0.01)
        model = common.build_model(settings)
        parallel = parallelize(model, plan, optimizer=optimizer, decay=lambda name, parameter: True)

        def step(number: int) -> float:
            metrics = parallel.step(common.dp_batch(settings, number, rank, num_ranks))
            if moved is not None and metrics.offload is not None:
                moved[name] = asdict(metrics.offload)
            return metrics.loss

        return step

    return {name: make(name) for name in names}


def compare(folder: str, rounds: int) -> dict[str, Any]:
    """Runs on every rank: contenders in turn."""
    moved: dict[str, Any] = {}
    times = harness.alternate(steps_of(list(OURS), folder, moved), rounds)
    return {"times": asdict(times), "moved": moved}


def hold(name: str, folder: str, steps: int) -> list[dict[str, float]]:
    """Runs on every rank: one contender alone, for what it holds in memory."""
    return harness.held(steps_of([name], folder)[name], steps)


def launched(name: str, folder: str, steps: int) -> dict[str, Any]:
    """Runs on every rank: our step alone, measured as the peers measure theirs."""
    return harness.as_peers(steps_of([name], folder)[name], steps, name)


def bandwidth(folder: str) -> tuple[float, float]:
    """What the disk of a folder writes (with fsync) and reads (nothing of it in memory), in GB/s."""
    block = os.urandom(1 << 20)
    with tempfile.TemporaryFile(dir=folder) as file:
        begin = time.perf_counter()
        for _ in range(MEASURED_BYTES >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter() - begin
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        begin = time.perf_counter()
        while file.read(1 << 20):
            pass
        read = time.perf_counter() - begin
    return MEASURED_BYTES / written / 1e9, MEASURED_BYTES / read / 1e9


def run() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.offload", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk to offload to")
    parser.add_argument("--only", action="append", choices=["here", "elsewhere"], help="a part of it")
    given = parser.parse_args()
    harness.peers_folder()
    if given.only != ["elsewhere"]:
        _here(given.folder, 12 if given.quick else 40)
    if given.only != ["here"]:
        _elsewhere(given.folder, 1 if given.quick else 3, 12 if given.quick else 20)


def _here(folder: str, rounds: int) -> None:
    found = harness.run_ranks("benchmarks.offload:compare", folder=folder, rounds=rounds)
    times = harness.Times(**found["times"])
    memory = {name: harness.run_ranks("benchmarks.offload:hold", name=name, folder=folder, steps=6) for name in OURS}
    writes, reads = bandwidth(folder)
    print(f"Offloading to disk on two ranks, {rounds} rounds in turn: {harness.machine()}.")
    print(
        f"The disk writes {writes:.2f} GB/s and reads {reads:.2f} GB/s; `disk ms` is what a step's bytes take at that\n"
    )
    rows = []
    for name in OURS:
        moved = found["moved"].get(name)
        limit = 2 * (moved["read"] / reads + moved["written"] / writes) / 1e6 if moved else 0.0  # both ranks' bytes
        rows.append(
            [
                name,
                f"{times.median(name):.1f}",
                times.show_ratio(name, in_memory(name)),
                times.show_cpu(name),
                harness.megabytes(memory[name], "own"),
                f"{moved['read'] / 1e6:.0f}/{moved['written'] / 1e6:.0f}" if moved else "",
                f"{1e3 * moved['hidden']:.0f}/{1e3 * moved['waited']:.0f}" if moved else "",
                f"{limit:.0f}" if moved else "",
            ]
        )
    columns = ["step", "median ms", "x in memory", "CPU ms", "own MB", "MB read/written", "ms hidden/waited", "disk ms"]
    print(harness.table(columns, rows))
    print()
    for name in OURS:
        apart = [mine - theirs for mine, theirs in zip(times.losses[name], times.losses[in_memory(name)], strict=True)]
        print(
            f"{name}: losses {'bitwise those in memory' if not any(apart) else f'DIFFERENT by {max(map(abs, apart))}'}"
        )


def _elsewhere(folder: str, rounds: int, steps: int) -> None:
    python = harness.peer_python("deepspeed")
    if python is None:
        print("\nDeepSpeed is not installed (`install_peer.sh deepspeed` in the peers' folder): left out.")
        return
    launches: dict[str, Any] = {
        f"DeepSpeed {mode}": lambda mode=mode: harness.peer(  # type: ignore[misc]
            python, "run_deepspeed.py", "--mode", mode, "--steps", str(steps)
        )
        for mode in PEERS
    }
    for name in OURS:
        launches[name] = lambda name=name: harness.run_ranks(  # type: ignore[misc]
            "benchmarks.offload:launched", name=name, folder=folder, steps=steps
        )
    found = harness.launches(launches, rounds)
    print(f"\n{rounds} launches each in turn, {steps} steps a launch:\n")
    rows = []
    for name, results in found.items():
        stage = 3 if "3" in name else 2
        ours = "zero 3, optimizer, parameters, gradients" if stage == 3 else "zero 2, optimizer on disk"
        ratios = {name: harness.launch_ratio(found[ours], results)} if name.endswith("_offload") else {}
        (row,) = harness.launch_rows({name: results}, ratios)
        alone = found[f"DeepSpeed zero{stage}" if name.startswith("DeepSpeed") else in_memory(name)]
        last = results[-1]
        over = [peak - start for peak, start in zip(last["peak_mb"], last["import_mb"], strict=True)]
        rows.append([*row, f"{harness.launch_ratio(results, alone):.3f}", "/".join(map(str, over))])
    columns = ["step", "median ms", "best ms", "ours on disk / it", "x without offloading", "MB over import"]
    print(harness.table(columns, rows))


if __name__ == "__main__":
    harness.main(run)
