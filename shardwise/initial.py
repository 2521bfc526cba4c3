"""Initial values that do not depend on the layout.

Each parameter is drawn in blocks of rows, each block from a generator seeded by (seed, parameter name, block), so a
rank that holds a part of a parameter draws only the blocks that overlap its part, and every layout starts from the same
bits.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

# Elements in a block: large enough that seeding a generator costs nothing beside drawing, small enough that a rank that
# holds a few rows draws little more than those.
BLOCK_ELEMENTS = 1 << 16


@dataclass(frozen=True)
class Initial:
    """How a parameter starts: `normal` with standard deviation `value`, `uniform` in [-value, value], or `constant`
    `value`."""

    kind: Literal["normal", "uniform", "constant"]
    value: float


def seed_of(*parts: object) -> int:
    """A 63-bit seed from any printable parts; the same on every machine and in every process."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def draw_rows(name: str, shape: tuple[int, ...], initial: Initial, seed: int, start: int, stop: int) -> Tensor:
    """Rows `start` to `stop` (along dim 0) of the parameter `name` of global `shape`, in float32 on the CPU.

    A parameter with no dimensions counts as one row.
    """
    rows = shape[0] if shape else 1
    row_shape = shape[1:]
    assert 0 <= start <= stop <= rows, (name, shape, start, stop)
    out = torch.empty((stop - start, *row_shape))
    if initial.kind == "constant":
        return out.fill_(initial.value)
    per_block = max(1, BLOCK_ELEMENTS // max(1, math.prod(row_shape)))
    generator = torch.Generator()
    for block in range(start // per_block, -(-stop // per_block)):
        low, high = block * per_block, min((block + 1) * per_block, rows)
        generator.manual_seed(seed_of(seed, name, block))
        values = torch.empty((high - low, *row_shape))
        if initial.kind == "normal":
            values.normal_(0.0, initial.value, generator=generator)
        else:
            values.uniform_(-initial.value, initial.value, generator=generator)
        first, last = max(start, low), min(stop, high)
        out[first - start : last - start] = values[first - low : last - low]
    return out


def _linear(module: nn.Module, attribute: str) -> Initial:
    weight = module.weight
    assert isinstance(weight, Tensor)
    fan_in = math.prod(weight.shape[1:])
    return Initial("uniform", 1 / math.sqrt(fan_in) if fan_in else 0.0)


def _norm(module: nn.Module, attribute: str) -> Initial:
    return Initial("constant", 1.0 if attribute == "weight" else 0.0)


# PyTorch's own defaults, which draw whole tensors in order of construction, restated as distributions.
_DEFAULTS: tuple[tuple[tuple[type[nn.Module], ...], Callable[[nn.Module, str], Initial]], ...] = (
    ((nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d), _linear),
    ((nn.LayerNorm, nn.RMSNorm, nn.GroupNorm), _norm),
    ((nn.Embedding,), lambda module, attribute: Initial("normal", 1.0)),
)


def initial_of(model: nn.Module, name: str) -> Initial:
    """How parameter `name` of `model` starts: what the model's own `initial_value(name)` says, else PyTorch's default
    for the module that owns it.

    Raises:
        ValueError: neither knows the parameter.
    """
    own = getattr(model, "initial_value", None)
    if callable(own):
        value = own(name)
        assert isinstance(value, Initial), f"initial_value({name!r}) returned {value!r}"
        return value
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    for types, rule in _DEFAULTS:
        # The row of a padding index starts as zeros, and no distribution says so.
        if isinstance(module, types) and getattr(module, "padding_idx", None) is None:
            return rule(module, attribute)
    raise ValueError(
        f"parameter {name!r} of {type(module).__name__} is on the meta device and has no known initial value: "
        "build the model on a real device, or give the model a method initial_value(name) that returns "
        "shardwise.Initial"
    )
