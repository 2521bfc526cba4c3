"""Linear layers divided by their outputs or their inputs (Megatron-LM, arXiv 1909.08053, section 3).

Weight gradients land in the bucket slots as those of any linear layer do, or are put off for a schedule's W; the sum of
input gradients between the ranks runs while they are computed. With the sequence split, the stream is gathered before a
column-divided layer and the sum behind a row-divided one is left divided; what is kept for backward is the rank's
share, gathered again when it is needed (arXiv 2205.05198, section 4.2.2).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardwise import kernels
from shardwise.functions import apply, apply_all
from shardwise.tensor_parallel.region import SEQUENCE_DIM, Landing, Region, product, rows_of


class Columns:
    """Linear layers with one input, each divided by its outputs: this rank computes its part of every output.

    The layers are called one by one by the model's own code. The first call computes all of them, so that the input is
    gathered, and its gradient summed, once; the others are handed what is there. A layer called with another input is
    computed anew, with all the others.

    Args:
        region: the tensor axis.
        modules: the layers, which hold this rank's rows of their weights.
        entered: whether the module they are in gathers the stream, and divides its gradient, in their place.
        transposed: whether their weights are (in, out).
    """

    def __init__(
        self, region: Region, modules: Sequence[nn.Module], entered: bool = False, transposed: bool = False
    ) -> None:
        self.region = region
        self.entered = entered
        self.gathers = region.sequence and not entered
        self.landings = [Landing(module, transposed) for module in modules]
        self._input: Tensor | None = None
        self._version = 0
        self._grad = False
        self._outputs: list[Tensor | None] = []
        for landing in self.landings:
            landing.layer = self
        region.at_begin.append(self.forget)

    def forget(self) -> None:
        self._input, self._outputs = None, []

    def __call__(self, position: int, x: Tensor) -> Tensor:
        """Output of layer `position`: (B, S, H), or this rank's share of it, -> (B, S, out / R)."""
        known = self._input is x and self._version == x._version and self._grad == torch.is_grad_enabled()
        if not known or self._outputs[position] is None:
            self._outputs = list(self._compute(x))
            self._input, self._version, self._grad = x, x._version, torch.is_grad_enabled()
        output = self._outputs[position]
        self._outputs[position] = None
        assert output is not None
        if all(other is None for other in self._outputs):
            self.forget()
        return output

    def know(self, outputs: list[Tensor], x: Tensor) -> None:
        """Have the next call of each layer return its output for `x`, which is there already, with its graph."""
        self._outputs = list(self._compute(x, outputs))
        self._input, self._version, self._grad = x, x._version, torch.is_grad_enabled()

    def _compute(self, x: Tensor, known: list[Tensor] | None = None) -> Sequence[Tensor]:
        weights = [landing.matrix() for landing in self.landings]
        biases = [landing.parameter("bias") for landing in self.landings]
        if torch.is_grad_enabled():
            return apply_all(_Columns, x, self, known, *weights, *biases)
        return _column_products(self, x, weights, biases)


