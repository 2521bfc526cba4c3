"""Where modules stand in the stream between divided layers: gathered for those that need it whole, divided again behind
them, and random numbers that are a rank's own where what they fall on is.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardwise.functions import apply
from shardwise.initial import seed_of
from shardwise.layout import share
from shardwise.randomness import Generators, generators, restore, seed_generators
from shardwise.tensor_parallel.region import SEQUENCE_DIM, Region


class _Whole(torch.autograd.Function):
    """Shares -> the whole on every rank, for computation that every rank repeats: each has the whole gradient, and
    keeps its share."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, region: Region, dim: int, length: int) -> Tensor:
        ctx.region, ctx.dim = region, dim
        return region.exchange.gather(shard, dim, length)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _own(grad, ctx.region, ctx.dim), None, None, None


class _Share(torch.autograd.Function):
    """The whole on every rank -> this rank's share; the gradient of the whole is gathered."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, region: Region, dim: int) -> Tensor:
        ctx.region, ctx.dim, ctx.length = region, dim, whole.shape[dim]
        return _own(whole, region, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.region.exchange.gather(grad, ctx.dim, ctx.length), None, None


def _own(whole: Tensor, region: Region, dim: int) -> Tensor:
    start, stop = share(whole.shape[dim], region.axis.rank, region.axis.size)
    return whole.narrow(dim, start, stop - start).contiguous()


def whole(shard: Tensor, region: Region, dim: int, length: int) -> Tensor:
    """The tensor whose shares along `dim` the ranks hold; what follows must be the same on all of them."""
    return apply(_Whole, shard, region, dim, length)


def own_share(tensor: Tensor, region: Region, dim: int) -> Tensor:
    """This rank's share along `dim` of a tensor that all ranks hold."""
    return apply(_Share, tensor, region, dim)


class _Enter(torch.autograd.Function):
    """Shares -> the whole, before work that the ranks divide: each has a part of the gradient of the whole."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, region: Region) -> Tensor:
        ctx.region = region
        return region.gather(shard, region.length)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        exchange = ctx.region.exchange
        buffer = exchange.buffer(tuple(grad.shape), grad)
        buffer.copy_(grad)
        return exchange.start_sum(buffer, SEQUENCE_DIM)(), None


def enter_whole(module: nn.Module, region: Region) -> None:
    """Gather the stream, a module's first argument, before the module in place of in the column layers inside."""

    on_stream(module, lambda x: apply(_Enter, x, region))


def on_stream(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Change the stream before a module: its first argument, or, as Hugging Face's models name it, `hidden_states`."""

    def before(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        if args:
            return (change(args[0]), *args[1:]), named
        return args, {**named, "hidden_states": change(named["hidden_states"])}

    module.register_forward_pre_hook(before, with_kwargs=True)


def keep_whole(module: nn.Module, region: Region) -> None:
    """Have a module see whole sequences: what it is given of the stream is gathered, what it returns divided again."""

    def gathered(value: Any) -> Any:
        streamed = isinstance(value, Tensor) and value.is_floating_point() and value.ndim > SEQUENCE_DIM + 1
        return whole(value, region, SEQUENCE_DIM, region.length) if streamed else value

    def before(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        return tuple(gathered(value) for value in args), {name: gathered(value) for name, value in named.items()}

    def after(_: nn.Module, args: Any, output: Any) -> Any:
        values = output if isinstance(output, tuple) else (output,)
        found = tuple(
            own_share(value, region, SEQUENCE_DIM)
            if isinstance(value, Tensor) and value.ndim > SEQUENCE_DIM + 1
            else value
            for value in values
        )
        return found if isinstance(output, tuple) else found[0]

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)


def divide_positions(module: nn.Embedding, region: Region) -> None:
    """Have an embedding of positions, whose index ends in the sequence, look up this rank's positions only."""

    def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        start, stop = region.share()
        return (args[0].narrow(-1, start, stop - start), *args[1:])

    module.register_forward_pre_hook(before)


def own_numbers(module: nn.Module, region: Region) -> None:
    """Have a module draw random numbers that differ between the tensor ranks.

    One number from the stream that the ranks share seeds them, together with the rank: so that stream goes on alike on
    all of them, and running the module again from the same state (recomputation) draws the same.
    """
    saved: list[Generators] = []

    def before(module: nn.Module, args: Any) -> None:
        if not module.training:
            return
        common = int(torch.randint(1 << 62, ()))
        saved.append(generators())
        seed_generators(seed_of(common, region.axis.rank))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if saved:
            restore(saved.pop())

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, always_call=True)
