"""ZeRO: our step at shard = 2 and zero = 1, 2, 3 beside what torch, DeepSpeed and Megatron-core divide, and a step
without communication.

    python -m benchmarks.zero [--quick]

All train the model of the peers' `common.py` with the same AdamW on the same rows; the loss of every step is read, as a
trainer does.
"""

import argparse
from dataclasses import asdict
from typing import Any

from benchmarks import harness
from benchmarks.data_parallel import _ddp, _our_step, _settings, _torch_step
from benchmarks.harness import Step

LIMIT, DDP = "no communication (limit)", "torch DDP"
REDUNDANCY = "torch ZeroRedundancyOptimizer"
FULL_SHARD, SHARD_GRAD_OP = "torch FSDP2 FULL_SHARD", "torch FSDP2 SHARD_GRAD_OP"
OURS = {f"Shardwise zero={stage}": stage for stage in (1, 2, 3)}
HERE = [LIMIT, DDP, REDUNDANCY, SHARD_GRAD_OP, FULL_SHARD, *OURS]
# What divides parameters too: those that ours at stage 3 is held against.
SHARDING = [SHARD_GRAD_OP, FULL_SHARD]
# Peers with environments of their own, by name: the environment, its script, and what to give it.
ELSEWHERE = {
    **{f"DeepSpeed ZeRO-{stage}": ("deepspeed", "run_deepspeed.py", f"zero{stage}") for stage in (1, 2, 3)},
    "Megatron-core distributed optimizer": ("megatron", "run_megatron.py", "distopt"),
}
# Steps whose losses are compared with those of one process.
CHECKED = 5


def contenders(names: list[str]) -> dict[str, Step]:
    """The contenders' steps on this rank. Collective over the world, which this initialises."""
    from shardwise import Plan

    common = harness.peers_common()
    settings = _settings(common)
    rank, num_ranks = harness.place()
    harness.connect()

    def make(name: str) -> Step:
        if name in OURS:
            return _our_step(common, settings, Plan(shard=num_ranks, zero=OURS[name]), rank, num_ranks)
        model = common.build_model(settings)
        if name == REDUNDANCY:
            return _redundancy_step(common, settings, model, rank, num_ranks)
        if name in SHARDING:
            model = _fsdp(model, num_ranks, reshard=name == FULL_SHARD)
        elif name == DDP:
            model = _ddp(model)
        return _torch_step(common, settings, model, rank, num_ranks)

    return {name: make(name) for name in names}


def _fsdp(model: Any, num_ranks: int, reshard: bool) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (num_ranks,))
    for block in model.layers.values():
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


def _redundancy_step(common: Any, settings: Any, model: Any, rank: int, num_ranks: int) -> Step:
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer

    net = _ddp(model)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, lr=settings.lr, fused=True
    )

    def step(number: int) -> float:
        inputs, targets = common.dp_batch(settings, number, rank, num_ranks)
        loss = common.loss_fn(net(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def compare(names: list[str], rounds: int) -> dict[str, Any]:
    """Runs on every rank: contenders in turn, and the losses of one process beside theirs."""
    common = harness.peers_common()
    times = harness.alternate(contenders(names), rounds)
    baseline = _torch_step(common, _settings(common), common.build_model(_settings(common)), 0, 1)
    expected = [baseline(number) for number in range(CHECKED)]
    return {"times": asdict(times), "expected": expected}


def hold(name: str, steps: int) -> list[dict[str, float]]:
    """Runs on every rank: one contender alone, for what it holds in memory."""
    return harness.held(contenders([name])[name], steps)


def launched(name: str, steps: int) -> dict[str, Any]:
    """Runs on every rank: our step alone, measured as the peers measure theirs."""
    return harness.as_peers(contenders([name])[name], steps, name)


def run() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zero", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two minutes instead of six: fewer rounds")
    parser.add_argument("--only", action="append", choices=["here", "elsewhere"], help="a part of it")
    given = parser.parse_args()
    harness.peers_folder()
    about = harness.machine()
    if given.only != ["elsewhere"]:
        _here(12 if given.quick else 60, about)
    if given.only != ["here"]:
        _elsewhere(1 if given.quick else 4, 12 if given.quick else 20)


def _here(rounds: int, about: str) -> None:
    found = harness.run_ranks("benchmarks.zero:compare", names=HERE, rounds=rounds)
    times = harness.Times(**found["times"])
    memory = {name: harness.run_ranks("benchmarks.zero:hold", name=name, steps=6) for name in HERE}
    fastest = min(SHARDING, key=times.median)
    rows = [
        [
            name,
            f"{times.median(name):.1f}",
            times.show_ratio(name, LIMIT),
            times.show_ratio(name, DDP),
            times.show_ratio(name, fastest),
            times.show_cpu(name),
            harness.megabytes(memory[name], "own"),
            harness.megabytes(memory[name], "resident"),
        ]
        for name in HERE
    ]
    print(f"ZeRO on two ranks, {rounds} rounds in turn: {about}.\n")
    columns = ["step", "median ms", "x limit", "x DDP", f"x {fastest}", "CPU ms", "own MB", "resident MB"]
    print(harness.table(columns, rows))
    print()
    for name in HERE[1:]:
        print(harness.agreement(name, times.losses[name], found["expected"]))


def _elsewhere(rounds: int, steps: int) -> None:
    launches = {}
    for name, (environment, script, mode) in ELSEWHERE.items():
        python = harness.peer_python(environment)
        if python is None:
            print(f"\n{name} is not installed (`install_peer.sh {environment}` in the peers' folder): left out.")
            continue
        arguments = ("--mode", mode, "--steps", str(steps))
        launches[name] = lambda python=python, script=script, arguments=arguments: harness.peer(  # type: ignore[misc]
            python, script, *arguments
        )
    if not launches:
        return
    for name in OURS:
        launches[name] = lambda name=name: harness.run_ranks("benchmarks.zero:launched", name=name, steps=steps)  # type: ignore[misc]
    found = harness.launches(launches, rounds)
    print(
        f"\n{rounds} launches each in turn, {steps} steps a launch (Megatron-core brings its own form of the model):\n"
    )
    rows = []
    for name, results in found.items():
        stage = 3 if name.endswith("3") else 2 if name.endswith("2") else 1
        ours = found[f"Shardwise zero={stage}"]
        last = results[-1]
        over = [peak - start for peak, start in zip(last["peak_mb"], last["import_mb"], strict=True)]
        ratios = {} if name in OURS else {name: harness.launch_ratio(ours, results)}
        (row,) = harness.launch_rows({name: results}, ratios)
        rows.append([*row, "/".join(map(str, last["peak_mb"])), "/".join(map(str, over))])
    columns = ["step", "median ms", "best ms", "ours of that stage / it", "peak resident MB", "over import"]
    print(harness.table(columns, rows))


if __name__ == "__main__":
    harness.main(run)
