"""Recomputation: time and activation bytes of our choices beside torch's checkpoint and its selective checkpoint.

    python -m benchmarks.recompute [--quick] [--rounds 9] [--lengths 128 512 2048] [--dropout 0.0] [--plot curve.png]

One process trains the same GPT-2 style model on the same rows with each way of recomputing, in turn. torch's run in a
plain loop with its own AdamW; so does its model without recomputation. Bytes are what blocks keep for backward.
"""

import argparse
from collections.abc import Callable
from typing import Any

from benchmarks import harness
from benchmarks.harness import Step

LAYERS, HIDDEN, HEADS, VOCABULARY, TOKENS = 4, 256, 4, 256, 2048
OURS = ("none", "selective", 0.8, 0.6, 0.4, 0.2, "full")
TORCH, CHECKPOINT, SELECTIVE = "torch", "torch checkpoint", "torch selective checkpoint"


def _model(length: int, dropout: float, device: str) -> Any:
    import torch

    from shardwise.models import build
    from shardwise.models.config import ModelConfig

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "sequence": length}
    return build(ModelConfig(family="gpt2", dropout=dropout, tied=False, **sizes), VOCABULARY, device)


def _rows(number: int, length: int) -> Any:
    import torch

    return torch.randint(VOCABULARY, (TOKENS // length, length), generator=torch.Generator().manual_seed(number))


def _ours(how: str | float, length: int, dropout: float) -> tuple[Step, Callable[[], int]]:
    from shardwise import AdamW, Plan, parallelize

    parallel = parallelize(_model(length, dropout, "cpu"), Plan(recompute=how), optimizer=AdamW(lr=1e-4))

    def step(number: int) -> float:
        rows = _rows(number, length)
        return parallel.step(({"tokens": rows}, rows)).loss

    return step, lambda: parallel.recomputed.kept_bytes if parallel.recomputed is not None else 0


def _theirs(how: str, length: int, dropout: float) -> tuple[Step, Callable[[], int]]:
    import torch
    from torch import nn
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    model = _model(length, dropout, "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    aten = torch.ops.aten
    kept = {aten.mm.default, aten.addmm.default, aten._scaled_dot_product_flash_attention_for_cpu.default}

    def policy(context: Any, op: Any, *args: Any, **named: Any) -> Any:
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    def stand_in(block: nn.Module) -> None:
        forward = block.forward
        more = {"context_fn": lambda: create_selective_checkpoint_contexts(policy)} if how == SELECTIVE else {}
        block.forward = lambda *args: checkpoint(forward, *args, use_reentrant=False, **more)  # type: ignore[method-assign]

    if how != TORCH:
        for block in model.blocks:
            stand_in(block)

    def step(number: int) -> float:
        rows = _rows(number, length)
        logits = model(rows)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    # What a block keeps: its input, of the selective one every saved operation's result, the last product's too.
    stream = TOKENS * HIDDEN * 4
    fused = stream + TOKENS * HEADS * 4 if dropout == 0 else 0  # with dropout torch's attention is not one operation
    each = {CHECKPOINT: stream, SELECTIVE: stream * 10 + fused}.get(how, 0)
    return step, lambda: LAYERS * each


def measure(length: int, rounds: int, dropout: float) -> dict[str, Any]:
    """Times and bytes of every contender, of this process alone."""
    harness.connect()
    steps: dict[str, Step] = {}
    kept: dict[str, Callable[[], int]] = {}
    for how in OURS:
        steps[f"ours, {how}"], kept[f"ours, {how}"] = _ours(how, length, dropout)
    for name in (TORCH, CHECKPOINT, SELECTIVE):
        steps[name], kept[name] = _theirs(name, length, dropout)
    times = harness.alternate(steps, rounds)
    found = {name: size() for name, size in kept.items()}
    # Without recomputation nothing is measured: what a block of the same model would keep, from one that is.
    found["ours, none"] = found[TORCH] = _without(length, dropout)
    return {"milliseconds": times.milliseconds, "cpu": times.cpu, "losses": times.losses, "bytes": found}


def _without(length: int, dropout: float) -> int:
    from shardwise import SGD, Plan, parallelize

    parallel = parallelize(_model(length, dropout, "cpu"), Plan(recompute="full"), optimizer=SGD(lr=0.0))
    for number in range(2):
        rows = _rows(number, length)
        parallel.step(({"tokens": rows}, rows))
    assert parallel.recomputed is not None
    return parallel.recomputed.without_bytes


def plot(path: str, curves: dict[int, tuple[Any, dict[str, int]]]) -> None:
    """Draw time over bytes kept, a panel a length."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(curves), figsize=(5 * len(curves), 4), squeeze=False)
    for panel, (length, (times, kept)) in zip(panels[0], curves.items(), strict=True):
        for start, label in (("ours", "Shardwise"), ("torch", "torch")):
            points = sorted((kept[name], times.median(name)) for name in kept if name.startswith(start))
            panel.plot([x / 2**20 for x, _ in points], [y for _, y in points], "o-", label=label)
        panel.set(title=f"sequence {length}", xlabel="activations kept, MiB", ylabel="ms a step")
        panel.legend()
    figure.tight_layout()
    figure.savefig(path)


def run() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recompute", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="3 rounds")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--plot", metavar="FILE", help="draw the curves (needs matplotlib)")
    given = parser.parse_args()
    given.rounds = 3 if given.quick else given.rounds
    print(f"{harness.machine()}; {TOKENS} tokens a step, dropout {given.dropout}, {given.rounds} rounds in turn")
    curves: dict[int, tuple[Any, dict[str, int]]] = {}
    for length in given.lengths:
        found = harness.run_ranks(
            "benchmarks.recompute:measure", 1, length=length, rounds=given.rounds, dropout=given.dropout
        )
        times, kept = harness.Times(found["milliseconds"], found["cpu"], found["losses"]), found["bytes"]
        curves[length] = times, kept
        rows = [
            [
                name,
                f"{kept[name] / 2**20:.1f}",
                f"{1 - kept[name] / kept[TORCH]:.0%}",
                f"{times.median(name):.0f}",
                times.show_cpu(name),
                times.show_ratio(name, "ours, none" if name.startswith("ours") else TORCH),
                times.show_ratio(name, CHECKPOINT),
            ]
            for name in kept
        ]
        print(f"\nSequence {length}:\n")
        header = [
            "recomputation",
            "MiB kept",
            "saved",
            "median ms",
            "CPU ms",
            "x its own without",
            "x torch checkpoint",
        ]
        print(harness.table(header, rows), flush=True)
    if given.plot:
        plot(given.plot, curves)


if __name__ == "__main__":
    harness.main(run)
