"""Tensor parallelism: our step at tensor = 2 beside DTensor's, Megatron-core's, and a step without communication.

    python -m benchmarks.tensor [--quick]

All train the model of the peers' `common.py` with the same AdamW on the same rows, with the sequence split between the
matrices and without. The limit is half the rows on each rank and no exchange at all.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from benchmarks import harness
from benchmarks.harness import Step

LIMIT = "no communication (limit)"
OURS, DTENSOR, MEGATRON = "Shardwise", "DTensor", "Megatron-core"
SPLIT = ", sequence split"
# Steps whose losses are compared with those of one process.
CHECKED = 5

RULES = {
    "embed.tok": "vocabulary",
    "embed.pos": "sequence",
    "layers.*.attn": "entrance",
    "layers.*.attn.wo": "row",
    "layers.*.mlp.fc1": "column",
    "layers.*.mlp.fc2": "row",
    "head.out": "vocabulary",
}


def _settings(common: Any) -> Any:
    return common.parser().parse_args([])


def _torch_step(common: Any, settings: Any, rank: int, num_ranks: int) -> Step:
    net = common.build_model(settings)
    optimizer = common.adamw(settings, net.parameters())

    def step(number: int) -> float:
        inputs, targets = common.dp_batch(settings, number, rank, num_ranks)
        loss = common.loss_fn(net(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def _our_step(common: Any, settings: Any, num_ranks: int, sequence: bool) -> Step:
    from shardwise import AdamW, Plan, parallelize
    from shardwise.tensor_parallel.rules import Style

    optimizer = AdamW(lr=settings.lr, betas=(0.9, 0.999), weight_decay=0.01)
    rules: Any = {**RULES, "layers.*.attn.wq|wk|wv": Style("column", unit="head_dim")}
    plan = Plan(tensor=num_ranks, sequence=sequence)
    model = common.build_model(settings)
    parallel = parallelize(model, plan, optimizer=optimizer, decay=lambda name, parameter: True, rules=rules)
    return lambda number: parallel.step(common.batch(settings, number)).loss


def _dtensor_step(common: Any, settings: Any, num_ranks: int, sequence: bool) -> Step:
    """DTensor's ColwiseParallel, RowwiseParallel and SequenceParallel, with its parallel loss, as its tutorial applies
    them."""
    import torch.nn.functional as F
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        loss_parallel,
        parallelize_module,
    )

    model, mesh = common.build_model(settings), init_device_mesh("cpu", (num_ranks,))
    stream: Any = Shard(1) if sequence else Replicate()
    ends: dict[str, Any] = {
        "embed.tok": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "head.out": ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False),
    }
    block: dict[str, Any] = {
        **{f"attn.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
        "attn.wo": RowwiseParallel(output_layouts=stream),
        "mlp.fc1": ColwiseParallel(),
        "mlp.fc2": RowwiseParallel(output_layouts=stream),
    }
    if sequence:
        gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        block |= {"ln1": SequenceParallel(), "ln2": SequenceParallel(), "attn": gathered, "mlp": gathered}
        scattered = PrepareModuleOutput(output_layouts=(Replicate(),), desired_output_layouts=(Shard(1),))
        parallelize_module(model, mesh, {"head.ln": SequenceParallel(), "embed": scattered})
    parallelize_module(model, mesh, ends)
    for layer in model.layers.values():
        parallelize_module(layer, mesh, block)
    # One fused call cannot mix DTensors and plain parameters.
    kinds: tuple[list[Any], list[Any]] = ([], [])
    for parameter in model.parameters():
        kinds[isinstance(parameter, DTensor)].append(parameter)
    optimizers = [common.adamw(settings, kind) for kind in kinds if kind]

    def step(number: int) -> float:
        inputs, targets = common.batch(settings, number)
        with loss_parallel():
            loss: Any = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        loss = loss.detach()
        return float(loss.full_tensor() if hasattr(loss, "full_tensor") else loss)

    return step


def contenders(names: list[str]) -> dict[str, Step]:
    """The contenders' steps on this rank. Collective over the world, which this initialises."""
    common = harness.peers_common()
    settings = _settings(common)
    harness.connect()
    rank, num_ranks = harness.place()
    make: dict[str, Callable[[], Step]] = {
        LIMIT: lambda: _torch_step(common, settings, rank, num_ranks),
        OURS: lambda: _our_step(common, settings, num_ranks, False),
        OURS + SPLIT: lambda: _our_step(common, settings, num_ranks, True),
        DTENSOR: lambda: _dtensor_step(common, settings, num_ranks, False),
        DTENSOR + SPLIT: lambda: _dtensor_step(common, settings, num_ranks, True),
    }
    return {name: make[name]() for name in names}


