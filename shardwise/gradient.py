"""Where gradients land: straight into a bucket's memory, as they are computed, and apart from the input gradients when
a schedule asks.

A weight gradient of a linear layer or an embedding is written by its own matrix product into the bucket (no copy, no
zero fill), now or, when a `Tape` is recording, later (the W of a zero-bubble schedule, arXiv 2401.10241). Every other
parameter's gradient is accumulated by autograd into a view of the bucket.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from shardwise import kernels
from shardwise.functions import apply, apply_all


class Tape:
    """Weight-gradient computations put off: while `record` is a list, they are appended to it instead of being run.

    Attributes:
        needed: while it is a list, gets the tensors that what is put off needs.
    """

    __slots__ = ("needed", "record")

    def __init__(self) -> None:
        self.record: list[Callable[[], None]] | None = None
        self.needed: list[Tensor] | None = None

    def run(self, work: Callable[[], None], *needs: Tensor) -> None:
        """Do the work, now or, while recording, when whoever records does: until then it holds on to `needs`."""
        if self.record is None:
            work()
            return
        self.record.append(work)
        if self.needed is not None:
            self.needed.extend(needs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Tape":
        return self  # a copied module still belongs to the same chunk


class Slot:
    """The place of one parameter's gradient.

    Args:
        name: the parameter's name.
        direct: True if every contribution is written by the module that owns the parameter, so the memory needs no zero
            fill.
        on_landing: called after every contribution.
        view: the memory, in the parameter's local shape; None if it is there only while gradients land.
        find: makes `view` be there, for memory that comes and goes.
        converts: True if the memory has another number format than the parameter.
    """

    __slots__ = ("converts", "direct", "expected", "find", "fresh", "landed", "name", "on_landing", "view")

    def __init__(
        self,
        name: str,
        direct: bool,
        on_landing: Callable[["Slot"], None],
        view: Tensor | None = None,
        find: Callable[["Slot"], None] | None = None,
        converts: bool = False,
    ) -> None:
        assert (view is None) != (find is None)
        self.converts = converts
        self.name = name
        self.view = view
        self.find = find
        self.direct = direct
        self.on_landing = on_landing
        self.fresh = True  # nothing has been written since the memory was made, or the step began
        self.landed = 0  # contributions since the last microbatch's backward began
        self.expected = -1  # contributions a microbatch makes; learnt in the first step

    def __deepcopy__(self, memo: dict[int, Any]) -> "Slot":
        return self  # the memory is the engine's, not the module's

    @property
    def accumulates(self) -> bool:
        """Whether autograd may add to the view in place: it is always there, and begins as zeros."""
        return not self.direct and self.find is None and not self.converts

    def _memory(self) -> Tensor:
        if self.view is None:
            assert self.find is not None
            self.find(self)
        assert self.view is not None
        return self.view

    def matmul(self, left: Tensor, right: Tensor, last: bool = True) -> None:
        """Add left @ right; unless it is the `last`, more of the same contribution follows."""
        if self.converts:
            self.add(kernels.product(left, right), last)
            return
        view = self._memory()
        if self.fresh:
            torch.mm(left, right, out=view)
        else:
            view.addmm_(left, right)
        self._written(last)

    def add(self, value: Tensor, last: bool = True) -> None:
        """Add `value`, which may be sparse; unless it is the `last`, more of the same contribution follows."""
        view = self._memory()
        value = value.to_dense() if value.is_sparse else value
        if self.fresh:
            view.copy_(value)
        else:
            view.add_(value)
        self._written(last)

    def add_sum(self, rows: Tensor) -> None:
        """Add the sum of `rows` (N, ...) over dim 0, made in the number format of the memory."""
        self.add(rows.sum(0, dtype=self._memory().dtype))

    def add_rows(self, index: Tensor, rows: Tensor) -> None:
        """Add row i of `rows` (N, H) to row index[i] of the view."""
        view = self._memory()
        if self.fresh:
            view.zero_()
        view.index_add_(0, index, rows.to(view.dtype))
        self._written()

    def _written(self, last: bool = True) -> None:
        self.fresh = False
        if last:
            self.on_landing(self)

    def begin(self) -> None:
        """A new sum: forget the last one's gradient."""
        self.fresh = True
        if self.accumulates:
            assert self.view is not None
            self.view.zero_()
            self.fresh = False

    def complete(self) -> None:
        """Nothing more will land: a parameter nothing contributed to has a gradient of zero, not a missing one."""
        if self.fresh:
            self._memory().zero_()
            self.fresh = False


