"""The output matrix and the cross-entropy as one, some tokens at a time, so that no rank ever holds all its logits.

In training nothing is computed in the forward pass: what the model returns for logits is a promise, and the loss a
number that backward fills in. Backward takes tokens in chunks: their logits, their loss, in the same memory the
gradient of their logits, and from it the gradients of the input and of the matrix. So it costs the three products of
always, and knows what the loss is multiplied by. Whoever else looks at the promise gets the logits.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map_only

from shardwise import kernels
from shardwise.functions import apply
from shardwise.gradient import Slot, Tape, lands
from shardwise.loss import IGNORED, CrossEntropy, Loss, logits_of

# Tokens at a time, at least: fewer cost the gradient of the matrix a pass over its memory that shows. Where there are
# many tokens, as many as make the logits as large as the input is.
CHUNK_TOKENS = 256


class Holders(Protocol):
    """The ranks that hold an output matrix: each has the columns of its logits from `start`, of `vocabulary`."""

    size: int  # ranks
    vocabulary: int
    start: int

    @property
    def length(self) -> int:
        """Positions of the microbatch at hand, over all ranks, where the sequence is split; else 0."""

    def note(self) -> Callable[[], None]:
        """Note what microbatch is at hand; the function that is returned makes it so again."""

    def enter(self, x: Tensor, length: int) -> Tensor:
        """The matrix's whole input, of what this rank has of it."""

    def everyone(self, parts: Tensor) -> Tensor:
        """All ranks' parts (..., N), (R, ..., N)."""

    def sum(self, part: Tensor) -> Callable[[], Tensor]:
        """Begin to sum the ranks' parts of the gradient of the whole input; a function that waits, and returns the
        gradient of what this rank has of it."""


@dataclass
class Alone:
    """One rank holds the whole matrix."""

    vocabulary: int
    size: int = 1
    start: int = 0
    length: int = 0

    def note(self) -> Callable[[], None]:
        return lambda: None

    def enter(self, x: Tensor, length: int) -> Tensor:
        return x

    def everyone(self, parts: Tensor) -> Tensor:
        return parts.unsqueeze(0)

    def sum(self, part: Tensor) -> Callable[[], Tensor]:
        return lambda: part


# What can be asked of a tensor without its values.
_KNOWN = frozenset(
    getattr(Tensor, name).__get__
    for name in ("device", "dtype", "grad_fn", "is_leaf", "ndim", "requires_grad", "shape")
)


class Logits(Tensor):
    """The logits of an input, of their shape but without memory, which are computed when something looks at them."""

    head: "Head"
    x: Tensor
    found: Tensor | None
    before: list[Callable[[Tensor], Any]]  # called when their backward begins

    def computed(self) -> Tensor:
        """The logits themselves."""
        if self.found is None:
            with self.head.holding():
                self.found = self.head.compute(self.x)
            if self.found.requires_grad:
                for call in self.before:
                    self.found.register_hook(call)
        return self.found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(Logits, Logits.computed, (args, kwargs or {}))
        return func(*args, **kwargs)


