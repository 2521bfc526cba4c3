"""Data parallelism: our step at replicate = 2 beside torch's DistributedDataParallel, Megatron-core's, and a step
without communication.

    python -m benchmarks.data_parallel [--quick]

All train the model of the peers' `common.py` with the same AdamW on the same rows; the loss of every step is read, as a
trainer does.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from benchmarks import harness
from benchmarks.harness import Step

LIMIT, DDP, OURS, ALONE, MEGATRON = (
    "no communication (limit)",
    "torch DDP",
    "Shardwise",
    "Shardwise, no communication",
    "Megatron-core DP",
)
# Steps whose losses are compared with those of one process.
CHECKED = 5


def _settings(common: Any) -> Any:
    return common.parser().parse_args([])


def _torch_step(common: Any, settings: Any, net: Any, rank: int, num_ranks: int) -> Step:
    optimizer = common.adamw(settings, net.parameters())

    def step(number: int) -> float:
        inputs, targets = common.dp_batch(settings, number, rank, num_ranks)
        loss = common.loss_fn(net(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def _our_step(common: Any, settings: Any, plan: Any, rank: int, num_ranks: int) -> Step:
    from shardwise import AdamW, parallelize

    # torch's own defaults, with which the peers run: weight decay on every parameter.
    optimizer = AdamW(lr=settings.lr, betas=(0.9, 0.999), weight_decay=0.01)
    parallel = parallelize(
        common.build_model(settings),
        plan,
        optimizer=optimizer,
        decay=lambda name, parameter: True,
        rules={"head.out": "vocabulary"},  # where the loss begins
    )
    return lambda number: parallel.step(common.dp_batch(settings, number, rank, num_ranks)).loss


def contenders(names: list[str]) -> dict[str, Step]:
    """The contenders' steps on this rank. Collective over the world, which this initialises."""
    from shardwise import Plan

    common = harness.peers_common()
    settings = _settings(common)
    rank, num_ranks = harness.place()
    make: dict[str, Callable[[], Step]] = {
        # Before there is a world: a plan of one rank.
        ALONE: lambda: _our_step(common, settings, Plan(), rank, num_ranks),
        LIMIT: lambda: _torch_step(common, settings, common.build_model(settings), rank, num_ranks),
        DDP: lambda: _torch_step(common, settings, _ddp(common.build_model(settings)), rank, num_ranks),
        OURS: lambda: _our_step(common, settings, Plan(replicate=num_ranks), rank, num_ranks),
    }
    found = {}
    if ALONE in names:
        found[ALONE] = make[ALONE]()
    harness.connect()
    return found | {name: make[name]() for name in names if name != ALONE}


def _ddp(model: Any) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def compare(names: list[str], rounds: int) -> dict[str, Any]:
    """Runs on every rank: contenders in turn, and the losses of one process beside theirs."""
    common = harness.peers_common()
    steps = contenders(names)
    times = harness.alternate(steps, rounds)
    baseline = _torch_step(common, _settings(common), common.build_model(_settings(common)), 0, 1)
    expected = [baseline(number) for number in range(CHECKED)]
    return {"times": asdict(times), "expected": expected}


def hold(name: str, steps: int) -> list[dict[str, float]]:
    """Runs on every rank: one contender alone, for what it holds in memory."""
    return harness.held(contenders([name])[name], steps)


def launched(steps: int) -> dict[str, Any]:
    """Runs on every rank: our step alone, measured as the peers measure theirs."""
    return harness.as_peers(contenders([OURS])[OURS], steps, "shardwise")


def run() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data_parallel", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a minute instead of five: fewer rounds")
    quick = parser.parse_args().quick
    harness.peers_folder()
    names = [LIMIT, DDP, OURS, ALONE]
    about = harness.machine()
    found = harness.run_ranks("benchmarks.data_parallel:compare", names=names, rounds=12 if quick else 80)
    times = harness.Times(**found["times"])
    memory = {
        name: harness.run_ranks("benchmarks.data_parallel:hold", name=name, steps=6) for name in (LIMIT, DDP, OURS)
    }

    rows = [
        [
            name,
            f"{times.median(name):.1f}",
            times.show_ratio(name, LIMIT),
            times.show_ratio(name, DDP),
            times.show_cpu(name),
            harness.megabytes(memory.get(name), "own"),
            harness.megabytes(memory.get(name), "resident"),
        ]
        for name in names
    ]
    print(f"Data parallelism on two ranks, {len(times.milliseconds[OURS])} rounds in turn: {about}.\n")
    print(harness.table(["step", "median ms", "x limit", "x DDP", "CPU ms", "own MB", "resident MB"], rows))
    print()
    for name in (DDP, OURS):
        print(harness.agreement(name, times.losses[name], found["expected"]))
    _megatron(1 if quick else 4, 15 if quick else 30)


def _megatron(rounds: int, steps: int) -> None:
    python = harness.peer_python("megatron")
    if python is None:
        print(
            "\nMegatron-core is not installed (`install_peer.sh megatron megatron-core` in the peers' folder): left"
            " out."
        )
        return
    found = harness.launches(
        {
            OURS: lambda: harness.run_ranks("benchmarks.data_parallel:launched", steps=steps),
            MEGATRON: lambda: harness.peer(python, "run_megatron.py", "--mode", "dp", "--steps", str(steps)),
        },
        rounds,
    )
    ratio = harness.launch_ratio(found[OURS], found[MEGATRON])
    print(
        f"\n{rounds} launches each in turn, {steps} steps a launch (Megatron-core brings its own form of the model):\n"
    )
    print(
        harness.table(["step", "median ms", "best ms", "Shardwise / it"], harness.launch_rows(found, {MEGATRON: ratio}))
    )


if __name__ == "__main__":
    harness.main(run)
