"""Blocks that are computed again in backward: what a forward leaves, and how the block is run a second time.

A block keeps its inputs and is computed again when the gradient of its output is there (Chen et al., arXiv 1604.06174).
Parts of it whose results are kept by choice hand those out in the second run instead of computing them, and the last
part does not compute at all if nothing needs its values: only its gradient is wanted.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from shardwise.functions import apply_all
from shardwise.memory.left import Left, Place

# Notes something that a forward depends on beside its arguments; what it returns brings it back.
Note = Callable[[], Callable[[], None]]


def note_random_state() -> Callable[[], None]:
    """The states of the generators."""
    state = torch.get_rng_state()
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return lambda: torch.set_rng_state(state)
    backend = torch.get_device_module(accelerator)
    other = backend.get_rng_state()

    def restore() -> None:
        torch.set_rng_state(state)
        backend.set_rng_state(other)

    return restore


@dataclass(eq=False)
class Part:
    """A module of a block whose result may be kept.

    Args:
        path: in the block.
        call: what the module computes.
        keep: (arguments) -> its result, computed without a graph, and what `known` needs of it.
        known: (kept, arguments) -> the result with its graph, without computing it.
        shape: (arguments) -> the shape of the result, for parts whose gradient does not need the result: `known` takes
            any tensor of that shape in its place. None if it does need it.
        together: the parts that `prime` covers: all are kept, or none.
        prime: ([kept of each], arguments of the first) makes `call` hand out the results of all of them.
        spared: (arguments) -> bytes that the module by itself would keep for backward and `call` does not.
        beside: (arguments) -> bytes that `keep` keeps beside the result.
    """

    path: str
    call: Callable[..., Any]
    keep: Callable[..., tuple[Any, tuple[Tensor, ...]]]
    known: Callable[..., Any] | None = None
    shape: Callable[..., tuple[int, ...]] | None = None
    together: list["Part"] = field(default_factory=list)
    prime: Callable[..., None] | None = None
    spared: Callable[..., int] | None = None
    beside: Callable[..., int] | None = None


class Block:
    """A piece of a model that keeps its inputs, and results of parts by choice, and is computed again in backward.

    Args:
        path: its name.
        call: computes it.
        modules: what hold its parameters and buffers.
        notes: of what its computation depends on beside its arguments.

    Attributes:
        plain: whether it keeps everything, as if it were no block.
        kept: the parts whose results are kept.
        skipped: the part whose values nothing needs in the second run.
        observer: sees the next second run, to measure it.
    """

    def __init__(
        self, path: str, call: Callable[..., Any], modules: Sequence[nn.Module], notes: Sequence[Note] = ()
    ) -> None:
        self.path = path
        self.call = call
        self.notes = (note_random_state, *notes)
        self.plain = False
        self.parts: list[Part] = []
        self.kept: frozenset[Part] = frozenset()
        self.skipped: Part | None = None
        self.observer: Observer | None = None
        self.run: Run | None = None  # under way
        self.left = Left(modules)
        self.trains = any(parameter.requires_grad for module in modules for parameter in module.parameters())
        self._buffers = [buffer for module in modules for buffer in module.buffers()]
        self._looked = False

    def __call__(self, *args: Any, **named: Any) -> Any:
        if self.plain or not torch.is_grad_enabled():
            return self.call(*args, **named)
        # Hugging Face's cache of keys and values, by whatever name: training has no use for it, and
        # it would take them twice.
        args = tuple(None if hasattr(value, "get_seq_length") else value for value in args)
        named = {name: None if hasattr(value, "get_seq_length") else value for name, value in named.items()}
        leaves, structure = tree_flatten((args, named))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not places and not self.trains:
            return self.call(*args, **named)
        # Without an input that needs a gradient, something must carry it to the parameters.
        carried = [leaves[place] for place in places] or [torch.empty(0, requires_grad=True)]
        run = Run(self, leaves, structure, places)
        tensors = apply_all(_Again, run, *carried)
        run.hand_out(tensors)
        return run.build(tensors)

    @contextmanager
    def changing(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Fills the list with the buffers that are changed inside, and what they were before (running statistics)."""
        before = [(buffer, buffer.clone()) for buffer in self._buffers]
        found: list[tuple[Tensor, Tensor]] = []
        yield found
        # By value: batch normalisation does not count its changes as versions.
        found += before if self._looked else [(b, old) for b, old in before if not torch.equal(b, old)]
        if not self._looked:  # what the first forward leaves alone, the others do too
            self._buffers, self._looked = [buffer for buffer, _ in found], True