_Landing = tuple[dict[str, Slot], Tape]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, landing: _Landing, known: list[Tensor] | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.landing = landing
        y = kernels.linear(x, weight, bias) if known is None else known[0]
        # Not a view, as it may be within: autograd forbids work in place on a view that a function returns.
        return y.detach() if y._is_view() else y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # `once_differentiable` would see to it, at 7 microseconds a call
            raise RuntimeError("a gradient of a gradient was asked for (create_graph=True), which a step cannot give")
        x, weight = ctx.saved_tensors
        slots, tape = ctx.landing
        if tape.record is None:
            _land(slots, grad, x)
        else:
            x = x.detach()  # whose graph would hold on to a recomputed block's input
            tape.run(lambda: _land(slots, grad, x), grad, x)
        return (kernels.linear(grad, weight.t()) if ctx.needs_input_grad[0] else None), None, None, None, None


# Without `Function.apply`'s search for functorch's wrappers, 3 microseconds a call.
_apply_linear: Callable[..., Tensor] = super(torch.autograd.Function, _Linear).apply


def _land(slots: dict[str, Slot], grad: Tensor, x: Tensor) -> None:
    """Write a linear layer's weight and bias gradients: grad (..., out), x (..., in)."""
    flat = _rows(grad)  # (N, out)
    if "weight" in slots:
        slots["weight"].matmul(flat.t(), _rows(x))
    if "bias" in slots:
        slots["bias"].add_sum(flat)


def _rows(x: Tensor) -> Tensor:
    """(..., H) -> (N, H), where H may be 0."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, index: Tensor, weight: Tensor, slot: Slot, tape: Tape) -> Tensor:
        ctx.save_for_backward(index)
        ctx.slot, ctx.tape = slot, tape
        return F.embedding(index, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        (index,) = ctx.saved_tensors
        slot = ctx.slot
        ctx.tape.run(lambda: slot.add_rows(index.reshape(-1), _rows(grad)), index, grad)
        return None, None, None, None


class _Apart(torch.autograd.Function):
    """Any module without children: its own small graph is kept, so that input and weight gradients are two separate
    passes over it."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Callable[[Tensor], Any],
        slots: list[tuple[nn.Parameter, Slot]],
        tape: Tape,
        structure: list[Any],
        x: Tensor,
        *_: Tensor,
    ) -> tuple[Any, ...]:
        leaf = x.detach().requires_grad_(x.requires_grad)
        with torch.enable_grad():
            values, tree = tree_flatten(call(leaf))
        structure.append(tree)
        ctx.leaf, ctx.values, ctx.slots, ctx.tape = leaf, values, slots, tape
        ctx.set_materialize_grads(False)
        found = [v.detach() if isinstance(v, Tensor) else v for v in values]
        ctx.mark_non_differentiable(
            *(f for f, v in zip(found, values, strict=True) if isinstance(v, Tensor) and not v.requires_grad)
        )
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        leaf, slots = ctx.leaf, ctx.slots
        pairs = [(v, g) for v, g in zip(ctx.values, gradients, strict=True) if g is not None]
        del ctx.leaf, ctx.values
        outputs, starts = [v for v, _ in pairs], [g for _, g in pairs]
        grad_x = None
        if pairs and leaf.requires_grad:
            (grad_x,) = torch.autograd.grad(outputs, leaf, starts, retain_graph=True, allow_unused=True)

        def land() -> None:
            found = torch.autograd.grad(outputs, [parameter for parameter, _ in slots], starts, allow_unused=True)
            for (_, slot), value in zip(slots, found, strict=True):
                if value is not None:
                    slot.add(value)

        if pairs:
            ctx.tape.run(land, leaf, *outputs, *starts)
        return None, None, None, None, grad_x, *([None] * len(slots))


def is_direct(module: nn.Module) -> bool:
    """Whether `attach` can make `module` write its own weight gradient: exact types with a forward and parameters of
    their own, since anything else (a subclass, a weight that is computed from other parameters) may compute something
    else."""
    if "forward" in module.__dict__ or module._parameters.get("weight") is None:
        return False
    if type(module) is nn.Linear:
        return module._parameters.keys() == {"weight", "bias"}
    if type(module) is nn.Embedding:
        special = (
            module.sparse or module.scale_grad_by_freq or module.max_norm is not None or module.padding_idx is not None
        )
        return module._parameters.keys() == {"weight"} and not special
    return False


