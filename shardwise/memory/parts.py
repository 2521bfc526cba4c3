"""The parts of a block whose results may be kept while the rest is computed again: matrix products and attention."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from shardwise import gradient
from shardwise.memory import attention
from shardwise.memory.attention import Given
from shardwise.memory.replay import Block, Part, watch
from shardwise.models.attention import Core
from shardwise.tensor_parallel.linear import Columns, Row


def watch_parts(block: Block, root: nn.Module, layer_of: Callable[[nn.Module], object]) -> None:
    """Find the parts of a block, and have them computed through it.

    Args:
        root: the block's module.
        layer_of: what computes a module that tensor parallelism has divided, None for others.
    """
    columns: dict[int, dict[int, Part]] = {}
    for path, module in root.named_modules():
        layer = layer_of(module)
        if isinstance(layer, Columns):
            watch(module, block, _of_columns(path, module, layer, columns.setdefault(id(layer), {})))
        elif isinstance(layer, Row):
            watch(module, block, _alone(path, module, layer.__call__, layer.shape))
        elif gradient.computes_apart(module):
            watch(module, block, _alone(path, module, module.forward, _shape_of_linear(module)))
        elif type(module) is Core and "forward" not in module.__dict__:
            watch(module, block, _of_core(path, module))


def _alone(
    path: str, module: nn.Module, compute: Callable[..., Tensor], shape: Callable[[Tensor], tuple[int, ...]]
) -> Part:
    """A linear layer: `compute(x, [y])` gives y its graph."""
    call = module.forward

    def keep(x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        y = call(x)
        return y, (y,)

    return Part(path, call, keep, known=lambda kept, x: compute(x, list(kept)), shape=shape)


def _shape_of_linear(module: nn.Module) -> Callable[[Tensor], tuple[int, ...]]:
    def shape(x: Tensor) -> tuple[int, ...]:
        weight = module.weight
        assert isinstance(weight, Tensor)
        return (*x.shape[:-1], weight.shape[0])

    return shape


def _of_columns(path: str, module: nn.Module, layer: Columns, known: dict[int, Part]) -> Part:
    """One of several layers that are computed together."""
    call = module.forward
    position = next(number for number, landing in enumerate(layer.landings) if landing.module is module)

    def keep(x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        y = call(x)
        return y, (y,)

    def prime(kept: list[tuple[Tensor, ...]], x: Tensor) -> None:
        layer.know([y for (y,) in kept], x)

    part = Part(path, call, keep, prime=prime)
    known[position] = part
    together = [known[number] for number in sorted(known)]
    for other in together:
        other.together = together
    return part


def _of_core(path: str, core: Core) -> Part:
    def given(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Given:
        k, v, mask, causal = core.reach(q, k, v, documents)
        return Given(q, k, v, mask, causal, core.dropout if core.training else 0.0)

    def known(kept: tuple[Tensor, ...], *args: Any) -> Any:
        return attention.known(kept, given(*args))

    return Part(
        path,
        call=lambda *args: attention.attention(given(*args)),
        keep=lambda *args: attention.keep(given(*args)),
        known=known,
        spared=lambda *args: attention.spared(given(*args)),
        beside=lambda *args: attention.beside(given(*args)),
    )