class Observer(Protocol):
    """What sees a block's second run, to measure it."""

    def watch(self, run: "Run") -> list[Tensor]:
        """Have the run computed; what it returned."""

    def compute(self, part: Part, args: tuple[Any, ...]) -> Any:
        """Have a part computed."""

    def backward(self) -> AbstractContextManager[None]:
        """The gradients of the run that was watched last are computed inside."""


class Run:
    """One forward of a block, up to its backward."""

    def __init__(self, block: Block, leaves: list[Any], structure: TreeSpec, places: list[int]) -> None:
        self.block = block
        self.again = False  # whether this is the second run
        self.left_again: list[tuple[Tensor, Tensor]] = []  # what is read of the modules, its gradient
        self.observer: Observer | None = None
        self.kept: dict[Part, deque[_Kept]] = {part: deque() for part in block.kept}
        self.skipped = block.skipped
        self._leaves = leaves
        self._structure = structure
        self._places = places  # of the leaves that autograd keeps
        self._restores: list[Callable[[], None]] = []
        self._changed: list[tuple[Tensor, Tensor]] = []
        self._returned: TreeSpec | None = None
        self._primed: set[Part] = set()  # parts that will hand out what another one's `prime` gave them
        self._results: list[Any] = []  # what the block returned, None in place of each tensor
        self._tensors: list[int] = []  # where the tensors are among them
        self._left: dict[Place, Tensor] = {}  # on the modules
        self._left_gradients: dict[Place, Tensor] = {}

    def forward(self) -> list[Tensor]:
        """Compute without a graph; the tensors of the result."""
        block = self.block
        self._restores = [note() for note in block.notes]
        inputs = [
            (leaf, leaf._version) for leaf in self._leaves if isinstance(leaf, Tensor) and not leaf.is_inference()
        ]
        before = block.left.there()
        with block.changing() as self._changed, _no_fast_path():
            values, self._returned = tree_flatten(self._compute())
        self._left = block.left.since(before)
        if any(leaf._version != version for leaf, version in inputs):
            raise ValueError(
                f"plan.recompute: {block.path!r} changes its input in place, so it cannot be computed again from it; "
                "let its first operation make a new tensor (inplace=False)"
            )
        for place in self._places:
            self._leaves[place] = None
        for several in self.kept.values():
            for kept in several:
                kept.forget_if_changed()
        self._tensors = [place for place, value in enumerate(values) if isinstance(value, Tensor)]
        self._results = [None if isinstance(value, Tensor) else value for value in values]
        return [values[place] for place in self._tensors]

    def replay(self, carried: Sequence[Tensor]) -> list[Tensor]:
        """Compute with a graph, from the same inputs; the tensors of the result."""
        for place, leaf in zip(self._places, carried, strict=False):
            self._leaves[place] = leaf
        self.again = True
        observer = self.block.observer
        return self.second() if observer is None else observer.watch(self)

    def hand_out(self, tensors: Sequence[Tensor]) -> None:
        """Have what the block left on its modules be read with a graph: its gradient comes to this run."""
        output = next((tensor for tensor in tensors if tensor.requires_grad), None)
        if output is not None:
            self.block.left.hand_out(self._left, output, self._left_gradients)
        self._left = {}

    def inputs(self) -> list[Tensor]:
        """The inputs that need a gradient, in the second run."""
        return [self._leaves[place] for place in self._places]

    def second(self, observer: Observer | None = None) -> list[Tensor]:
        """Compute with the random numbers and buffers of the first run."""
        after = note_random_state()
        now = [(buffer, buffer.clone()) for buffer, _ in self._changed]
        for restore in self._restores:
            restore()
        for buffer, old in self._changed:
            buffer.data.copy_(old)  # through .data: what others have saved of it stays valid
        self.observer = observer
        bring_back = self.block.left.aside()
        try:
            with torch.enable_grad():
                values, structure = tree_flatten(self._compute())
            again = self.block.left.there()
        finally:
            bring_back()
        read = [(again.get(place), gradient) for place, gradient in self._left_gradients.items()]
        # Of the first of several second runs, as the values are (`Measured.watch`).
        self.left_again = self.left_again or [(t, grad) for t, grad in read if isinstance(t, Tensor)]
        for buffer, new in now:
            buffer.data.copy_(new)
        after()
        if structure != self._returned:
            raise RuntimeError(
                f"plan.recompute: {self.block.path!r} returned something else when it was computed again: {structure} "
                f"and not {self._returned}; its forward must depend on its inputs and torch's random numbers alone"
            )
        return [values[place] for place in self._tensors]

    def _compute(self) -> Any:
        args, named = tree_unflatten(self._leaves, self._structure)
        self.block.run = self
        try:
            return self.block.call(*args, **named)
        finally:
            self.block.run = None

    def through(self, part: Part, args: tuple[Any, ...]) -> Any:
        """A part's result in this run."""
        if not self.again:
            if part not in self.kept:
                return part.call(*args)
            value, kept = part.keep(*args)
            self.kept[part].append(_Kept(kept))
            return value
        if part is self.skipped:
            assert part.shape is not None
            assert part.known is not None
            return part.known((args[0].new_zeros(()).expand(part.shape(*args)),), *args)
        if part not in self.kept:
            return part.call(*args) if self.observer is None else self.observer.compute(part, args)
        if part.known is not None:
            tensors = self._take(part)
            return part.call(*args) if tensors is None else part.known(tensors, *args)
        assert part.prime is not None
        if part not in self._primed:
            several = [self._take(other) for other in part.together]
            whole = [tensors for tensors in several if tensors is not None]
            if len(whole) == len(several):
                part.prime(whole, *args)
            self._primed.update(part.together)
        self._primed.remove(part)
        return part.call(*args)

    def _take(self, part: Part) -> tuple[Tensor, ...] | None:
        """What is kept of the part's next call; None if nothing is, or others have changed it in place."""
        if not self.kept[part]:  # the first run went by it
            return None
        kept = self.kept[part].popleft()
        kept.forget_if_changed()
        return kept.tensors

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """The block's result, with these tensors in it."""
        values = list(self._results)
        for place, tensor in zip(self._tensors, tensors, strict=True):
            values[place] = tensor
        self._results = []
        assert self._returned is not None
        return tree_unflatten(values, self._returned)


