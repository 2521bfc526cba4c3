"""What a block keeps and how long its parts take, measured while it is computed again in backward."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwise.gradient import Tape
from shardwise.memory.replay import Block, Part, Run


class Measured:
    """Watches the second runs of a block.

    Args:
        block: to be watched.
        modules: what it computes.
        tape: where its weight gradients are put off.

    Attributes:
        seconds: of a whole second run, the shortest.
        parts: by part that is called once in a run, (seconds, bytes of its result).
        inputs: bytes of the block's inputs.
        plain: bytes that autograd keeps of the block if nothing is computed again, its inputs included.
        spared: bytes that the block's own modules would keep beyond.
        put_off: bytes that its weight gradients need from B to W; 0 where both are one.
        skipped: the part whose values the second run does not need.
    """

    def __init__(self, block: Block, modules: list[nn.Module], tape: Tape) -> None:
        self.block = block
        self.seconds = float("inf")
        self.parts: dict[Part, tuple[float, int]] = {}
        self.inputs = self.plain = self.spared = self.put_off = 0
        self.skipped: Part | None = None
        self._modules = modules
        self._tape = tape
        self._called: list[Part] = []
        self._saved: list[Tensor] = []
        self._behind = 0  # how much had been saved when the last part was done
        block.observer = self

    def watch(self, run: Run) -> list[Tensor]:
        first = self.seconds == float("inf")
        self._called, self.spared = [], 0
        saved = self._saved = []
        start = _now()
        with torch.autograd.graph.saved_tensors_hooks(self._save, _same):
            values = run.second(self)
        self.seconds = min(self.seconds, _now() - start)
        if first:
            self._count(run, saved)
            self._try_to_skip(run, saved)
        self._saved = []
        return values

    def compute(self, part: Part, args: tuple[Any, ...]) -> Any:
        start = _now()
        value = part.call(*args)
        seconds = _now() - start
        size = sum(_bytes(leaf) for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
        size += part.beside(*args) if part.beside is not None else 0
        known = self.parts.get(part)
        self.parts[part] = (seconds if known is None else min(known[0], seconds)), size
        if part.spared is not None:
            self.spared += part.spared(*args)
        self._called.append(part)
        self._behind = len(self._saved)
        return value

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        needed: list[Tensor] = []
        self._tape.needed = needed
        try:
            yield
        finally:
            self._tape.needed = None
        self.put_off = max(self.put_off, sum(self._memory(needed).values()))

    def _save(self, tensor: Tensor) -> Tensor:
        # Without its graph: what is saved would else hold on to itself.
        self._saved.append(tensor.detach())
        return self._saved[-1]

    def _memory(self, tensors: list[Tensor]) -> dict[int, int]:
        """Where the memory behind tensors lies -> its bytes, without that of parameters."""
        own = {p.untyped_storage().data_ptr() for module in self._modules for p in module.parameters()}
        found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return {place: size for place, size in found.items() if place not in own}

    def _count(self, run: Run, saved: list[Tensor]) -> None:
        inputs = {t.untyped_storage().data_ptr(): _bytes(t) for t in run.inputs()}
        self.inputs = sum(inputs.values())
        self.plain = sum(size for place, size in self._memory(saved).items() if place not in inputs) + self.inputs
        for part in {part for part in self._called if self._called.count(part) > 1}:
            del self.parts[part]

    def _try_to_skip(self, run: Run, saved: list[Tensor]) -> None:
        """Whether the last part's values are needed: not if with others in their place the same is saved behind it."""
        last = self._called[-1] if self._called else None
        if last is None or last not in self.parts or last.shape is None:
            return
        behind, self._saved = saved[self._behind :], []
        run.skipped = last
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._save, _same):
                run.second()
        except RuntimeError:  # an operation that cannot take the stand-in
            return
        finally:
            run.skipped = None
        others = self._saved[len(self._saved) - len(behind) :] if behind else []
        if len(self._saved) == len(saved) and all(map(torch.equal, behind, others)):
            self.skipped = last


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _now() -> float:
    """Seconds, once an accelerator has done what it was given."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()