def computes_apart(module: nn.Module) -> bool:
    """Whether `attach` has changed a linear layer: module.forward(x, [y]) then takes its output from y."""
    return type(module) is nn.Linear and getattr(module.forward, "__func__", None) is _linear


def can_put_off(module: nn.Module) -> bool:
    """Whether a schedule with W can put off this module's weight gradients: it owns matrices and has no children."""
    own = [p for p in module.parameters(recurse=False) if p.requires_grad and p.ndim > 1]
    return bool(own) and not is_direct(module) and next(module.children(), None) is None


def attach(module: nn.Module, slots: dict[str, Slot], tape: Tape) -> None:
    """Make `module` (`is_direct`) write the gradients of its parameters into `slots` (by attribute name); the module is
    changed in place."""
    forward = _linear if type(module) is nn.Linear else _embedding
    # Bound methods, so that a copy of the module computes with its own weights.
    module.forward = MethodType(forward, module)
    module._landing = (slots, tape)  # type: ignore[assignment]


def lands(value: Tensor | None, slot: Slot | None) -> bool:
    """Whether the gradient of what a module computes with is a slot's: it is not if another tensor stands in the
    parameter's place (`torch.func.functional_call`, a copy of the module), or a hook of the user's is to see it first.
    """
    if slot is None or value is None:
        return slot is None and (value is None or not value.requires_grad)
    return getattr(value, "_slot", None) is slot and not value._backward_hooks


def _left_to_autograd(slots: dict[str, Slot], weight: Tensor, bias: Tensor | None = None) -> bool:
    return (
        not (lands(weight, slots.get("weight")) and lands(bias, slots.get("bias")))
        or torch._C._are_functorch_transforms_active()
    )


def _linear(self: Any, input: Tensor, known: list[Tensor] | None = None) -> Tensor:
    """`known`: the output, where it is there already and only its graph is wanted (recomputation)."""
    weight, bias = self.weight, self.bias
    if not torch.is_grad_enabled():
        return kernels.linear(input, weight, bias)
    if _left_to_autograd(self._landing[0], weight, bias):
        return F.linear(input, weight, bias)
    if input.requires_grad:
        # Autograd need not know of parameters whose gradients it will not see.
        weight, bias = weight.detach(), None if bias is None else bias.detach()
    return _apply_linear(input, weight, bias, self._landing, known)


def _embedding(self: Any, input: Tensor) -> Tensor:
    slots, tape = self._landing
    if not torch.is_grad_enabled() or _left_to_autograd(slots, self.weight):
        return F.embedding(input, self.weight)
    return apply(_Embedding, input, self.weight, slots["weight"], tape)


def attach_apart(module: nn.Module, slots: dict[str, Slot], tape: Tape) -> None:
    """Make `module` (`can_put_off`) compute its weight gradients apart from its input gradient."""
    module._landing = (slots, tape, module.forward)  # type: ignore[assignment]
    module.forward = MethodType(_apart, module)


def _apart(self: Any, *given: Any, **named: Any) -> Any:
    slots, tape, call = self._landing
    if not torch.is_grad_enabled() or named or len(given) != 1 or not isinstance(given[0], Tensor):
        return call(*given, **named)
    pairs = [(getattr(self, attribute), slot) for attribute, slot in slots.items()]
    if not all(lands(*pair) for pair in pairs) or torch._C._are_functorch_transforms_active():
        return call(*given)
    structure: list[Any] = []
    values = apply_all(_Apart, call, pairs, tape, structure, given[0], *(parameter for parameter, _ in pairs))
    return tree_unflatten(values, structure[0])


def hook(parameter: nn.Parameter, slot: Slot) -> RemovableHandle:
    """Send what autograd itself accumulates for `parameter` to `slot`: into its view in place where that can be, else
    as a contribution."""
    parameter._slot = slot  # type: ignore[attr-defined]
    parameter.grad = slot.view if slot.accumulates else None

    def accumulated(parameter: Tensor) -> None:
        if slot.accumulates and parameter.grad is slot.view:
            slot.on_landing(slot)
            return
        if parameter.grad is None:  # the module has written it itself, and autograd had nothing to add
            return
        slot.add(parameter.grad)
        parameter.grad = slot.view if slot.accumulates else None

    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(accumulated)
    return handle
