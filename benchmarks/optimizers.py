"""Optimizers alone: our updates beside torch's, transformers', bitsandbytes' and torchao's.

    python -m benchmarks.optimizers [--rounds 30] [--wide]

Run it with an interpreter that has the peers too; those that are not installed are left out. All update the parameters
of the peers' model (5.28 million; `--wide`: 25 million in larger matrices) by the same gradients on one core; those
that quantize do so with every matrix.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import harness
from benchmarks.harness import Step

ADAMW, ADAFACTOR, ADAMW_8BIT = "Shardwise AdamW", "Shardwise Adafactor", "Shardwise AdamW8bit"


def _ours(optimizer: Any, parameters: Any) -> tuple[Step, Callable[[], int]]:
    """The update as the engine makes it on one rank: of whole parameters, or runs of them."""
    from shardwise.optimizers import Fragment

    def fragment(name: str, tensors: list[Any]) -> Any:
        import torch

        own = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        gradient = torch.cat([tensor.grad.reshape(-1) for tensor in tensors])
        shape = tuple(tensors[0].shape) if len(tensors) == 1 else (len(own),)
        made = Fragment(name, shape, 0, len(own), own, gradient, tensors[0].ndim >= 2, None, shape)
        made.state = optimizer.state(made)
        return made

    if optimizer.elementwise:
        runs = [[p for p in parameters.values() if (p.ndim >= 2) == decay] for decay in (True, False)]
        fragments = [fragment("", run) for run in runs]
    else:
        fragments = [fragment(name, [parameter]) for name, parameter in parameters.items()]

    def step(number: int) -> float:
        for _ in optimizer.update(fragments, lr=optimizer.lr, step=number + 1, scale=1.0):
            pass
        return 0.0

    return step, lambda: sum(_bytes(tensor) for made in fragments for tensor in made.state.values())


def _theirs(optimizer: Any) -> tuple[Step, Callable[[], int]]:
    def step(number: int) -> float:
        optimizer.step()
        return 0.0

    return step, lambda: sum(_bytes(value) for state in optimizer.state.values() for value in state.values())


def _bytes(value: Any) -> int:
    import torch

    if hasattr(value, "__tensor_flatten__"):
        return sum(_bytes(getattr(value, name)) for name in value.__tensor_flatten__()[0])
    # Their step counts are not state of the parameters.
    return value.numel() * value.element_size() if torch.is_tensor(value) and value.ndim else 0


def _contenders(muon: bool) -> Iterator[tuple[str, Callable[[Any], tuple[Step, Callable[[], int]]]]]:
    """By name, what makes a step from parameters that have gradients."""
    import torch

    from shardwise.optimizers import Adafactor, AdamW, AdamW8bit, Lion, Muon

    yield "torch AdamW, fused", lambda p: _theirs(torch.optim.AdamW(p.values(), lr=1e-4, fused=True))
    yield ADAMW, lambda p: _ours(AdamW(lr=1e-4), p)
    yield "Shardwise Lion", lambda p: _ours(Lion(), p)
    yield "torch Adafactor", lambda p: _theirs(torch.optim.Adafactor(p.values()))
    try:
        from transformers.optimization import Adafactor as Transformers
    except ImportError:
        pass
    else:
        yield "transformers Adafactor", lambda p: _theirs(Transformers(p.values()))
    yield ADAFACTOR, lambda p: _ours(Adafactor(), p)
    try:
        from bitsandbytes.optim import AdamW8bit as BitsAndBytes
    except ImportError:
        pass
    else:
        yield "bitsandbytes AdamW8bit", lambda p: _theirs(BitsAndBytes(p.values(), lr=1e-4))
    try:
        from torchao.optim import AdamW8bit as TorchAo
    except ImportError:
        pass
    else:
        yield "torchao AdamW8bit", lambda p: _theirs(TorchAo(p.values(), lr=1e-4))
    yield ADAMW_8BIT, lambda p: _ours(AdamW8bit(lr=1e-4, exclude=()), p)
    if muon:
        yield "Shardwise Muon", lambda p: _ours(Muon(), p)


def measure(rounds: int, wide: bool, muon: bool) -> dict[str, Any]:
    """Times and state bytes by contender, of this process alone."""
    import torch

    harness.connect()
    common = harness.peers_common()
    sizes = ["--d-model", "512", "--vocab", "12288"] if wide else []
    model = common.build_model(common.parser().parse_args(sizes))
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    steps, state = {}, {}
    for name, make in _contenders(muon):
        generator = torch.Generator().manual_seed(0)
        parameters = {}
        for key, shape in shapes.items():
            parameters[key] = torch.nn.Parameter(torch.randn(shape, generator=generator) * 0.02)
            parameters[key].grad = torch.randn(shape, generator=generator) * 1e-3
        steps[name], state[name] = make(parameters)
    times = harness.alternate(steps, rounds)
    return {
        "numel": sum(math.prod(shape) for shape in shapes.values()),
        "milliseconds": times.milliseconds,
        "cpu": times.cpu,
        "state": {name: count() for name, count in state.items()},
    }


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--wide", action="store_true", help="a model five times as large")
    parser.add_argument("--muon", action="store_true", help="our Muon too, which takes as long as its matrix products")
    given = parser.parse_args()
    machine = harness.machine()
    found = harness.run_ranks("benchmarks.optimizers:measure", 1, rounds=given.rounds, wide=given.wide, muon=given.muon)
    times = harness.Times(found["milliseconds"], found["cpu"], {})
    print(f"{machine}\n{found['numel'] / 1e6:.2f} million parameters, {given.rounds} rounds\n")
    rows = []
    for name in times.milliseconds:
        own = next(ours for ours in (ADAFACTOR, ADAMW_8BIT, ADAMW) if ours.split()[-1] in name or ours == ADAMW)
        ratio = times.show_ratio(name, own)
        state = found["state"][name]
        figures = [f"{times.median(name):.1f}", f"{times.best(name):.1f}", times.show_cpu(name), ratio]
        rows.append([name, *figures, f"{state / 2**20:.2f}", f"{state / found['numel']:.3f}"])
    header = [
        "optimizer",
        "median ms",
        "best ms",
        "processor ms",
        "time over ours of its kind",
        "state MB",
        "bytes a parameter",
    ]
    print(harness.table(header, rows))


if __name__ == "__main__":
    harness.main(run)