def compare(names: list[str], rounds: int) -> dict[str, Any]:
    """Runs on every rank: contenders in turn, and the losses of one process beside theirs."""
    common = harness.peers_common()
    times = harness.alternate(contenders(names), rounds)
    baseline = _torch_step(common, _settings(common), 0, 1)
    expected = [baseline(number) for number in range(CHECKED)]
    return {"times": asdict(times), "expected": expected}


def hold(name: str, steps: int) -> list[dict[str, float]]:
    """Runs on every rank: one contender alone, for what it holds in memory."""
    return harness.held(contenders([name])[name], steps)


def launched(name: str, steps: int) -> dict[str, Any]:
    """Runs on every rank: one contender alone, measured as the peers measure theirs."""
    return harness.as_peers(contenders([name])[name], steps, "shardwise")


def run() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tensor", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two minutes instead of ten: fewer rounds")
    quick = parser.parse_args().quick
    harness.peers_folder()
    names = [LIMIT, DTENSOR, OURS, DTENSOR + SPLIT, OURS + SPLIT]
    about = harness.machine()
    found = harness.run_ranks("benchmarks.tensor:compare", names=names, rounds=12 if quick else 60)
    times = harness.Times(**found["times"])
    memory = {name: harness.run_ranks("benchmarks.tensor:hold", name=name, steps=6) for name in names}
    rows = [
        [
            name,
            f"{times.median(name):.1f}",
            times.show_ratio(name, LIMIT),
            times.show_ratio(name, DTENSOR + (SPLIT if SPLIT in name else "")),
            times.show_cpu(name),
            harness.megabytes(memory[name], "own"),
        ]
        for name in names
    ]
    print(f"Tensor parallelism on two ranks, {len(times.milliseconds[OURS])} rounds in turn: {about}.\n")
    print(harness.table(["step", "median ms", "x limit", "x DTensor", "CPU ms", "own MB"], rows))
    print()
    for name in names[1:]:
        print(harness.agreement(name, times.losses[name], found["expected"]))
    for split in ("", SPLIT):
        _megatron(split, 2 if quick else 4, 20 if quick else 30)


def _megatron(split: str, rounds: int, steps: int) -> None:
    python = harness.peer_python("megatron")
    if python is None:
        print(
            "\nMegatron-core is not installed (`install_peer.sh megatron megatron-core` in the peers' folder): "
            "left out."
        )
        return
    mode = "tp_sp" if split else "tp"
    found = harness.launches(
        {
            OURS + split: lambda: harness.run_ranks("benchmarks.tensor:launched", name=OURS + split, steps=steps),
            MEGATRON + split: lambda: harness.peer(python, "run_megatron.py", "--mode", mode, "--steps", str(steps)),
        },
        rounds,
    )
    ratio = harness.launch_ratio(found[OURS + split], found[MEGATRON + split])
    print(
        f"\n{rounds} launches each in turn, {steps} steps a launch (Megatron-core brings its own form of the model):\n"
    )
    rows = harness.launch_rows(found, {MEGATRON + split: ratio})
    print(harness.table(["step", "median ms", "best ms", "Shardwise / it"], rows))


if __name__ == "__main__":
    harness.main(run)
