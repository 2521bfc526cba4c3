"""Where gradients land: straight into a bucket's memory, as they are computed, and apart from the input gradients when a schedule asks.

A weight gradient of a linear layer or an embedding is written by its own matrix product into the bucket (no copy, no zero fill), now
or, when a `Tape` is recording, later (the W of a zero-bubble schedule, arXiv 2401.10241). Every other parameter's gradient is
accumulated by autograd into a view of the bucket.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.hooks import RemovableHandle


class Tape:
    """Weight-gradient computations put off: while `record` is a list, they are appended to it instead of being run."""

    __slots__ = ("record",)

    def __init__(self) -> None:
        self.record: list[Callable[[], None]] | None = None

    def run(self, work: Callable[[], None]) -> None:
        if self.record is None:
            work()
        else:
            self.record.append(work)


class Slot:
    """The place of one parameter's gradient.

    Args:
        name: the parameter's name.
        view: the memory, in the parameter's local shape.
        direct: True if every contribution is written by the module that owns the parameter, so the memory needs no zero fill.
        on_landing: called after every contribution.
    """

    __slots__ = ("direct", "expected", "fresh", "landed", "name", "on_landing", "view")

    def __init__(self, name: str, view: Tensor, direct: bool, on_landing: Callable[["Slot"], None]) -> None:
        self.name = name
        self.view = view
        self.direct = direct
        self.on_landing = on_landing
        self.fresh = True  # nothing has been written since the step began
        self.landed = 0  # contributions since the last microbatch's backward began
        self.expected = -1  # contributions a microbatch makes; learnt in the first step

    def matmul(self, left: Tensor, right: Tensor) -> None:
        """Add left @ right."""
        if self.fresh:
            torch.mm(left, right, out=self.view)
        else:
            self.view.addmm_(left, right)
        self._written()

    def add(self, value: Tensor) -> None:
        """Add `value`."""
        if self.fresh:
            self.view.copy_(value)
        else:
            self.view.add_(value)
        self._written()

    def add_rows(self, index: Tensor, rows: Tensor) -> None:
        """Add row i of `rows` (N, H) to row index[i] of the view."""
        if self.fresh:
            self.view.zero_()
        self.view.index_add_(0, index, rows)
        self._written()

    def _written(self) -> None:
        self.fresh = False
        self.on_landing(self)

    def begin(self) -> None:
        """A new step: forget the last one's gradient."""
        self.fresh = True
        if not self.direct:
            self.view.zero_()
            self.fresh = False

    def complete(self) -> None:
        """The step's last backward is over: a parameter nothing contributed to has a gradient of zero, not a missing one."""
        if self.fresh:
            self.view.zero_()
            self.fresh = False


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, slots: tuple[Slot | None, Slot | None], tape: Tape
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.slots, ctx.tape = slots, tape
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        weight_slot, bias_slot = ctx.slots
        flat = grad.reshape(-1, grad.shape[-1])  # (N, out)
        if weight_slot is not None or bias_slot is not None:

            def land() -> None:
                if weight_slot is not None:
                    weight_slot.matmul(flat.t(), x.reshape(-1, x.shape[-1]))
                if bias_slot is not None:
                    bias_slot.add(flat.sum(0))

            ctx.tape.run(land)
        return (grad.matmul(weight) if ctx.needs_input_grad[0] else None), None, None, None, None


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
        ctx.tape.run(lambda: slot.add_rows(index.reshape(-1), grad.reshape(-1, grad.shape[-1])))
        return None, None, None, None


