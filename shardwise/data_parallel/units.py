"""Parameters divided between steps (ZeRO stage 3): gathered for a unit of the model just before it computes, and given
back after."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.data_parallel.bucket import Bucket
from shardwise.data_parallel.buckets import Buckets
from shardwise.head import before_backward
from shardwise.pipeline_parallel.stages import Stage, Whole, parts_of

# Set on a module by `mark_units`: the number of the unit whose parameters it needs.
UNIT = "_shardwise_unit"
# What a chunk's gathered parameters may take and still be kept for the next action, on a CPU; an accelerator's chunk
# may take this part of its memory.
KEPT_BYTES = 64 << 20
KEPT_PART = 1 / 32


class Units:
    """Gathers and releases the buckets of one chunk around its modules' forwards and backwards; below stage 3, and
    where ranks keep one copy, it does nothing.

    A unit is gathered before its module's forward and released after it; gathered again when the gradient of its output
    is there, and released when the unit before it is. The next unit, as the last pass had them, is fetched while one
    computes. What belongs to no unit (-1) is there while the chunk computes. As long as all that is there takes no more
    than `kept_bytes`, it is not released before the parameters change: then a step gathers once, whatever its
    microbatches. The unit that backward begins with is kept in any case.
    """

    def __init__(self, root: nn.Module, buckets: Buckets) -> None:
        self._root = root
        self._all = [bucket for bucket in buckets.buckets if bucket.gathers]
        if not self._all:
            return
        self._buckets = {unit: buckets.of_unit(unit) for unit in {bucket.unit for bucket in self._all}}
        self._kept_bytes = kept_bytes(self._all[0].device)
        self._next: dict[int, int] = {}  # by unit, whose forward followed it in the last pass
        self._before: dict[int, int] = {}
        self._first: int | None = None
        self._last: int | None = None
        self._previous: int | None = None  # the unit whose forward began last in this pass
        self._backward = False
        self._open: int | None = None  # the unit whose backward runs
        for module in root.modules():
            unit = getattr(module, UNIT, None)
            if unit in self._buckets:
                module.register_forward_pre_hook(lambda module, args, unit=unit: self._before_forward(unit))
                module.register_forward_hook(lambda module, args, output, unit=unit: self._after_forward(unit, output))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The chunk's forward runs inside."""
        if not self._all:
            yield
            return
        self._begin(self._first)
        yield
        self._last, self._previous = self._previous, None
        if self._last is not None:
            self._next.pop(self._last, None)
        self._release(-1)

    @contextlib.contextmanager
    def holding(self, module: nn.Module) -> Iterator[None]:
        """The parameters of a module are there inside, outside of its unit's forward."""
        parts = self._root.modules() if self._all else ()
        units = {getattr(part, UNIT, -1) for part in parts if module in part.modules()}
        for unit in units:
            self._acquire(unit)
        yield
        for unit in units:
            self._release(unit)

    def begin_backward(self) -> None:
        """The chunk's backward begins."""
        if self._all:
            self._backward = True
            self._begin(self._last)

    def end_backward(self) -> None:
        """The chunk's backward is over."""
        if self._all:
            self._close()
            self._release(-1)
            self._backward = False

    def _begin(self, unit: int | None) -> None:
        self._prefetch(-1)
        self._prefetch(unit)
        self._acquire(-1)

    def _of(self, unit: int | None) -> list[Bucket]:
        return self._buckets.get(unit, []) if unit is not None else []

    def _prefetch(self, unit: int | None) -> None:
        for bucket in self._of(unit):
            bucket.prefetch()

    def _look_ahead(self, unit: int, following: Mapping[int, int]) -> None:
        """Fetch what follows a unit, and read what follows that if it is on disk and goes to an accelerator."""
        fetched = following.get(unit)
        self._prefetch(fetched)
        for bucket in self._of(following.get(fetched) if fetched is not None else None):
            bucket.read_ahead()

    def _acquire(self, unit: int) -> None:
        for bucket in self._of(unit):
            bucket.acquire()

    def _release(self, unit: int, keep: bool = False) -> None:
        there = sum(bucket.numel * bucket.values.element_size() for bucket in self._all if bucket.there)
        for bucket in self._of(unit):
            bucket.release(keep or there <= self._kept_bytes)

    def _before_forward(self, unit: int) -> None:
        self._prefetch(unit)
        if not self._backward:  # else a forward that is computed again
            if self._previous is None:
                self._first = unit
            elif self._previous != unit:
                self._next[self._previous] = unit
                self._before[unit] = self._previous
            self._previous = unit
            self._look_ahead(unit, self._next)
        self._acquire(unit)

    def _after_forward(self, unit: int, output: Any) -> None:
        graph = torch.is_grad_enabled()
        self._release(unit, keep=graph and not self._backward and unit == self._last)
        if graph:
            for leaf in torch.utils._pytree.tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    before_backward(leaf, lambda gradient: self._before_backward(unit))

    def _before_backward(self, unit: int) -> None:
        if self._open == unit:
            return
        self._close()
        self._prefetch(unit)
        if unit != self._first:
            self._look_ahead(unit, self._before)
        self._acquire(unit)
        self._open = unit

    def _close(self) -> None:
        if self._open is not None:
            self._release(self._open)
            self._open = None


def kept_bytes(device: torch.device) -> int:
    """How many bytes of gathered parameters a chunk keeps between actions."""
    if device.type == "cpu":
        return KEPT_BYTES
    return int(torch.accelerator.get_memory_info(device)[1] * KEPT_PART)


def mark_units(stages: Iterable[nn.Module]) -> dict[int, int]:
    """Number the modules that are gathered and released as one at ZeRO stage 3: the parts of a stage, or, where a model
    lists none, the members of its module lists. Returns the unit of every parameter that belongs to just one, by id."""
    found: dict[int, set[int]] = {}
    number = 0
    for stage in stages:
        for module in _unit_modules(stage):
            setattr(module, UNIT, number)
            for parameter in module.parameters():
                found.setdefault(id(parameter), set()).add(number)
            number += 1
        inside = {id(p) for module in _unit_modules(stage) for p in module.parameters()}
        for parameter in stage.parameters():
            if id(parameter) not in inside:
                found.setdefault(id(parameter), set()).add(-1)
    return {key: next(iter(numbers)) for key, numbers in found.items() if len(numbers) == 1}


def _unit_modules(stage: nn.Module) -> list[nn.Module]:
    if isinstance(stage, Stage):
        return list(stage.parts)
    assert isinstance(stage, Whole)
    if isinstance(stage.model, nn.Sequential) or getattr(stage.model, "stages", None) is not None:
        return [part.module for part in parts_of(stage.model)]
    return [member for module in stage.modules() if isinstance(module, nn.ModuleList) for member in module]