class _Promise(torch.autograd.Function):
    """Promised logits stand in the graph as if they had been computed: a function of a user's own may be given them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, head: "Head") -> Tensor:
        ctx.x, ctx.head, ctx.again = x.detach().requires_grad_(x.requires_grad), head, head.holders.note()
        shape = list(x.shape[:-1])
        if head.holders.length:
            shape[1] = head.holders.length
        return x.new_empty(()).expand(*shape, weight.shape[0]).detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.again()
        with torch.enable_grad():
            found = ctx.head.compute(ctx.x)
        torch.autograd.backward(found, grad)
        return ctx.x.grad, None, None, None


def before_backward(output: Tensor, call: Callable[[Tensor], Any]) -> None:
    """Have a function called when the backward of what made `output` begins."""
    if type(output) is Logits and output.found is None:
        output.before.append(call)
    else:
        output.register_hook(call)


class Head:
    """An output matrix whose loss is computed with it.

    Args:
        module: an `nn.Linear`; its forward is replaced.
        slots, tape: where the gradients land that the module writes itself, by attribute; others go to autograd.
        holders: the ranks that hold the matrix.
    """

    def __init__(self, module: nn.Module, slots: dict[str, Slot], tape: Tape, holders: Holders) -> None:
        self.module = module
        self.slots = slots
        self.tape = tape
        self.holders = holders
        self.compute: Callable[[Tensor], Tensor] = module.forward
        # Makes the matrix be there, where it comes and goes.
        self.holding: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self._promises: bool | None = None
        module.forward = self._forward

    @contextlib.contextmanager
    def promising(self) -> Iterator[None]:
        """A forward inside, with gradients or without as now, may return promised logits: a loss will take them."""
        self._promises = torch.is_grad_enabled()
        try:
            yield
        finally:
            self._promises = None

    def _forward(self, input: Tensor) -> Tensor:
        # Within a recomputed part of the model, whose forward keeps no graph, promises would be lost.
        if self._promises is not torch.is_grad_enabled() or not self._own():
            return self.compute(input)
        weight, bias = self._parameters()
        logits: Logits = apply(_Promise, input, weight, bias, self).as_subclass(Logits)
        logits.head, logits.x, logits.found, logits.before = self, input, None, []
        return logits

    def _own(self) -> bool:
        """Whether the loss will find the matrix that the module computes with, and may write its gradient."""
        own = self.module._parameters
        if type(own["weight"]) is not nn.Parameter:  # `torch.func.functional_call` puts it there for the call alone
            return False
        return all(lands(own[attribute], slot) for attribute, slot in self.slots.items())

    def _parameters(self) -> tuple[Tensor, Tensor | None]:
        weight = self.module._parameters["weight"]
        assert weight is not None
        return weight, self.module._parameters["bias"]

    def loss(self, terms: CrossEntropy, otherwise: Loss) -> Loss:
        """The cross-entropy of these terms: with the matrix where its logits are a promise still, else `otherwise`."""

        def total(output: Any, targets: Tensor) -> Tensor:
            logits = logits_of(output)
            if type(logits) is not Logits or logits.found is not None or logits.shape[:-1].numel() != targets.numel():
                return otherwise.sum(output, targets)
            x, targets = logits.x, targets.reshape(-1)
            if logits.requires_grad:
                return apply(_HeadLoss, x, *self._parameters(), targets, self, terms, logits.before)
            with self.holding():
                return _run(x, *self._parameters(), targets, self, terms, self.holders.length)[0]

        return Loss(total, otherwise.count)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        head: Head,
        terms: CrossEntropy,
        before: list[Callable[[Tensor], Any]],
    ) -> Tensor:
        ctx.head, ctx.terms, ctx.before, ctx.length = head, terms, before, head.holders.length
        ctx.save_for_backward(x, weight, bias, targets)
        ctx.found = x.new_full((), float("nan"), dtype=torch.promote_types(x.dtype, torch.float32))
        found: Tensor = ctx.found.detach()  # not the tensor that is kept, which would be a circle
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        for call in ctx.before:
            call(grad)
        x, weight, bias, targets = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        found, *gradients = _run(x, weight, bias, targets, ctx.head, ctx.terms, ctx.length, grad, needs)
        ctx.found.copy_(found)
        return *gradients, None, None, None, None


def _check(targets: Tensor, vocabulary: int) -> None:
    wrong = (targets != IGNORED) & ((targets < 0) | (targets >= vocabulary))
    if bool(wrong.any()):
        raise IndexError(f"a target lies outside the {vocabulary} tokens of the vocabulary")


def _run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    head: Head,
    terms: CrossEntropy,
    length: int,
    grad: Tensor | None = None,
    needs: Sequence[bool] = (False, False, False),
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The loss, and, for a gradient of it, those of input, matrix and bias that autograd is to have."""
    holders, slots, tape = head.holders, head.slots, head.tape
    if targets.device.type == "cpu":
        _check(targets, holders.vocabulary)
    whole = holders.enter(x, length)
    flat = whole.reshape(-1, whole.shape[-1])
    assert len(flat) == len(targets), (tuple(whole.shape), len(targets))
    dtype = torch.promote_types(x.dtype, torch.float32)
    loss = torch.zeros((), dtype=dtype, device=x.device)
    slope_of_input = torch.empty_like(whole) if needs[0] else None
    weight_gradient = torch.zeros_like(weight, dtype=dtype) if needs[1] and "weight" not in slots else None
    bias_gradient = (
        torch.zeros_like(bias, dtype=dtype) if bias is not None and needs[2] and "bias" not in slots else None
    )

    def land(slope: Tensor, part: Tensor, last: bool) -> None:
        if "weight" in slots:
            slots["weight"].matmul(slope.t(), part, last)
        if "bias" in slots:
            slots["bias"].add(slope.sum(0), last)

    final: Callable[[], None] | None = None
    # The same on all ranks, which may have a column more or less.
    step = max(CHUNK_TOKENS, len(flat) * flat.shape[1] * holders.size // holders.vocabulary)
    starts = range(0, max(1, len(flat)), step)
    for low in starts:
        rows, last = slice(low, low + step), low == starts[-1]
        part = flat[rows]
        logits = kernels.linear(part, weight, bias).to(dtype)
        loss += _to_gradient(logits, targets[rows], terms, holders, grad)
        if grad is None:
            continue
        slope = logits.to(x.dtype)
        if slope_of_input is not None:
            slope_of_input.view(flat.shape)[rows] = kernels.linear(slope, weight.t())
        if weight_gradient is not None:
            _add_product(weight_gradient, slope, part)
        if bias_gradient is not None:
            bias_gradient += slope.sum(0)
        work = partial(land, slope, part, last)
        if last and tape.record is None:
            final = work  # while the ranks' parts of the input's gradient are summed
        else:
            tape.run(work, slope, part)
    finish = holders.sum(slope_of_input) if slope_of_input is not None else None
    if final is not None:
        final()
    return (
        loss,
        None if finish is None else finish().view(x.shape),
        None if weight_gradient is None else weight_gradient.to(weight.dtype),
        None if bias_gradient is None else bias_gradient.to(x.dtype),
    )


def _add_product(total: Tensor, slope: Tensor, part: Tensor) -> None:
    if total.dtype == slope.dtype:
        total.addmm_(slope.t(), part)
    else:
        total += kernels.product(slope.t(), part)


def _to_gradient(logits: Tensor, targets: Tensor, terms: CrossEntropy, holders: Holders, grad: Tensor | None) -> Tensor:
    """The loss summed over some tokens; with `grad`, that of the loss, their logits become their gradient.

    Args:
        logits: (N, C), this rank's columns.
        targets: (N,) int64, -100 where a token does not count.
    """
    counted = targets != IGNORED
    mine = counted & (targets >= holders.start) & (targets < holders.start + logits.shape[1])
    index = torch.where(mine, targets - holders.start, 0).unsqueeze(1)
    # Four numbers a token tell the others all: largest logit, sum of exponentials, the target's logit, sum of logits.
    parts = logits.new_zeros((4, logits.shape[0]))
    parts[0] = float("-inf")
    if logits.shape[1]:
        torch.amax(logits, 1, out=parts[0])
        parts[2] = torch.where(mine, logits.gather(1, index).squeeze(1), 0)
        if terms.label_smoothing:
            parts[3] = logits.sum(1)
        torch.sum(logits.sub_(parts[0].unsqueeze(1)).exp_(), 1, out=parts[1])
    everyone = holders.everyone(parts)  # (R, 4, N)
    largest = everyone[:, 0].amax(0)
    exponentials = (everyone[:, 1] * (everyone[:, 0] - largest).exp()).sum(0)
    normalizer = exponentials.log() + largest
    smoothing = terms.label_smoothing
    loss = normalizer - (1 - smoothing) * everyone[:, 2].sum(0)
    if smoothing:
        loss -= smoothing / holders.vocabulary * everyone[:, 3].sum(0)
    if terms.z_loss:
        loss += terms.z_loss * normalizer.square()
    if grad is not None and logits.shape[1]:
        scale = torch.where(counted, grad, 0)
        factor = scale * (parts[0] - largest).exp() / exponentials
        if terms.z_loss:
            factor *= 1 + 2 * terms.z_loss * normalizer
        logits.mul_(factor.unsqueeze(1))
        if smoothing:
            logits.sub_((scale * (smoothing / holders.vocabulary)).unsqueeze(1))
        target = torch.where(mine, scale * (smoothing - 1), 0)
        logits.scatter_add_(1, index, target.unsqueeze(1))
    return torch.where(counted, loss, 0).sum()