class _Apart(torch.autograd.Function):
    """Any module without children: its own small graph is kept, so that input and weight gradients are two separate passes over it."""

    @staticmethod
    def forward(
        ctx: Any, call: Callable[..., Tensor], slots: list[tuple[nn.Parameter, Slot]], tape: Tape, x: Tensor, *_: Tensor
    ) -> Tensor:
        leaf = x.detach().requires_grad_(x.requires_grad)
        with torch.enable_grad():
            y = call(leaf)
        ctx.leaf, ctx.y, ctx.slots, ctx.tape = leaf, y, slots, tape
        return y.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        leaf, y, slots = ctx.leaf, ctx.y, ctx.slots
        del ctx.leaf, ctx.y
        grad_x = torch.autograd.grad(y, leaf, grad, retain_graph=True)[0] if leaf.requires_grad else None

        def land() -> None:
            found = torch.autograd.grad(y, [parameter for parameter, _ in slots], grad, allow_unused=True)
            for (_, slot), value in zip(slots, found, strict=True):
                if value is not None:
                    slot.add(value)

        ctx.tape.run(land)
        return None, None, None, grad_x, *([None] * len(slots))


def is_direct(module: nn.Module) -> bool:
    """Whether `attach` can make `module` write its own weight gradient: exact types, since a subclass may compute something else."""
    if type(module) is nn.Linear:
        return True
    if type(module) is nn.Embedding:
        return not (module.sparse or module.scale_grad_by_freq or module.max_norm is not None or module.padding_idx is not None)
    return False


def can_put_off(module: nn.Module) -> bool:
    """Whether a schedule with W can put off this module's weight gradients: it owns matrices and has no children."""
    own = [p for p in module.parameters(recurse=False) if p.requires_grad and p.ndim > 1]
    return bool(own) and not is_direct(module) and next(module.children(), None) is None


def attach(module: nn.Module, slots: dict[str, Slot], tape: Tape) -> None:
    """Make `module` (`is_direct`) write the gradients of its parameters into `slots` (by attribute name); the module is changed in place."""
    if type(module) is nn.Linear:
        pair = (slots.get("weight"), slots.get("bias"))

        def linear(input: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                return _Linear.apply(input, module.weight, module.bias, pair, tape)  # type: ignore[no-any-return]
            return F.linear(input, module.weight, module.bias)

        module.forward = linear
        return
    slot = slots["weight"]

    def embedding(input: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return _Embedding.apply(input, module.weight, slot, tape)  # type: ignore[no-any-return]
        return F.embedding(input, module.weight)  # type: ignore[arg-type]

    module.forward = embedding  # type: ignore[method-assign]


def attach_apart(module: nn.Module, slots: dict[str, Slot], tape: Tape) -> None:
    """Make `module` (`can_put_off`) compute its weight gradients apart from its input gradient."""
    call = module.forward

    def forward(x: Tensor, *others: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled() or others or named:
            return call(x, *others, **named)
        pairs = [(getattr(module, attribute), slot) for attribute, slot in slots.items()]
        return _Apart.apply(call, pairs, tape, x, *(parameter for parameter, _ in pairs))

    module.forward = forward  # type: ignore[method-assign]


def hook(parameter: nn.Parameter, slot: Slot) -> RemovableHandle:
    """Send what autograd itself accumulates for `parameter` to `slot`: into its view in place, or, for a direct slot, as a stray contribution."""
    if not slot.direct:
        parameter.grad = slot.view

    def accumulated(parameter: Tensor) -> None:
        if parameter.grad is slot.view:
            slot.on_landing(slot)
            return
        if parameter.grad is None:  # the module has written it itself, and autograd had nothing to add
            return
        slot.add(parameter.grad)
        parameter.grad = None if slot.direct else slot.view

    return parameter.register_post_accumulate_grad_hook(accumulated)


def sole_owners(root: nn.Module) -> dict[int, tuple[nn.Module, str]]:
    """By id of parameter: the one module that owns it and its attribute name there. Parameters that several modules share are left out."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in root.modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((module, attribute))
    return {key: found[0] for key, found in owners.items() if len(found) == 1}


def owned_slots(module: nn.Module, slots: dict[int, Slot]) -> dict[str, Slot]:
    """The slots of a module's own parameters, by attribute name."""
    own: Iterable[tuple[str, nn.Parameter]] = module.named_parameters(recurse=False)
    return {attribute: slots[id(parameter)] for attribute, parameter in own if id(parameter) in slots}