def _column_products(
    columns: Columns, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> list[Tensor]:
    region, pairs = columns.region, list(zip(weights, biases, strict=True))
    if not columns.gathers:
        return [kernels.linear(x, weight, bias) for weight, bias in pairs]
    found = [[kernels.linear(part, *pair) for pair in pairs] for part in region.gathered(x, region.length)]
    return [outputs[0] if len(outputs) == 1 else torch.cat(outputs) for outputs in zip(*found, strict=True)]


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, columns: Columns, known: list[Tensor] | None, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases = parameters[: len(parameters) // 2], parameters[len(parameters) // 2 :]
        region = columns.region
        ctx.columns, ctx.length = columns, region.length
        ctx.save_for_backward(x, *weights)
        ctx.set_materialize_grads(False)
        if known is not None:
            return tuple(known)
        found = _column_products(columns, x, weights, biases)  # type: ignore[arg-type]
        return tuple(output.detach() for output in found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        region: Region = ctx.columns.region
        landings: list[Landing] = ctx.columns.landings
        num = len(landings)
        flats = [None if grad is None else rows_of(grad) for grad in grads]
        tape = landings[0].tape
        wants_weights = [
            flat is not None and (landing.direct("weight") is not None or needed)
            for flat, landing, needed in zip(flats, landings, ctx.needs_input_grad[3 : 3 + num], strict=True)
        ]
        by_autograd = [
            w and landing.direct("weight") is None for w, landing in zip(wants_weights, landings, strict=True)
        ]
        now = any(by_autograd) or (any(wants_weights) and tape.record is None)
        gathers: bool = ctx.columns.gathers
        gathered = region.gather(x, ctx.length) if gathers and now else None

        finish: Callable[[], Tensor] | None = None
        if ctx.needs_input_grad[0]:
            shape = list(x.shape)
            if gathers:
                shape[SEQUENCE_DIM] = ctx.length
            entered: bool = ctx.columns.entered
            buffer = torch.empty_like(x) if entered else region.exchange.buffer(tuple(shape), x)
            total, first = buffer.view(-1, x.shape[-1]), True
            for flat, weight in zip(flats, weights, strict=True):
                if flat is not None:
                    product(flat, weight, total, first)
                    first = False
            if first:
                total.zero_()
            finish = (lambda: buffer) if entered else region.exchange.start_sum(buffer, region.scatter)

        # What is put off must not hold on to the graph: it would to a recomputed block's input.
        length, x_alone = ctx.length, x.detach()

        def land() -> None:
            whole = gathered
            if whole is None:
                whole = region.gather(x_alone, length) if gathers and any(wants_weights) else x_alone
            for flat, landing in zip(flats, landings, strict=True):
                bias_slot = landing.direct("bias")
                if flat is not None:
                    landing.land_matrix(flat, rows_of(whole))
                if flat is not None and bias_slot is not None:
                    bias_slot.add_sum(flat)

        whole_x = x if gathered is None else gathered
        for_autograd: list[Tensor | None] = [
            flat.t() @ rows_of(whole_x) if own and flat is not None else None
            for own, flat in zip(by_autograd, flats, strict=True)
        ]
        for flat, landing, needed in zip(flats, landings, ctx.needs_input_grad[3 + num :], strict=True):
            own = flat is not None and needed and landing.direct("bias") is None
            for_autograd.append(flat.sum(0) if own and flat is not None else None)
        if tape.record is None:
            land()
            return (finish() if finish is not None else None), None, None, *for_autograd
        grad_x = finish() if finish is not None else None
        tape.run(land, whole_x, *(flat for flat in flats if flat is not None))
        return grad_x, None, None, *for_autograd


class Row:
    """A linear layer divided by its inputs: the ranks' products are summed, and the whole bias added once.

    Args:
        region: the tensor axis.
        module: the layer, which holds this rank's columns of the weight and the whole bias.
        transposed: whether its weight is (in, out).
    """

    def __init__(self, region: Region, module: nn.Module, transposed: bool = False) -> None:
        self.region = region
        self.landing = Landing(module, transposed)
        self.landing.layer = self

    def shape(self, x: Tensor) -> tuple[int, ...]:
        """Of the output."""
        start, stop = self.region.share() if self.region.sequence else (0, x.shape[SEQUENCE_DIM])
        return (x.shape[0], stop - start, *x.shape[2:-1], self.landing.matrix().shape[0])

    def __call__(self, x: Tensor, known: list[Tensor] | None = None) -> Tensor:
        """(B, S, in / R) -> (B, S, out), or this rank's share of the sequence; `known` is that, where it is there and
        only its graph is wanted (recomputation)."""
        weight, bias = self.landing.matrix(), self.landing.parameter("bias")
        if torch.is_grad_enabled():
            return apply(_Row, x, weight, bias, self, known)
        return _row_product(self.region, x, weight, bias)


def _row_product(region: Region, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    waits = []
    for rows in region.parts(x):
        part = x[rows]
        buffer = region.exchange.buffer((*part.shape[:-1], weight.shape[0]), x)
        torch.mm(rows_of(part), weight.detach().t(), out=buffer.view(-1, weight.shape[0]))
        waits.append(region.exchange.start_sum(buffer, region.scatter))
    found = [wait() for wait in waits]
    out = found[0] if len(found) == 1 else torch.cat(found)
    return out if bias is None else out.add_(bias)


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, row: Row, known: list[Tensor] | None
    ) -> Tensor:
        ctx.row, ctx.length = row, row.region.length
        ctx.save_for_backward(x, weight)
        return known[0] if known is not None else _row_product(row.region, x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        region: Region = ctx.row.region
        landing: Landing = ctx.row.landing
        weight_slot, bias_slot = landing.direct("weight"), landing.direct("bias")
        needs_x, needs_weight, needs_bias, _, _ = ctx.needs_input_grad
        grads, products = [], []
        for part in region.gathered(grad, ctx.length) if region.sequence else (grad,):
            grads.append(part)
            if needs_x:
                products.append(kernels.linear(part, weight.t()))
        flat = rows_of(grads[0] if len(grads) == 1 else torch.cat(grads))
        grad_x = None
        if needs_x:
            grad_x = products[0].view(x.shape) if len(products) == 1 else torch.cat(products)

        x_alone = x.detach()  # without the graph, which would hold on to a recomputed block's input

        def land() -> None:
            landing.land_matrix(flat, rows_of(x_alone))
            if bias_slot is not None:
                bias_slot.add_sum(flat)

        if weight_slot is not None or bias_slot is not None:
            landing.tape.run(land, flat, x)
        return (
            grad_x,
            flat.t() @ rows_of(x) if needs_weight and weight_slot is None else None,
            flat.sum(0) if needs_bias and bias_slot is None else None,
            None,
            None,
        )