class _Kept:
    """What is kept of one call of a part, as long as nobody changes it in place."""

    __slots__ = ("_versions", "tensors")

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.tensors: tuple[Tensor, ...] | None = tensors
        self._versions = [tensor._version for tensor in tensors]

    def forget_if_changed(self) -> None:
        if self.tensors is not None and [tensor._version for tensor in self.tensors] != self._versions:
            self.tensors = None


@contextmanager
def _no_fast_path() -> Iterator[None]:
    """Without the fused layers that torch's transformers take where no gradient is asked for: other bits, and by no
    module's forward."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Run, *carried: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        ctx.save_for_backward(*carried)
        ctx.set_materialize_grads(False)
        # Not views, as they may be within: autograd forbids work in place on a view that a function returns.
        found = tuple(value.detach() if value._is_view() else value for value in run.forward())
        ctx.mark_non_differentiable(*(value for value in found if not value.is_floating_point()))
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        leaves = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        run, ctx.run = ctx.run, None
        if run is None:
            raise RuntimeError("plan.recompute: a graph was gone through twice, and a recomputed block is there once")
        pairs = [
            (value, gradient)
            for value, gradient in zip(run.replay(leaves), gradients, strict=True)
            if gradient is not None and value.requires_grad
        ]
        pairs += [(value, gradient) for value, gradient in run.left_again if value.requires_grad]
        observer = run.block.observer
        del run
        if pairs:
            with nullcontext() if observer is None else observer.backward():
                torch.autograd.backward([value for value, _ in pairs], [gradient for _, gradient in pairs])
        return None, *(leaf.grad for leaf in leaves)


def stand_in(module: nn.Module, block: Block) -> None:
    """Have `module.forward` go through `block`, which computes what it was."""
    module._block = block  # type: ignore[assignment]
    # A bound method, so that a copy of the module computes with its own weights.
    module.forward = MethodType(_again, module)


def _again(self: Any, *args: Any, **named: Any) -> Any:
    return self._block(*args, **named)


def watch(module: nn.Module, block: Block, part: Part) -> None:
    """Have `module` be computed as `part` of `block` says."""
    module._part = (block, part)  # type: ignore[assignment]
    module.forward = MethodType(_through, module)
    block.parts.append(part)


def _through(self: Any, *args: Any, **named: Any) -> Any:
    block, part = self._part
    run = block.run
    if run is None or named:
        return part.call(*args, **named)
    return run.through(part, args)
